"""The HF checkpoint from which engines start: the model's, or a copy of it in the run folder."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.fp8 import engine_fp8, is_stored_for_engines
from slipstream.configs.schema import RunConfig

COPY = "engine-model"
"""Name of the copy in the run folder."""


@dataclass(frozen=True)
class EngineCheckpoint:
    """The HF checkpoint from which engines start."""

    path: Path
    is_copy: bool
    """It is a copy of `model.path`, in the form in which engines hold the weights."""


def engine_model_of(config: RunConfig, spec: ModelSpec) -> EngineCheckpoint:
    """Return what engines start from in a run. Raises UnsupportedModel and HfCheckpointError."""
    fp8 = engine_fp8(config.rollout.engine.quantization, spec)
    if is_stored_for_engines(spec, fp8):
        return EngineCheckpoint(config.model.path, is_copy=False)
    return EngineCheckpoint(config.run.folder / COPY, is_copy=True)
