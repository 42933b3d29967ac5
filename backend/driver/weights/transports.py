"""Which transport versions leave by: the recipe's, or the next one if its first publication fails.

    on trial ──an engine has got a version in time──► proven, for the rest of the run
        │
        └──no engine has got it, or ten times the planned time──► given up: the next one is on trial

A transport is given up only while it is on trial. Once it is proven, an engine that a version does not reach
has failed itself. The last transport that the layout allows is never given up.

``transports.json`` in the run folder keeps the decision, so that a resumed run does not try again what has
failed.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.weights.interrupted import InterruptedUpdates
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.rules import slower_transports
from slipstream.configs.schema import RunConfig, TransportConfig
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.system.durable import write_durably

log = logging.getLogger(__name__)

TRANSPORTS_FILE = "transports.json"

SLACK = 10
"""Factor of the planned time that a first publication may take."""
SET_UP_S = 30.0
"""Seconds beside it for what a first publication alone does: connect the ranks, trace the engines' loaders,
load the kernels. The plan knows the bytes only."""
OWN_FAULTS = ("NotFinite",)
"""Exceptions that a rank of the trainer raises before it sends anything."""

PlannedSeconds = Callable[[RunConfig], float | None]
"""Returns the seconds that the plan of a recipe gives a publication; None: there is no plan of it."""


def unplanned(config: RunConfig) -> float | None:
    """Return no time: nobody has planned the recipe."""
    return None


class TransportRecord(BaseModel):
    """Content of ``transports.json``."""

    model_config = ConfigDict(extra="forbid")

    proven: list[str] = Field(default=[], description="Types of transports by which a version has arrived.")
    given_up: dict[str, str] = Field(default={}, description="By type of a transport: why it was given up.")


class Transports:
    """Single event loop, one publication at a time."""

    def __init__(
        self,
        config: RunConfig,
        note: Callable[[str], None],
        *,
        updates: InterruptedUpdates,
        planned_s: PlannedSeconds = unplanned,
    ) -> None:
        """``updates``: ends what a failed publication has left in engines. ``note``: tells the user."""
        self._config = config
        self._note = note
        self._updates = updates
        self._planned_s = planned_s
        first = config.weights.transport
        self._ways = [first, *(slower_transports(config) if config.weights.fall_back else ())]
        self._path = config.run.folder / TRANSPORTS_FILE
        self._record = self._read()
        given_up = self._record.given_up
        self._number = next((n for n, way in enumerate(self._ways) if way.type not in given_up), 0)

    @property
    def current(self) -> TransportConfig:
        return self._ways[self._number]

    @property
    def given_up(self) -> int:
        """Number of transports that were given up before the current one."""
        return self._number

    @property
    def _is_on_trial(self) -> bool:
        return self._number + 1 < len(self._ways) and self.current.type not in self._record.proven

    async def published(self, report: PublishReport) -> bool:
        """Take note of a publication. Return True if it is to be repeated by the transport now used."""
        if not self._is_on_trial or report.unservable is not None:
            return False
        if report.unsuited is not None:
            return await self._give_up(report.unsuited)
        if report.updated:
            if (slow := await self._slow(report)) is not None:
                await self._give_up(slow)
            else:
                self._record.proven.append(self.current.type)
                await self._write()
            return False
        if report.cut_off:
            return await self._give_up(report.failed[report.cut_off[0]])
        return False

    async def trainer_failed(self, error: TrainerFailed) -> None:
        """Take note of a publication that the trainer has not survived."""
        if self._is_on_trial and error.raised not in OWN_FAULTS:
            await self._give_up(str(error))

    async def standing(
        self, version: int, engines: Sequence[EngineAddress], report: PublishReport
    ) -> tuple[list[EngineAddress], dict[str, str]]:
        """End what a failed publication has left in ``engines``, which served ``version``.

        Return the engines that answer, and why each of the others does not.
        """
        stock = await self._updates.ended(version, engines)
        lost = {name: report.failed.get(name, reason) for name, reason in stock.failed.items()}
        return [engine for engine in engines if engine.name not in lost], lost

    async def _slow(self, report: PublishReport) -> str | None:
        """Return what to say of a publication that has taken far longer than planned; None: it has not."""
        weights = self._config.weights.model_copy(update={"transport": self.current})
        config = self._config.model_copy(update={"weights": weights})
        planned_s = await asyncio.to_thread(self._planned_s, config)
        if planned_s is None or report.total_s <= SLACK * planned_s + SET_UP_S:
            return None
        return f"it has taken {report.total_s:.1f} s, and the plan gives it {planned_s:.2g} s"

    async def _give_up(self, reason: str) -> bool:
        failed = self.current.type
        self._record.given_up[failed] = reason
        self._number += 1
        await self._write()
        self._note(
            f"the run gives up weights.transport {failed} and goes on with {self.current.type}, because of "
            f"its first publication: {reason}. To try {failed} again, stop the run, remove {self._path} and "
            "resume"
        )
        return True

    def _read(self) -> TransportRecord:
        try:
            return TransportRecord.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return TransportRecord()
        except (ValidationError, OSError) as error:
            log.warning("%s cannot be read, and every transport is tried again: %s", self._path, error)
            return TransportRecord()

    async def _write(self) -> None:
        text = self._record.model_dump_json(indent=2) + "\n"
        try:
            await asyncio.to_thread(write_durably, self._path, text)
        except OSError as error:  # a run that goes on is worth more than what the next one would know
            log.warning("%s cannot be written: %s", self._path, error)
