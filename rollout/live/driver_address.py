"""The address at which a driver listens for gateways: a file in the run folder that only its owner can read.

A gateway outlives a connection, and may outlive the driver: the next one listens elsewhere, with another key.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.key import Key

FOLDER = "gateway"
"""Folder of the run folder in which gateways and the driver find each other, with the journals."""

_FILE = "driver.json"


@dataclass(frozen=True)
class DriverAddress:
    """Address of the receiver, and the secret of the run."""

    url: str
    key: Key

    def write(self, run: Path) -> None:
        """Publish the address in a run folder. Raises OSError."""
        folder = run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / _FILE, json.dumps({"url": self.url, "key": str(self.key)}), mode=0o600)

    @classmethod
    def read(cls, run: Path) -> "DriverAddress | None":
        """Return the address; None if there is none, or none that can be read."""
        try:
            values = json.loads((run / FOLDER / _FILE).read_text(encoding="utf-8"))
            return cls(str(values["url"]), Key(values["key"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
