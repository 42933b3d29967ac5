"""The progress of a ledger in a checkpoint. ``backend/checkpoint/watermarks.py`` compares the two."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Watermark:
    """Numbers that only grow, but for ``trained``."""

    run: str
    """UUID of the run."""
    sequence: int
    """Number of the last transaction."""
    begun: int
    """Largest number of a version that was begun."""
    trained: int
    """Number of groups and turns behind the weights of the version published last."""
