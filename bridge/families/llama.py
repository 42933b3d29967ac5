"""Llama 2 and 3, and other checkpoints of model_type llama."""

from typing import Any

from bridge.families.dense import dense_mappings as mappings
from bridge.geometry import Geometry, UnsupportedModel, dense_geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    if hf.get("attention_bias", False):
        raise UnsupportedModel(
            "llama: attention_bias=True also biases the output projection, which is not mapped"
        )
    return dense_geometry("llama", hf, qkv_bias=False, qk_norm=False)
