"""The sizes of a decoder-only transformer, read from an HF ``config.json``. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """The HF config asks for something that the bridge cannot map."""


@dataclass(frozen=True)
class Geometry:
    """Sizes and switches that a mapping and the Megatron config are derived from."""

    family: str
    n_layers: int
    hidden: int
    ffn_hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    norm_eps: float
    init_std: float

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the Megatron embedding: the vocabulary rounded up to a multiple of ``tensor``."""
        return -(-self.vocab // tensor) * tensor


def read_config(model_path: Path) -> dict[str, Any]:
    """``config.json`` of an HF checkpoint directory."""
    path = Path(model_path) / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModel(
            f"{path} does not exist: model.path must be an HF checkpoint directory"
        ) from None
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return found


def rope_theta_of(hf: dict[str, Any]) -> float:
    """The rotary base, from either spelling (``rope_theta``, or ``rope_parameters`` since transformers 5)."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"rope type {kind!r} is not mapped; supported: 'default'")
    return float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
"""What has no default: that of transformers would describe some other checkpoint."""


def dense_geometry(family: str, hf: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> Geometry:
    """Geometry of a Llama-shaped dense decoder. Raises UnsupportedModel for what would silently differ."""
    refused = {
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "use_sliding_window": bool(hf.get("use_sliding_window", False)),
        "quantization_config": hf.get("quantization_config") is not None,
    }
    if wrong := [f"{key}={hf.get(key)!r}" for key, bad in refused.items() if bad]:
        raise UnsupportedModel(f"{family}: not mapped: {', '.join(wrong)}")
    if absent := [key for key in _SIZES if not isinstance(hf.get(key), int)]:
        raise UnsupportedModel(f"{family}: config.json has no number for: {', '.join(absent)}")
    heads = hf["num_attention_heads"]
    groups = hf.get("num_key_value_heads") or heads
    if heads % groups:
        raise UnsupportedModel(
            f"{family}: {heads} attention heads do not divide into {groups} key-value groups"
        )
    return Geometry(
        family=family,
        n_layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        ffn_hidden=hf["intermediate_size"],
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        vocab=hf["vocab_size"],
        max_positions=hf["max_position_embeddings"],
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        rope_theta=rope_theta_of(hf),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        init_std=hf.get("initializer_range", 0.02),
    )
