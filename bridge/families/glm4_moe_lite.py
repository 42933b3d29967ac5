"""GLM-4.7-Flash: DeepSeek-V3's attention and experts; a list names the layers that have experts.

The norms inside of latent attention use the config's epsilon, as in the engines. transformers has 1e-6 there,
whatever the config says.
"""

from typing import cast

from slipstream.bridge.families import deepseek_v3
from slipstream.bridge.families.deepseek_v3 import mappings
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, integers
from slipstream.bridge.model.geometry import Geometry

__all__ = ["dense_layers", "geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    return deepseek_v3.geometry({**hf, "first_k_dense_replace": dense_layers(hf, default=1)})


def dense_layers(hf: HfConfig, *, default: int) -> int:
    """Return the number of layers without experts, all of which must come first.

    ``default``: the number if the config does not state it.
    """
    (layers,) = integers(hf, "num_hidden_layers")
    kinds, stated = hf.get("mlp_layer_types"), integer(hf, "first_k_dense_replace")
    if kinds is None:
        return default if stated is None else stated
    dense = cast("list[object]", kinds).count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedModel(
            f"{hf['model_type']}: mlp_layer_types is {kinds!r} in config.json, expected {layers} kinds, "
            "first 'dense' and then 'sparse'"
        )
    if stated not in (None, dense):
        raise UnsupportedModel(
            f"{hf['model_type']}: mlp_layer_types in config.json has {dense} dense layers, and "
            f"first_k_dense_replace is {stated}; expected the same number"
        )
    return dense
