"""Youtu-LLM: the latent attention of DeepSeek-V3, without experts."""

from slipstream.bridge.families.deepseek_v3 import latent_decoder
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, integers
from slipstream.bridge.model.geometry import Geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    (hidden,) = integers(hf, "hidden_size")
    stated = {name: value for name, value in hf.items() if (name, value) != ("initializer_range", None)}
    return latent_decoder({"initializer_range": 2 / (5 * hidden) ** 0.5, **stated}, None)
