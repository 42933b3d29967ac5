"""The data that a collector begins with. Imports nothing heavy, so that the driver stays light."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.system.key import Key


@dataclass(frozen=True)
class CollectorSpec:
    """One life of a collector, as plain data that travels between processes."""

    collector: str
    """Name of the collector, which all of its lives share."""
    life: int
    """Number of this life, from 0."""
    url: str
    """Where the driver listens."""
    key: Key
    """Secret of the run."""
    vocab_size: int
    """Number of token ids of the model."""
    context: int
    """Largest number of tokens of prompt and completion together."""
    logs: Path
    number: int = 0
    """Number of the collector, from 0."""
    count: int = 1
    """Number of collectors of the run."""

    @property
    def name(self) -> str:
        """Name of this life."""
        return f"{self.collector}.{self.life}"

    def headers(self) -> dict[str, str]:
        return {"Authorization": self.key.header}
