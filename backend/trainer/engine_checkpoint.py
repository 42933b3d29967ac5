"""The HF checkpoint from which engines start: the model's, or a copy of it in the run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.fp8 import engine_fp8, is_stored_for_engines
from slipstream.configs.schema import ModelConfig

COPY = "engine-model"
"""Name of the copy in the run folder."""


@dataclass(frozen=True)
class EngineCheckpoint:
    """The HF checkpoint from which engines start."""

    path: Path
    is_copy: bool
    """It is a copy of `model.path`, in the form in which engines hold the weights."""


def engine_model_of(
    model: ModelConfig, quantization: Literal["fp8"] | None, run: Path, spec: ModelSpec
) -> EngineCheckpoint:
    """Return what engines start from in a run. ``run``: its folder. Raises UnsupportedModel and
    HfCheckpointError.
    """
    fp8 = engine_fp8(quantization, spec)
    if is_stored_for_engines(spec, fp8):
        return EngineCheckpoint(model.path, is_copy=False)
    return EngineCheckpoint(run / COPY, is_copy=True)
