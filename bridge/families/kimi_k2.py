"""Kimi-K2: DeepSeek-V3 with more and narrower experts, under a ``model_type`` of its own."""

from slipstream.bridge.families import deepseek_v3
from slipstream.bridge.families.deepseek_v3 import mappings
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel
from slipstream.bridge.model.geometry import Geometry

__all__ = ["geometry", "mappings"]

_STATED = ("n_shared_experts", "routed_scaling_factor", "q_lora_rank", "n_group", "topk_group")


def geometry(hf: HfConfig) -> Geometry:
    if missing := [name for name in _STATED if name not in hf]:
        raise UnsupportedModel(
            f"{hf.get('model_type')}: config.json lacks {', '.join(missing)}: transformers has no class of "
            "this type that would say what they are then"
        )
    return deepseek_v3.geometry(hf)
