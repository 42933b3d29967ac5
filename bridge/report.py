"""The outcome of a publication, readable without torch."""

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
