"""Gemma 3, its text model: norms around every block, windows in most layers, two rotary embeddings."""

from dataclasses import replace
from math import sqrt
from typing import cast

from slipstream.bridge.families.parts import decoder_with_post_norms
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, number, refuse
from slipstream.bridge.model.geometry import Geometry, geometry_of, grouped_attention, window_of
from slipstream.bridge.model.mapping import Mappings
from slipstream.bridge.model.rope import Rope, rope_of

__all__ = ["geometry", "mappings"]

THETA, LOCAL_THETA = 1e6, 1e4
"""Bases of the rotary embeddings, of all layers and of those with a window, unless the config states them."""


def geometry(hf: HfConfig) -> Geometry:
    refuse(
        hf,
        hidden_activation=("gelu_pytorch_tanh", None),
        attention_bias=(False, None),
        attn_logit_softcapping=(None,),
        final_logit_softcapping=(None,),
        use_bidirectional_attention=(False, None),
        partial_rotary_factor=(1, None),
    )
    attention = replace(
        grouped_attention(hf, qk_norm=True),
        scale=number(hf, "query_pre_attn_scalar", 256.0) ** -0.5,
    )
    rope, local = _ropes(hf)
    stated = geometry_of(hf, attention, rope)
    return replace(
        stated,
        window=window_of(hf, every=integer(hf, "sliding_window_pattern") or 6, rope=local),
        centered_norms=True,
        post_norms=True,
        embedding_scale=sqrt(stated.hidden),
        activation="geglu",
    )


def _ropes(hf: HfConfig) -> tuple[Rope, Rope]:
    """Read the rotary embeddings of the layers without and with a window.

    transformers 5 writes both in ``rope_parameters``, by the kind of the layer.
    """
    plain = {name: value for name, value in hf.items() if not name.startswith("rope_")}
    stated = hf.get("rope_parameters")
    by_kind: HfConfig = cast("HfConfig", stated) if isinstance(stated, dict) else {}
    full, local = (by_kind.get(kind) for kind in ("full_attention", "sliding_attention"))
    scaling = hf.get("rope_scaling") or None
    if by_kind and (scaling or (full is None and local is None)):
        raise UnsupportedModel(
            f"gemma3_text: config.json has rope_parameters={stated!r} and rope_scaling={scaling!r}; expected "
            "one of them, and in rope_parameters the parameters of full_attention and of sliding_attention"
        )
    full = full or scaling

    def rope(parameters: object, theta: float) -> Rope:
        return rope_of({**plain, "rope_theta": theta, "rope_parameters": parameters})

    ropes = (
        rope(full, number(hf, "rope_theta", THETA)),
        rope(local, number(hf, "rope_local_base_freq", LOCAL_THETA)),
    )
    if "yarn" in {each.kind for each in ropes}:
        raise UnsupportedModel("gemma3_text: rope type 'yarn' is not mapped for layers of two kinds")
    return ropes


def mappings(geometry: Geometry) -> Mappings:
    norms = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return decoder_with_post_norms(geometry, norms)
