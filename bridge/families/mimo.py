"""MiMo-7B: Qwen2 under a ``model_type`` of its own, beside a layer for multi-token prediction."""

from dataclasses import replace

from slipstream.bridge.families import qwen2
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, attention_bias=(True, None))
    return replace(qwen2.geometry(hf), extra_layers=0, extra_prefix="model.mtp_layers.")
