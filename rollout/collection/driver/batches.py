"""The batches of a run, from the groups and turns that are ready to the version that is trained on them.

gate: ready groups ──► next() ──► step_begins() ──► published() ──► gate: slots free
live: ready turns ───────┘        (ledger on disk)      └── step_failed(): the trainer has ended in the step
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.gate import AdmissionGate, StalledRun
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.quarantine import Quarantine
from slipstream.rollout.ledger.writing.transaction import Training
from slipstream.rollout.live.batches import LiveTrajectory
from slipstream.rollout.live.live_turns import LiveTurns


@dataclass(slots=True)
class _Batch:
    groups: list[CollectedGroup] = field(default_factory=list[CollectedGroup])
    live: list[LiveTrajectory] = field(default_factory=list[LiveTrajectory])
    version: int | None = None
    """Number of the version that is trained on it."""

    @property
    def ids(self) -> list[int]:
        """Numbers of its groups and of its turns."""
        return [group.id for group in self.groups] + [id_ for each in self.live for id_ in each.ids]


class Batches:
    """Takes one batch after the other out of the gate, and says which version each one makes.

    All users run on one event loop. Only ``next``, ``ended``, ``step_begins``, ``step_failed`` and
    ``copy_begins`` wait.
    """

    def __init__(
        self,
        gate: AdmissionGate,
        ledger: GroupLedger,
        note: Callable[[str], None],
        failures: Iterable[Collection[int]] = (),
        live: LiveTurns | None = None,
        live_wait_s: float = 0.0,
    ) -> None:
        """``note``: hears of what is quarantined. ``failures``: as ``Quarantine`` needs them. ``live``: turns
        of the users of a gateway. ``live_wait_s``: seconds that a batch which lacks nothing but live
        trajectories waits for them.
        """
        self._gate = gate
        self._ledger = ledger
        self._note = note
        self._quarantine = Quarantine(failures)
        self._withholds = False
        self._live = live
        self._wait_for_turns = _WaitForTurns(live_wait_s, self._turns_wait_is_over)
        self._batch = _Batch()
        self._is_ended = False
        if live is not None:
            live.when_ready(self._turn_is_ready)

    @property
    def core(self) -> RolloutControl:
        """The control core of the gate, which a restored trainer replaces."""
        return self._gate.core

    @property
    def prompts_drawn(self) -> int:
        """Number of prompts drawn from the prompt set so far."""
        return self._gate.intake.position

    # ---- ends of the run

    def end(self) -> None:
        """Give out no further batch."""
        self._is_ended = True
        self._gate.changes.notify()

    @property
    def is_ended(self) -> bool:
        """True if no further batch is given out."""
        return self._is_ended

    async def ended(self) -> None:
        """Wait until ``end`` was called."""
        await self._gate.changes.first(lambda: self._is_ended or None)

    # ---- steps

    async def next(self, timeout_s: float) -> list[CollectedGroup]:
        """Wait for the groups of the next batch, whose turns ``live`` holds. Both are empty once the batches
        were ended.

        Raises StalledRun after ``timeout_s`` without groups, or when group after group fails. Users are not
        to blame: a batch waits for turns alone as long as there are none.
        """
        try:
            async with asyncio.timeout(timeout_s if self.core.batch_size else None):
                self._batch = await self._gate.changes.first(self._next)
                return self._batch.groups
        except TimeoutError:
            if self.core.lacks_turns:
                self._turns_wait_is_over()
                return await self.next(timeout_s)
            size, groups = self.core.batch_size, self._gate.described()
            raise StalledRun(f"no batch of {size} groups within {timeout_s:.0f} s: {groups}") from None

    @property
    def live(self) -> list[LiveTrajectory]:
        """The live trajectories of the last batch."""
        return self._batch.live

    async def step_begins(self) -> None:
        """Write down that the batch is about to be trained: the number of the next version is taken now."""
        version = self._batch.version = self.core.begin_step()
        self._ledger.step_begins(version, self.core.version, self._batch.ids)
        await self._ledger.flushed()

    async def step_failed(self, reason: str) -> None:
        """Write down that the trainer has ended in the step under way."""
        self._quarantine.failed(self._batch.ids)
        self._ledger.step_failed(self.next_version, reason)
        await self._ledger.flushed()

    @property
    def is_stepping(self) -> bool:
        """True if a step has begun whose version is not published."""
        return self._batch.version is not None

    @property
    def next_version(self) -> int:
        """Version that the step under way makes."""
        assert self._batch.version is not None
        return self._batch.version

    async def copy_begins(self) -> int:
        """Write down that the trainer's weights are about to be published under a new number, and return it.

        ``published`` follows: then the engines serve again what the trainer holds.
        """
        version = self.core.begin_copy()
        self._ledger.copy_begins(version, self.core.version)
        await self._ledger.flushed()
        return version

    def published(self, version: int) -> None:
        """Move to ``version``, which the last batch has made or a copy: every engine in the pool holds it."""
        trainings = [self._training(group) for group in self._batch.groups]
        for each in self._batch.live:
            lags = {version: self.core.lag(version) for version in each.trained_tokens}
            trainings += each.trainings(lags)
        self.core.published(version)
        self._ledger.published(version, trainings)
        self._quarantine.trained(self._batch.ids)
        batch, self._batch = self._batch, _Batch()
        if self._live is not None:
            self._live.trained(batch.live)
        self._gate.trained(batch.groups)

    def restored(self, failures: Iterable[Collection[int]]) -> None:
        """Go on with the control core that the gate has got: the trainer was restored from an older version.

        Nobody waits for a batch.
        """
        self._batch = _Batch()
        self._quarantine = Quarantine(failures)
        self._withholds = False
        self._wait_for_turns.end()

    def _next(self) -> _Batch | None:
        if self._is_ended:
            self._wait_for_turns.end()
            return _Batch()
        self._take_measures()
        groups = self._gate.take_batch()
        if self.core.lacks_turns:
            self._wait_for_turns.begin()
        else:
            self._wait_for_turns.end()
        if groups is None:
            return None
        return _Batch(groups, [] if self._live is None else self._live.trajectories())

    def _training(self, group: CollectedGroup) -> Training:
        """Return the account of a group that is trained by a step from the present version."""
        tokens, sampled = group.trained_tokens, group.sampled_length
        head_lag = max(map(self.core.lag, tokens), default=-1)
        trained = sum(tokens.values())
        return Training(group.id, head_lag, trained, sampled - trained, sampled, tuple(tokens.items()))

    # ---- turns of live users

    def _turns_wait_is_over(self) -> None:
        self._wait_for_turns.end()
        self.core.turns_wait_is_over()
        self._gate.notify()

    def _turn_is_ready(self) -> None:
        self._wait_for_turns.rests_until = 0.0
        self._gate.changes.notify()

    # ---- quarantine

    def _take_measures(self) -> None:
        """Keep groups that are believed to kill the trainer out of the next batch, or out of all."""
        accused = self._quarantine.accused
        if accused and self._can_do_without(accused):
            self._withhold([id_ for id_ in accused if self._gate.is_ready(id_)])
            return
        if not self._quarantine.suspects:
            self._withhold(())
            return
        for id_ in self._quarantine.suspects:
            # Where it has expired or begins anew, there is nothing to search for.
            if not self._gate.is_ready(id_) and not self.core.live.is_alive(id_):
                self._quarantine.given_up(id_)
        measures = self._quarantine.measures()
        for id_ in measures.quarantined:
            self.core.quarantine(id_)
            self._write_quarantined(id_)
            self._quarantine.given_up(id_)
        self._withhold(measures.withheld)

    def _can_do_without(self, accused: Collection[int]) -> bool:
        """True if other groups fill a batch. Turns of live users have no others."""
        if min(accused) < 0 or not self.core.batch_size:
            return False
        others = self.core.ready - sum(map(self._gate.is_ready, accused))
        return others >= self.core.batch_size

    def _withhold(self, ids: Collection[int]) -> None:
        """Leave these out of the next batch, and no others."""
        if ids or self._withholds:
            self.core.withhold(ids)
        self._withholds = bool(ids)
        if ids:
            self._gate.notify()  # they hold no slot now

    def _write_quarantined(self, id_: int) -> None:
        note = "training steps with it have ended the trainer"
        if id_ < 0:
            assert self._live is not None
            self._live.quarantined(id_, note)
            self._note(f"turn {id_} of a live user is quarantined: {note}")
            return
        self._gate.quarantined(id_, note)
        self._note(f"group {id_} is quarantined: {note}")


REST = 9.0
"""After a wait in vain, times as long without one: silent users cost a tenth of the time at most."""


class _WaitForTurns:
    """The time that a batch waits for turns when it lacks nothing else.

    While nothing comes, as while judges or gateways are down, few batches wait and not each of them. But some
    do: where steps are quicker than users, turns expire before they are ready unless a batch waits for them.
    """

    def __init__(self, wait_s: float, then: Callable[[], None]) -> None:
        self._wait_s = wait_s
        self._then = then
        self._timer: asyncio.TimerHandle | None = None
        self.rests_until = 0.0
        """Time of the event loop from which a batch waits again. 0 since a turn has become ready."""

    def begin(self) -> None:
        """Call ``then`` when the time is over, unless it runs already."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            waits = loop.time() >= self.rests_until
            if waits:
                self.rests_until = loop.time() + (1 + REST) * self._wait_s
            self._timer = loop.call_later(self._wait_s if waits else 0.0, self._then)

    def end(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
