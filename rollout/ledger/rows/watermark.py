"""The progress of a ledger in a checkpoint. ``backend/checkpoint/watermarks.py`` compares the two."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Watermark:
    """The progress of a ledger. Its numbers only grow, except ``trained``, which a restart may lower."""

    run: str
    """UUID of the run."""
    sequence: int
    """Number of the last transaction."""
    begun: int
    """Largest number of a version that was begun."""
    trained: int
    """Number of groups and turns that the version published last was trained on, ancestors included."""
