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
    """Engines that may hold wrong weights, and why."""
    interrupted: dict[str, str] = field(default_factory=dict)
    """Engines that are well, but have got a part of the weights only, because of another one. They stand
    still until they are published to again."""
    bytes_sent: int = 0
    """To one engine, or to all at once; the most that any of them needed."""
    stall_s: float = 0.0
    """From the first engine paused to the last one resumed."""
    total_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    """Where the time went, by step, in their order. The stall is ``pause``, what the transport does while
    the engines stand still, and ``resume``."""

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts_s[part] = self.parts_s.get(part, 0.0) + time.monotonic() - began

    def repeated(self, again: "PublishReport") -> "PublishReport":
        """With what publishing the same version again to the interrupted engines did."""
        parts_s = dict(self.parts_s)
        for part, seconds in again.parts_s.items():
            parts_s[part] = parts_s.get(part, 0.0) + seconds
        return PublishReport(
            self.version,
            [*self.updated, *again.updated],
            self.failed | again.failed | again.interrupted,
            {},
            self.bytes_sent + again.bytes_sent,
            self.stall_s + again.stall_s,
            self.total_s + again.total_s,
            parts_s,
        )
