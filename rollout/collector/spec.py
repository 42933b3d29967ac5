"""What a collector must know to begin. Imports nothing heavy, so that the driver stays light."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CollectorSpec:
    """One life of a collector, as plain data that travels between processes."""

    collector: str
    """Name of the collector, which all of its lives share."""
    life: int
    """Number of this life, from 0."""
    url: str
    """Where the driver listens."""
    key: str
    """Secret of the run."""
    vocab_size: int
    """Number of token ids of the model."""
    logs: Path

    @property
    def name(self) -> str:
        """Name of this life."""
        return f"{self.collector}.{self.life}"

    def __repr__(self) -> str:
        return f"CollectorSpec({self.name!r}, {self.url!r})"

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}
