"""Watermarks: a ledger and the checkpoints of its run say of each other how far they are.

A checkpoint without the part of the ledger that led to it cannot be resumed from: versions would be named
twice, and groups that are in its weights would be trained again. So each checkpoint's record has the
watermark of the ledger, and the ledger has a row for each committed checkpoint. ``check_watermarks`` compares
the two before a run goes on.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Watermark:
    """How far a ledger is. Only what is recorded further on can follow on it."""

    run: str
    """UUID of the run."""
    sequence: int
    """Number of the last transaction."""
    begun: int
    """Largest number of a version that was begun."""
    trained: int
    """Number of groups behind the weights of the version published last."""
