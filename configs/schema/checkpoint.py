"""``checkpoint``: how often the trainer's whole state is written, and which checkpoints are kept."""

from pydantic import Field

from slipstream.configs.schema.base import Section


class CheckpointConfig(Section):
    """Checkpoints from which a run resumes. They are written to `checkpoints/` in the run folder while
    training continues. `slipstream train RECIPE --resume` continues from the newest sound one
    (docs/recovery.md)."""

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
