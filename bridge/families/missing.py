"""The parts of a model that the bridge and Megatron lack here, by its ``config.json``. Imports no torch.

A model of a ``model_type`` without a family may still have the tensors of a family that is mapped, and other
mathematics. So no family is guessed from names: this module says what would be missing. Most parts show in a
setting; those that a model always has, and its config does not mention, are listed by ``model_type``.
"""

from collections.abc import Iterator, Sequence
from typing import cast

from slipstream.bridge.hf.config import HfConfig
from slipstream.bridge.model.geometry import CLAMP
from slipstream.bridge.model.rope import SEVERAL_POSITIONS, read_parameters

_POST_NORMS = "norms after attention and feed-forward, and none before them"
_PLAIN_LAYER_NORM = "LayerNorm without biases"
_PARALLEL = "attention and feed-forward side by side"
_NO_GATE = "a feed-forward network without a gate"
_ENCODER = "an encoder"

STRUCTURE: dict[str, tuple[str, ...]] = {
    "afmoe": ("a gate on the attention output with a projection of its own",),
    "apertus": (_NO_GATE,),
    "bert": (_ENCODER,),
    "bitnet": ("norms inside of attention and feed-forward",),
    "bloom": ("position biases (ALiBi) instead of rotary embeddings", _NO_GATE),
    "cohere": (_PLAIN_LAYER_NORM, _PARALLEL),
    "cohere2": (_PLAIN_LAYER_NORM, _PARALLEL),
    "cohere2_moe": (_PLAIN_LAYER_NORM, _PARALLEL),
    "dbrx": (_PLAIN_LAYER_NORM,),
    "deepseek_v4": ("compressed attention", "hyper-connections"),
    "diffllama": ("differential attention",),
    "falcon": (_NO_GATE,),
    "gemma3n": ("embeddings for each layer", "alternating updates"),
    "gemma3n_text": ("embeddings for each layer", "alternating updates"),
    "gemma4": ("other head sizes in some layers",),
    "gemma4_text": ("other head sizes in some layers",),
    "gpt2": (_NO_GATE, "learned positions instead of rotary embeddings"),
    "gpt_neox": (_NO_GATE,),
    "hunyuan_v1_dense": ("norms of queries and keys after the rotation",),
    "hunyuan_v1_moe": ("norms of queries and keys after the rotation",),
    "llama4": ("weighted inputs of experts", "norms without weights of queries and keys"),
    "llama4_text": ("weighted inputs of experts", "norms without weights of queries and keys"),
    "longcat_flash": ("two attention blocks in a layer", "experts that pass their input on"),
    "ministral3": ("queries scaled by their position",),
    "mistral4": ("queries scaled by their position",),
    "mpt": (_PLAIN_LAYER_NORM, "position biases (ALiBi) instead of rotary embeddings", _NO_GATE),
    "nanochat": (
        "norms without weights",
        "norms of queries and keys after the rotation",
        "a norm after the embedding",
        _NO_GATE,
    ),
    "nemotron_h": ("one mixer in a layer",),
    "olmo": ("LayerNorm without weights",),
    "opt": (_NO_GATE, "learned positions instead of rotary embeddings"),
    "phi": (_NO_GATE, _PARALLEL),
    "phimoe": ("a router with sparse mixing",),
    "starcoder2": (_NO_GATE,),
    "t5": (_ENCODER,),
}
"""Parts that the models of a ``model_type`` always have, whatever their settings."""

EXAMINED = frozenset(STRUCTURE) | {
    *("dots1", "ernie4_5_moe", "falcon_h1", "gemma2", "granitemoehybrid", "internlm3", "jamba"),
    *("kimi_linear", "lfm2", "mamba2", "minicpm", "minimax_text_01", "mllama", "olmo3"),
}
"""The ``model_type`` of models without a family whose code was read. Any other may have parts that no setting
shows."""

_NEUTRAL: dict[str, tuple[str, tuple[object, ...]]] = {
    "attn_logit_softcapping": ("softcapping of attention scores", (None,)),
    "final_logit_softcapping": ("softcapping of logits", (None,)),
    "clip_qkv": ("clipping of query, key and value", (None,)),
    "postnorm": (_POST_NORMS, (None, False)),
    "mla_use_nope": ("no rotary embeddings in any layer", (None, False)),
    "attn_temperature_tuning": ("queries scaled by their position", (None, False)),
    "alibi": ("position biases (ALiBi) instead of rotary embeddings", (None, False)),
    "parallel_attn": (_PARALLEL, (None, False)),
    "use_parallel_residual": (_PARALLEL, (None, False)),
    "swiglu_limit": ("SwiGLU with another clamp", (None, CLAMP)),
    "mlp_bias": ("biases of the feed-forward network", (None, False)),
    "attention_out_bias": ("a bias of the attention output", (None, False)),
    "use_bias": ("biases of linear layers", (None, False)),
    "lm_head_bias": ("a bias of the head", (None, False)),
    "qk_layernorm": ("LayerNorm of queries and keys", (None, False)),
    "is_encoder_decoder": (_ENCODER, (None, False)),
    "num_kv_shared_layers": ("layers that share keys and values", (None, 0)),
    "kv_sharing_layers": ("layers that share keys and values", (None, 0)),
    "router_jitter_noise": ("noise in the router", (None, 0, 0.0)),
    "moe_norm_min": ("expert weights with a lower limit of their sum", (None,)),
    "zero_expert_num": ("experts that pass their input on", (None, 0)),
    "scoring_func": ("a router with other scores", (None, "softmax", "sigmoid", "noaux_tc")),
    "topk_method": ("a router with another choice", (None, "noaux_tc", "greedy")),
    "index_topk_blocks": ("sparse attention, for which an indexer chooses blocks", (None,)),
}
"""Part for which a setting stands, unless it has one of the neutral values."""

_LAYER_KINDS = {
    "linear_attention": "linear attention",
    "chunked_attention": "attention in chunks",
    "mamba": "state space layers",
    "conv": "convolutions instead of attention",
    "hybrid": "attention beside state space layers",
    "recurrent": "recurrent layers",
}
"""Part for which an entry of ``layer_types`` stands; full and sliding attention are read apart."""

_STATE_SPACE = ("mamba_d_state", "ssm_state_size", "state_size", "ssm_cfg", "hybrid_override_pattern")
_ACTIVATIONS = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function", "activation")
_MAPPED_ACTIVATIONS = ("silu", "swish", "swiglu", "gelu_pytorch_tanh")


_WITHOUT_WINDOWS = ("mistral", "qwen2", "qwen3", "qwen3_moe")
"""Types that SGLang serves without their windows."""


def missing_parts(hf: HfConfig) -> list[str]:
    """Return the parts of the model that are not mapped, in the order of a forward pass.

    For a model that reads more than text they are those of its language model.
    """
    text = _object(hf, "text_config") or hf
    parts = [
        *_of_layers(text),
        *_of_positions(text),
        *STRUCTURE.get(str(hf.get("model_type")), ()),
        *STRUCTURE.get(str(text.get("model_type")), ()),
        *_of_settings(hf),
        *_of_settings(text),
        *_of_router(text),
    ]
    by_name: dict[str, str] = {}
    for part in parts:  # one with its setting says more than one of a model_type
        name, setting, _ = part.partition(" (")
        if setting or name not in by_name:
            by_name[name] = part
    if any(text.get(name) in _ungated(text) for name in _ACTIVATIONS):
        by_name.pop(_NO_GATE, None)
    return list(by_name.values())


def _of_layers(hf: HfConfig) -> Iterator[str]:
    """Yield kinds of attention that some layers have, or what they have instead."""
    stated = hf.get("layer_types")
    kinds = [str(kind) for kind in cast("list[object]", stated)] if isinstance(stated, list) else []
    windows, size = _windows(hf, kinds)
    if windows and hf.get("model_type") in _WITHOUT_WINDOWS:
        yield f"attention in windows of {size} tokens in {_layers(windows, _n_layers(hf))}"
    if not kinds and isinstance(hf.get("attn_type_list"), list):
        kinds = ["" if kind else "linear_attention" for kind in cast("list[int]", hf["attn_type_list"])]
    if isinstance(hf.get("linear_attn_config"), dict):
        yield "linear attention (linear_attn_config)"
    for kind, part in _LAYER_KINDS.items():
        if kind == "linear_attention" and hf.get("linear_num_key_heads") is not None:
            continue  # that of the gated delta rule is mapped
        if places := [place for place, each in enumerate(kinds) if each == kind]:
            yield f"{part} in {_layers(places, len(kinds))}"
    if not any(part in kinds for part in ("mamba", "hybrid")):
        named = [name for name in _STATE_SPACE if hf.get(name) is not None]
        if named:
            yield f"state space layers ({named[0]})"
    if not kinds and hf.get("attention_chunk_size") is not None:
        yield f"attention in chunks of {hf['attention_chunk_size']} tokens"
    if hf.get("cross_attention_layers"):
        yield "cross-attention to images"


def _windows(hf: HfConfig, kinds: Sequence[str]) -> tuple[list[int], object]:
    """Return the layers with a window that is shorter than the context, and its size."""
    size, layers = hf.get("sliding_window"), _n_layers(hf)
    positions = hf.get("max_position_embeddings")
    if not isinstance(size, int) or (isinstance(positions, int) and size >= positions):
        return [], size
    if kinds:
        return [place for place, kind in enumerate(kinds) if kind == "sliding_attention"], size
    if "use_sliding_window" in hf or "max_window_layers" in hf:
        first = hf.get("max_window_layers")
        used = bool(hf.get("use_sliding_window", False))
        return list(range(first if isinstance(first, int) else 0, layers)) if used else [], size
    pattern = hf.get("sliding_window_pattern", hf.get("global_attn_every_n_layers"))
    if isinstance(pattern, str):  # one letter for each layer of a period: L has a window
        return [i for i in range(layers) if pattern[i % len(pattern)] == "L"], size
    if isinstance(pattern, int):
        return [i for i in range(layers) if (i + 1) % pattern], size
    return list(range(layers)), size


def _n_layers(hf: HfConfig) -> int:
    layers = hf.get("num_hidden_layers")
    return layers if isinstance(layers, int) else 0


def _layers(places: Sequence[int], count: int) -> str:
    """Return the places as text.

    >>> _layers([0, 1, 2, 4], 6), _layers([0, 1], 2)
    ('layers 0, 1, 2 and 1 other', 'all layers')
    """
    if len(places) >= count:
        return "all layers"
    shown, rest = ", ".join(map(str, places[:3])), len(places) - 3
    text = f"layer{'s' * (len(places) > 1)} {shown}"
    return text if rest <= 0 else f"{text} and {rest} other{'s' * (rest > 1)}"


def _of_positions(hf: HfConfig) -> Iterator[str]:
    stated = _object(hf, "rope_parameters") or _object(hf, "rope_scaling")
    if any(isinstance(each, dict) for each in stated.values()):
        return  # two rotary embeddings, by the kind of the layer
    kind = stated.get("rope_type", stated.get("type", "default"))
    known = read_parameters("default" if kind == "mrope" else kind)
    if known is None:
        yield f"rotary embeddings of type {kind}"
    else:
        unread = {name for name, value in stated.items() if value is not None} - known - SEVERAL_POSITIONS
        if _SCALED_QUERIES in unread:
            yield f"queries scaled by their position ({_SCALED_QUERIES}={stated[_SCALED_QUERIES]})"
        if unread := unread - {_SCALED_QUERIES}:
            yield f"rotary embeddings of type {kind} with {', '.join(sorted(unread))}"
    if hf.get("position_embedding_type") == "nope":
        yield "no rotary embeddings in any layer"


def _object(hf: HfConfig, name: str) -> HfConfig:
    """Return a JSON object of the config; an empty one if it has none of that name."""
    value = hf.get(name)
    return cast("HfConfig", value) if isinstance(value, dict) else {}


def _of_settings(hf: HfConfig) -> Iterator[str]:
    for name, (part, neutral) in _NEUTRAL.items():
        if name in hf and hf[name] not in neutral:
            yield f"{part} ({name}={hf[name]})"
    for name in _ACTIVATIONS:
        if isinstance(hf.get(name), str) and hf[name] not in (*_MAPPED_ACTIVATIONS, *_ungated(hf)):
            yield f"activation {hf[name]}"
    if hf.get("attention_bias") and hf.get("model_type") not in _MAPPED_BIASES:
        yield "a bias of the attention output (attention_bias)"


def _ungated(hf: HfConfig) -> tuple[str, ...]:
    """Return the activations that are mapped for a model without gates."""
    kind = str(hf.get("model_type"))
    return ("relu2",) if kind in ("arcee", "nemotron") or _NO_GATE in STRUCTURE.get(kind, ()) else ()


_SCALED_QUERIES = "llama_4_scaling_beta"
_MAPPED_BIASES = (
    *("glm", "glm4", "glm4_moe", "glm4v_moe", "glm4v_moe_text", "glm4v_text"),
    *("gpt_oss", "mimo", "seed_oss"),
)
"""Types whose ``attention_bias`` leaves out the output projection, or stands for biases everywhere."""


def _of_router(hf: HfConfig) -> Iterator[str]:
    if hf.get("topk_method") == "greedy" and hf.get("scoring_func") in (None, "softmax"):
        factor = hf.get("routed_scaling_factor")
        if factor not in (None, 1, 1.0) and not hf.get("norm_topk_prob"):
            yield f"softmax weights of experts with a factor (routed_scaling_factor={factor})"
    if hf.get("interleave_moe_layer_step") is not None and hf.get("num_experts_per_tok") == 1:
        yield "one expert for a token, with a sigmoid of its score"
