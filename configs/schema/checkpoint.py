"""``checkpoint``: how often the trainer's whole state is written, and what is kept of it."""

from pydantic import Field

from slipstream.configs.schema.base import Section


class CheckpointConfig(Section):
    """Checkpoints that a run goes on from. They are written while training goes on."""

    every: int = Field(10, ge=0, description="Training steps from one checkpoint to the next; 0: none.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints that are kept; older ones are deleted.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep every checkpoint whose training step is a multiple of this."
    )
    timeout_s: float = Field(
        1800, gt=0, description="Longest that writing one checkpoint may take before it is given up."
    )
