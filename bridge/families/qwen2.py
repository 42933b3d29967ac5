"""Qwen2 and Qwen2.5: a bias on query, key and value."""

from typing import Any

from bridge.families.dense import dense_mappings as mappings
from bridge.geometry import Geometry, dense_geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: dict[str, Any]) -> Geometry:
    return dense_geometry("qwen2", hf, qkv_bias=True, qk_norm=False)
