"""Rotary position embeddings as HF configs describe them. Imports no torch.

The frequencies are computed here and handed to Megatron: its own options cover fewer variants and fix
constants that checkpoints set to other values.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, number, optional_number

Kind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Position p rotates the i-th pair of dimensions by the angle ``p * frequencies(dimensions)[i]``."""

    kind: Kind = "default"
    theta: float = 10000.0
    fraction: float = 1.0
    """Share of each head's dimensions that is rotated, from the first one on."""
    factor: float = 1.0
    """Factor by which sequences may exceed ``original_positions``."""
    original_positions: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    """llama3: wavelengths above ``original_positions / low_frequency`` are stretched by ``factor``, those
    below ``original_positions / high_frequency`` are kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: the two limits, in rotations over ``original_positions``."""
    magnitude: float | None = None
    magnitude_all: float | None = None
    """yarn: ``mscale`` and ``mscale_all_dim``."""
    truncate: bool = True
    """yarn: round the limits to whole dimensions."""
    interleaved: bool = False
    """The two dimensions of a pair are neighbours. Otherwise half of the rotated dimensions are between them.
    Latent attention has neighbours always, whatever stands here."""

    def frequencies(self, dimensions: int) -> list[float]:
        """Return [dimensions / 2] radians per position. ``dimensions``: rotated dimensions of a head."""
        plain = [self.theta ** (-2 * i / dimensions) for i in range(dimensions // 2)]
        match self.kind:
            case "default":
                return plain
            case "linear":
                return [f / self.factor for f in plain]
            case "llama3":
                return [self._llama3(f) for f in plain]
            case "yarn":
                low, high = self._yarn_limits(dimensions)
                ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain))]
                return [f * (1 - r) + f / self.factor * r for f, r in zip(plain, ramp, strict=True)]

    def _llama3(self, frequency: float) -> float:
        rotations = self.original_positions * frequency / (2 * math.pi)
        smooth = (rotations - self.low_frequency) / (self.high_frequency - self.low_frequency)
        smooth = min(max(smooth, 0.0), 1.0)
        return (1 - smooth) * frequency / self.factor + smooth * frequency

    def _yarn_limits(self, dimensions: int) -> tuple[float, float]:
        def dimension_of(rotations: float) -> float:
            wavelength = self.original_positions / (rotations * 2 * math.pi)
            return dimensions * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dimensions - 1)
        return low, high + 0.001 if low == high else high


_PARAMETERS: dict[str, set[str]] = {
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
"""Parameters that each kind reads."""
SEVERAL_POSITIONS = {"mrope_section", "mrope_interleaved"}
"""Parameters of ``mrope``: which of three positions rotates which dimensions of a token of an image. Those of
a token of text are equal, so it is rotated as by ``default``."""
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Parameters that a config may have beside the others instead of among them."""
_COMMON_PARAMETERS = {"rope_type", "type", *_BESIDE}


def read_parameters(kind: object) -> set[str] | None:
    """Return the parameters that are read of rotary embeddings of this kind; None: it is not mapped."""
    parameters = _PARAMETERS.get(kind) if isinstance(kind, str) else None
    return None if parameters is None else parameters | _COMMON_PARAMETERS


def rope_of(hf: HfConfig, *, fraction: float | None = None, theta: float = 10000.0) -> Rope:
    """Read ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` as transformers 5 writes it.

    ``fraction`` and ``theta``: the family's defaults for ``partial_rotary_factor`` and ``rope_theta``;
    ``fraction`` None: the family rotates whole heads, and its class ignores the setting. Raises
    UnsupportedModel for a kind or a parameter that is not read here, so that none is ignored.
    """
    parameters = _parameters(hf, theta)
    kind = parameters.get("rope_type", "default")
    if (known := read_parameters(kind)) is None:
        raise UnsupportedModel(f"rope type {kind!r} is not mapped; supported: {', '.join(_PARAMETERS)}")
    if unknown := parameters.keys() - known:
        raise UnsupportedModel(f"rope type {kind!r} with {', '.join(sorted(unknown))} is not mapped")
    if kind != "default" and "factor" not in parameters:
        raise UnsupportedModel(f"rope type {kind!r} without a factor")
    positions = integer(hf, "max_position_embeddings") or 0
    share = optional_number(parameters, "partial_rotary_factor")
    share = optional_number(hf, "partial_rotary_factor") if share is None else share
    if fraction is None and share not in (None, 1.0):
        raise UnsupportedModel(
            f"{hf.get('model_type')}: partial_rotary_factor is {share} in config.json, and models of this "
            "type rotate whole heads whatever it says; remove it, or name the type that the model has"
        )
    return Rope(
        kind=cast("Kind", kind),
        theta=number(parameters, "rope_theta", number(hf, "rope_theta", theta)),
        fraction=share or fraction or 1.0,
        factor=number(parameters, "factor", 1.0),
        original_positions=int(number(parameters, "original_max_position_embeddings", positions)),
        low_frequency=number(parameters, "low_freq_factor", 1.0),
        high_frequency=number(parameters, "high_freq_factor", 4.0),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        magnitude=optional_number(parameters, "mscale"),
        magnitude_all=optional_number(parameters, "mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _parameters(hf: HfConfig, theta: float) -> HfConfig:
    new, old = _object(hf, "rope_parameters"), _object(hf, "rope_scaling")
    beside = {"rope_theta": theta} | {name: hf[name] for name in _BESIDE if hf.get(name) is not None}
    if new and old and {**beside, **new} != {**beside, **old}:
        raise UnsupportedModel(
            f"{hf.get('model_type')}: config.json has rope_parameters={hf['rope_parameters']!r} and "
            f"rope_scaling={hf['rope_scaling']!r}, two names of one setting with other values: transformers "
            "takes rope_scaling, with the rope_theta beside it; keep one of them, with all parameters in it"
        )
    return new or old


def _object(hf: HfConfig, name: str) -> HfConfig:
    """Return the parameters in a setting that are not null, with one spelling of the kind."""
    stated: object = hf.get(name) or {}
    if not isinstance(stated, dict):
        raise UnsupportedModel(f"{name} is {stated!r} in config.json, expected a JSON object")
    parameters = {
        key: value
        for key, value in cast("HfConfig", stated).items()
        if value is not None and key not in SEVERAL_POSITIONS
    }
    kind = parameters.pop("type", None)
    if kind is not None:
        parameters.setdefault("rope_type", kind)
    if parameters.get("rope_type") == "mrope":
        parameters["rope_type"] = "default"
    return parameters
