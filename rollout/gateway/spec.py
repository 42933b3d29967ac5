"""The specification of a gateway process, and the parts of its endpoints and sessions. Plain data and
protocols: ``gateway_process.py`` runs what ``compose.py`` makes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from slipstream.configs.schema import GatewayConfig, RunConfig
from slipstream.rollout.gateway.conversations import KeyRing
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.source import TokenSource
from slipstream.rollout.system.key import Application
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.turn_entries import Entry

RECIPE = "recipe.yaml"
"""The recipe in the run folder, with every default filled in."""


@dataclass(frozen=True)
class GatewaySpec:
    """One gateway process."""

    number: int
    """From 0."""
    processes: int
    """Number of gateway processes of the run."""
    context: int
    """Largest number of tokens of prompt and completion together: the engines' limit."""
    linger_s: float
    """Longest time that the process goes on without a driver."""
    config: RunConfig
    """The recipe of the run, which has a gateway section."""

    @property
    def gateway(self) -> GatewayConfig:
        assert self.config.gateway is not None, "the recipe has no gateway section"
        return self.config.gateway

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.config.run.folder

    @classmethod
    def read(cls, argument: str) -> "GatewaySpec":
        """Return the specification that the argument of the program is. Raises ValueError, OSError."""
        try:
            values = json.loads(argument)
            recipe = yaml.safe_load((Path(values["run"]) / RECIPE).read_text(encoding="utf-8"))
            config = RunConfig.model_validate_json(json.dumps(recipe))
            number, processes, context = (int(values[name]) for name in ("number", "processes", "context"))
            return cls(number, processes, context, float(values["linger_s"]), config)
        except (KeyError, TypeError, yaml.YAMLError) as error:
            raise ValueError(f"not the specification of a gateway process: {error!r}") from error


@dataclass(frozen=True)
class GatewaySurroundings:
    """The parts from which the endpoints and sessions of a process are made."""

    spec: GatewaySpec
    source: TokenSource
    journal: TurnJournal
    keys: KeyRing
    retained: Iterable[tuple[int, Entry]]
    """The entries of sessions that go on, with their numbers, in order. To be used up at once."""
    decode: Decode
    """Returns the text of token ids."""
    mint: Callable[[], str]
    """Returns a new name of a session or a response, which nobody can guess and which belongs here."""


class Served(Protocol):
    """The endpoints and sessions of a process."""

    @property
    def app(self) -> Application:
        """The application that users reach."""
        ...

    @property
    def figures(self) -> Application:
        """The application that shows figures. It changes nothing."""
        ...

    def sweep(self, now_s: float) -> Sequence[Entry]:
        """End the sessions that have rested for too long. ``now_s``: by ``steady_s``."""
        ...

    def forget(self, session: str | None, key: str | None) -> Sequence[Entry]:
        """Drop a session, the sessions of a key, or the session of a key."""
        ...

    async def close(self) -> None:
        """Cancel all turns that run, and wait until they are recorded."""
        ...


Build = Callable[[GatewaySurroundings], Served]
