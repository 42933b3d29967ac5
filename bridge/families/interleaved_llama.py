"""Helium, and ERNIE 4.5 without experts: Llama, whose rotated pairs of dimensions are neighbours."""

from dataclasses import replace

from slipstream.bridge.families import llama
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, refuse
from slipstream.bridge.model.geometry import Geometry

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    refuse(hf, use_bias=(False, None))
    stated = llama.geometry(hf)
    return replace(stated, rope=replace(stated.rope, interleaved=True))
