"""Kimi-K2: DeepSeek-V3 with more and narrower experts, under a ``model_type`` of its own."""

from slipstream.bridge.families.deepseek_v3 import geometry, mappings

__all__ = ["geometry", "mappings"]
