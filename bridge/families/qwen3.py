"""Qwen3: a norm on each head's query and key."""

from typing import Any

from bridge.families.dense import dense_mappings as mappings
from bridge.geometry import Geometry, UnsupportedModel, dense_geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    if hf.get("attention_bias", False):
        raise UnsupportedModel(
            "qwen3: attention_bias=True also biases the output projection, which is not mapped"
        )
    return dense_geometry("qwen3", hf, qkv_bias=False, qk_norm=True)
