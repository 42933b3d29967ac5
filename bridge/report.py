"""The outcome of a publication, readable without torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PublishReport:
    """What one publication did. Times in seconds."""

    version: int
    updated: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    bytes_sent: int = 0
    stall_s: float = 0.0
    """From the first engine paused to the last one resumed."""
    total_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    """Where the time went: ``gather`` (the first bucket) and ``join`` come before the stall; ``pause``,
    ``begin``, ``send`` (all buckets, the others gathered meanwhile), ``end`` and ``resume`` are the stall."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts_s[part] = self.parts_s.get(part, 0.0) + time.monotonic() - began
