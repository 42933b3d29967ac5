"""``checkpoint``: how often and where the trainer's whole state is written, and what is kept of it."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from slipstream.configs.schema.base import PathSetting, Section


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path, which every node of the trainer has")
    return path


class CheckpointConfig(Section):
    """How often checkpoints are taken, and which are kept."""

    every: int = Field(
        default=10, ge=0, description="Number of training steps between two checkpoints; 0 writes none."
    )
    keep_last: int = Field(
        default=2, ge=1, description="Number of newest checkpoints to keep; older ones are deleted."
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="Also keep every checkpoint whose training step is a multiple of this number.",
    )
    timeout_s: float = Field(
        default=1800, gt=0, description="Seconds after which the writing of one checkpoint is given up."
    )


class RunCheckpointConfig(CheckpointConfig):
    """Checkpoints from which a run resumes. They are written to `checkpoints/` in the run folder while
    training continues. `slipstream train RECIPE --resume` continues from the newest sound one
    (docs/recovery.md)."""

    local_dir: Annotated[PathSetting, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="Folder on a disk of each node, such as `/scratch`. Every checkpoint is first written "
        "there by each rank, with a copy on the trainer's next node, then to the run folder. A trainer that "
        "is started again within the job takes the newest one that is whole on the nodes that are left. "
        "Nodes keep at most `checkpoint.keep_last`, none older than the newest in the run folder, and none "
        "after a run that ends in order. null: the run folder only.",
    )
