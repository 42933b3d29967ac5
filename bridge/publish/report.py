"""The result of a publication. Imports no torch."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PublishReport:
    """The result of one publication. Times are in seconds."""

    version: int
    updated: list[str] = field(default_factory=list[str])
    """Engines that hold the version."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Engines that may hold wrong weights, each with the reason."""
    interrupted: dict[str, str] = field(default_factory=dict[str, str])
    """Engines whose transfer was cut short by another engine's failure, each with the reason. They stay
    paused until they get the whole version."""
    bytes_sent: int = 0
    """Bytes sent to one engine, or broadcast to all; the maximum if engines needed different amounts."""
    stall_s: float = 0.0
    """Time from the first pause to the last resume."""
    total_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict[str, float])
    """Time of each step, in the order of the steps. The stall consists of ``pause``, the steps of the
    transport while the engines are paused, and ``resume``."""

    @contextmanager
    def timed(self, part: str) -> Generator[None]:
        """Add the time that the block takes to ``part``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts_s[part] = self.parts_s.get(part, 0.0) + time.monotonic() - began

    def merged(self, repeat: "PublishReport") -> "PublishReport":
        """Return the sum of this report and that of the repeat to the interrupted engines.

        An engine that the repeat interrupts as well counts as failed.
        """
        parts_s = dict(self.parts_s)
        for part, seconds in repeat.parts_s.items():
            parts_s[part] = parts_s.get(part, 0.0) + seconds
        return PublishReport(
            self.version,
            [*self.updated, *repeat.updated],
            self.failed | repeat.failed | repeat.interrupted,
            {},
            self.bytes_sent + repeat.bytes_sent,
            self.stall_s + repeat.stall_s,
            self.total_s + repeat.total_s,
            parts_s,
        )
