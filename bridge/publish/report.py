"""The result of a publication. Imports no torch."""

import time
from collections.abc import Generator, Mapping
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
    no_room: str | None = None
    """Why the version has reached no engine yet: there is no room for it. The engines go on as they are."""
    unservable: str | None = None
    """Why no engine of this run can get weights, whatever the transport. A restart changes nothing."""
    unsuited: str | None = None
    """Why no engine of this run can get weights by this transport. Another transport may bring them."""
    cut_off: list[str] = field(default_factory=list[str])
    """Engines of ``failed`` that failed in a step of the transport, and not when they were asked, paused or
    resumed."""
    bytes_sent: int = 0
    """Bytes sent to one engine; the maximum if engines needed different amounts."""
    ways: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the engines' ranks by the memory of the trainer that they read (``transport.ways``). Empty
    for transports without such memory."""
    stall_s: float = 0.0
    """Time from the first pause to the last resume."""
    total_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict[str, float])
    """Time of each step, in the order of the steps. The stall consists of ``pause``, the steps of the
    transport while the engines are paused, and ``resume``."""

    def add_earlier(self, report: "PublishReport", failed: Mapping[str, str]) -> None:
        """Add the times of an earlier attempt at the version, and engines that it has ``failed`` for good."""
        self.failed |= failed
        self.stall_s += report.stall_s
        self.total_s += report.total_s

    @contextmanager
    def timed(self, part: str) -> Generator[None]:
        """Add the time that the block takes to ``part``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts_s[part] = self.parts_s.get(part, 0.0) + time.monotonic() - began
