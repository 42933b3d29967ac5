"""Rotary position embeddings as HF configs describe them. Imports no torch.

The frequencies are computed here, once, and given to Megatron: its own options cover fewer variants, and
fix constants that checkpoints state otherwise.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.bridge.hf_config import UnsupportedModel

Kind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """The rotation of position p in the i-th pair of dimensions is ``p * frequencies(dimensions)[i]``."""

    kind: Kind = "default"
    theta: float = 10000.0
    fraction: float = 1.0
    """Of each head's dimensions, the first ones are rotated."""
    factor: float = 1.0
    """How much longer than ``original_positions`` sequences may be."""
    original_positions: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    """llama3: wavelengths above original positions / low are stretched, below original / high not."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: the same borders, in rotations over the original positions."""
    magnitude: float | None = None
    magnitude_all: float | None = None
    """yarn: ``mscale`` and ``mscale_all_dim``."""
    truncate: bool = True
    """yarn: the borders are whole dimensions."""

    def frequencies(self, dimensions: int) -> list[float]:
        """[dimensions / 2] radians per position. ``dimensions``: those of a head that are rotated."""
        plain = [self.theta ** (-2 * i / dimensions) for i in range(dimensions // 2)]
        match self.kind:
            case "default":
                return plain
            case "linear":
                return [f / self.factor for f in plain]
            case "llama3":
                return [self._llama3(f) for f in plain]
            case "yarn":
                low, high = self._yarn_borders(dimensions)
                ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
                return [f * (1 - r) + f / self.factor * r for f, r in zip(plain, ramp, strict=True)]

    def _llama3(self, frequency: float) -> float:
        rotations = self.original_positions * frequency / (2 * math.pi)
        smooth = (rotations - self.low_frequency) / (self.high_frequency - self.low_frequency)
        smooth = min(max(smooth, 0.0), 1.0)
        return (1 - smooth) * frequency / self.factor + smooth * frequency

    def _yarn_borders(self, dimensions: int) -> tuple[float, float]:
        def dimension_of(rotations: float) -> float:
            wavelength = self.original_positions / (rotations * 2 * math.pi)
            return dimensions * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dimensions - 1)
        return low, high + 0.001 if low == high else high

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.magnitude and self.magnitude_all:
            return _magnitude(self.factor, self.magnitude) / _magnitude(self.factor, self.magnitude_all)
        return _magnitude(self.factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_of(hf: dict[str, Any], *, fraction: float = 1.0) -> Rope:
    """From either spelling: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` since transformers 5.

    ``fraction``: what ``partial_rotary_factor`` is when the config does not say. Raises UnsupportedModel for
    a variant or a parameter that is not known, instead of leaving it out.
    """
    found = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise UnsupportedModel(f"rope parameters are {found!r}, a mapping is expected")
    found = {key: value for key, value in found.items() if value is not None}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in _KNOWN:
        raise UnsupportedModel(f"rope type {kind!r} is not mapped; supported: {', '.join(_KNOWN)}")
    if unknown := found.keys() - _KNOWN[kind] - _ALWAYS:
        raise UnsupportedModel(f"rope type {kind!r} with {', '.join(sorted(unknown))} is not mapped")
    if kind != "default" and "factor" not in found:
        raise UnsupportedModel(f"rope type {kind!r} without a factor")
    positions = hf.get("max_position_embeddings", 0)
    return Rope(
        kind=kind,
        theta=float(found.get("rope_theta", hf.get("rope_theta", 10000.0))),
        fraction=float(
            found.get("partial_rotary_factor", hf.get("partial_rotary_factor", fraction)) or fraction
        ),
        factor=float(found.get("factor", 1.0)),
        original_positions=int(found.get("original_max_position_embeddings", positions)),
        low_frequency=float(found.get("low_freq_factor", 1.0)),
        high_frequency=float(found.get("high_freq_factor", 4.0)),
        beta_fast=float(found.get("beta_fast", 32.0)),
        beta_slow=float(found.get("beta_slow", 1.0)),
        magnitude=found.get("mscale"),
        magnitude_all=found.get("mscale_all_dim"),
        truncate=bool(found.get("truncate", True)),
    )
