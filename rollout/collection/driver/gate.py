"""The control core with everything about its groups: prompts, trajectories, and the ledger behind each event.

assignments ──admit()──► ticket ──► judged, ended ──► core ──batch()──► training
            while a slot is free          on disk first     waits for a ready batch
training ──step_begins(), published()──► core frees the slots; whoever waits on ``changed`` goes on
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.listener import CollectionListener
from slipstream.rollout.control.control_errors import UnknownVersion
from slipstream.rollout.control.core import RolloutControl, Ticket
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.quarantine import Quarantine
from slipstream.rollout.ledger.writing.transaction import Training
from slipstream.rollout.live.batches import LiveTrajectory
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.tokens.trajectory import Prompt, TrajectoryHeader, count_tokens


class LossListener(Protocol):
    """Hears of a group that has ended untrained, before the ledger does."""

    def __call__(
        self, id_: int, prompt: Prompt, loss: Loss, note: str, ready: CollectedGroup | None, /
    ) -> None:
        """``ready``: the group, if it was complete and waited for a batch."""
        ...


LEAST_FAILURES = 8
"""Number of failed groups in a row that never end a run: with few slots, one bad prompt must not end it."""


class StalledRun(RuntimeError):
    """Nothing can be trained: no batch came in time, or group after group fails."""


class LiveBatches(Protocol):
    """The turns of live users, as batches need them: ``rollout.live.turns.LiveTurns``."""

    def trajectories(self) -> list[LiveTrajectory]:
        """Return the live trajectories of the batch that the core has taken."""
        ...

    def trained(self, batch: Iterable[LiveTrajectory]) -> None:
        """Note that the version was published which was trained on these."""
        ...

    def quarantined(self, id_: int, note: str) -> None:
        """Write down that a turn was given up because it kills the trainer."""
        ...

    def settle(self) -> bool:
        """Write down the turns that have expired. Return True if there were any."""
        ...

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` whenever a turn has become ready."""
        ...


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


class AdmissionGate:
    """All users run on one event loop. Every method but ``batch``, ``changed`` and ``step_begins`` returns at
    once.
    """

    def __init__(
        self,
        core: RolloutControl,
        intake: Intake,
        ledger: GroupLedger,
        listener: CollectionListener,
        ready: Iterable[CollectedGroup] = (),
        failures: Iterable[Sequence[int]] = (),
        live: LiveBatches | None = None,
        live_wait_s: float = 0.0,
    ) -> None:
        """``ready``: groups from before a restart that are ready in ``core`` already. ``failures``:
        as ``Quarantine`` needs them. ``live``: turns of the users of a gateway. ``live_wait_s``: seconds that
        a batch which lacks nothing but live trajectories waits for them.
        """
        self._live = live
        self._live_wait_s = live_wait_s
        self._live_timer: asyncio.TimerHandle | None = None
        self._are_users_silent = False
        """No turn has become ready since a batch has waited for turns in vain."""
        self.core = core
        """The control core, which ``restored`` replaces: ask it for lags, counts and states."""
        self._intake = intake
        self._ledger = ledger
        self._listener = listener
        self._changes = Changes()
        self._ready = {group.id: group for group in ready}
        self._batch = _Batch()
        self._quarantine = Quarantine(failures)
        self._given_up: list[int] = []
        self._is_ended = False
        self._failures_in_a_row = 0
        self._last_failure = ""
        self._has_changed = True
        self._when_lost: list[LossListener] = []
        if live is not None:
            live.when_ready(self._turn_is_ready)

    @property
    def version(self) -> int:
        """Policy version that the trainer holds. The control core owns it."""
        return self.core.version

    @property
    def served(self) -> int:
        """Policy version that every serving engine holds: another one than ``version`` after the trainer was
        restored, until a copy of its weights is published.
        """
        return self.core.version if self.core.served is None else self.core.served

    def descends_from(self, version: int) -> bool:
        """True if the trainer's weights are those of ``version`` or descend from them."""
        try:
            return self.core.versions.is_ancestor(version, of=self.core.version)
        except UnknownVersion:
            return False

    @property
    def is_ended(self) -> bool:
        """True if no further batch is given out."""
        return self._is_ended

    @property
    def step(self) -> int:
        """Number of training steps behind ``version``."""
        return self.core.step

    @property
    def counts(self) -> GroupCounts:
        return self.core.counts

    @property
    def position(self) -> int:
        """Number of prompts drawn from the prompt set so far."""
        return self._intake.position

    def when_lost(self, then: LossListener) -> None:
        """Call ``then`` too whenever a group has ended untrained."""
        self._when_lost.append(then)

    # ---- collection

    async def changed(self) -> list[int]:
        """Wait until slots may have become free or groups were given up. Return the groups given up.

        There is no time-out: slots become free as soon as the trainer steps. One caller.
        """
        await self._changes.first(lambda: self._has_changed or None)
        self._has_changed = False
        given_up, self._given_up = self._given_up, []
        return given_up

    def may_admit(self) -> bool:
        """True if a group may start."""
        return self.core.may_admit() and self._intake.is_ready

    def prompts_came(self) -> None:
        """Let groups start that have waited for prompts."""
        self._notify()

    def admit(self) -> tuple[Ticket, Prompt]:
        """Give a slot to the next group. Raises ControlError when ``may_admit`` is False."""
        ticket = self.core.admit()
        self._ledger.admitted(ticket, self._intake.position_of(ticket))
        self.core.generating(ticket.id)
        return ticket, self._intake.prompt_of(ticket.id)

    def judging(self, id_: int) -> None:
        """Note that the group waits for nothing but rewards."""
        if self.core.is_open(id_):
            self.core.judging(id_)

    def finished(self, groups: Sequence[CollectedGroup]) -> None:
        """Take complete and judged groups, which are on disk. Those without a token of loss are filtered."""
        for group in groups:
            if not self.core.is_open(group.id):
                continue
            if not group.trained_tokens:  # a batch of such groups would make a step of nothing
                self.core.filtered(group.id)
                self._lost(group.id, Loss.FILTERED, group.headers, "no token carries loss", group)
                continue
            self._ready[group.id] = group
            self.core.finished(group.id, group.trained_tokens.keys())
        self._failures_in_a_row = 0
        self._settle_expired()
        self._notify()

    def filtered(self, id_: int, trajectories: Sequence[TrajectoryHeader]) -> None:
        """Give up a group that the recipe's filter or its workflow rejects, with what is complete of it."""
        self.core.filtered(id_)
        self._failures_in_a_row = 0
        self._lost(id_, Loss.FILTERED, trajectories)

    def failed(self, id_: int, reason: str, trajectories: Sequence[TrajectoryHeader] = ()) -> None:
        """Give up a group of which an episode failed; ``trajectories`` are its finished ones."""
        self.core.failed(id_)
        self._failures_in_a_row += 1
        self._last_failure = reason
        self._lost(id_, Loss.FAILED, trajectories, reason)

    # ---- training

    def end(self) -> None:
        """Give out no further batch."""
        self._is_ended = True
        self._changes.notify()

    async def batch(self, timeout_s: float) -> list[CollectedGroup]:
        """Wait for the groups of the next batch, whose turns ``live_batch`` holds. Both are empty once the
        gate was ended.

        Raises StalledRun after ``timeout_s`` without groups, or when group after group fails. Users are not
        to blame: a batch waits for turns alone as long as there are none.
        """
        try:
            async with asyncio.timeout(timeout_s if self.core.batch_size else None):
                self._batch = await self._changes.first(self._next_batch)
                return self._batch.groups
        except TimeoutError:
            if self.core.lacks_turns:
                self._turns_wait_is_over()
                return await self.batch(timeout_s)
            counts = self.core.counts
            raise StalledRun(
                f"no batch of {self.core.batch_size} groups within {timeout_s:.0f} s: "
                f"{counts.in_flight} in flight, {self.core.ready} ready, {counts.filtered} filtered, "
                f"{counts.failed} failed" + (f" ({self._last_failure})" if counts.failed else "")
            ) from None

    @property
    def live_batch(self) -> list[LiveTrajectory]:
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

    async def ended(self) -> None:
        """Wait until ``end`` was called."""
        await self._changes.first(lambda: self._is_ended or None)

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
        for group in self._batch.groups:
            self._intake.ended(group.id)
        self._quarantine.trained(self._batch.ids)
        batch, self._batch = self._batch, _Batch()
        if self._live is not None:
            self._live.trained(batch.live)
        self._settle_expired()
        self._notify()

    def restored(
        self,
        core: RolloutControl,
        intake: Intake,
        ready: Iterable[CollectedGroup],
        failures: Iterable[Sequence[int]],
    ) -> None:
        """Go on with another control core: the trainer was restored from an older version.

        ``ready``: groups that are ready in ``core``. Nobody waits for a batch, and all work on groups of the
        core before has been called off.
        """
        self.core, self._intake = core, intake
        self._ready = {group.id: group for group in ready}
        self._batch = _Batch()
        self._quarantine = Quarantine(failures)
        self._given_up = []
        self._end_wait_for_turns()
        self._notify()

    def _next_batch(self) -> _Batch | None:
        if self._is_ended:
            self._end_wait_for_turns()
            return _Batch()
        if self._failures_in_a_row >= max(self.core.capacity, LEAST_FAILURES):
            raise StalledRun(
                f"{self._failures_in_a_row} groups in a row have failed; the last one: {self._last_failure}"
            )
        self._take_measures()
        batch = self.core.take_batch()
        if self._settle_expired():
            self._notify()
        self._time_the_wait_for_turns()
        if batch is None:
            return None
        groups = [self._ready.pop(id_).masked(stale) for id_, stale in batch.items()]
        return _Batch(groups, [] if self._live is None else self._live.trajectories())

    def _time_the_wait_for_turns(self) -> None:
        """Begin or end the time that the batch waits for turns."""
        if not self.core.lacks_turns:
            self._end_wait_for_turns()
        elif self._live_timer is None:
            loop = asyncio.get_running_loop()
            # Where nothing comes, as while judges or gateways are down, one batch waits and not each of them.
            wait_s = 0.0 if self._are_users_silent else self._live_wait_s
            self._are_users_silent = True
            self._live_timer = loop.call_later(wait_s, self._turns_wait_is_over)

    def _turns_wait_is_over(self) -> None:
        self._end_wait_for_turns()
        self.core.turns_wait_is_over()
        self._notify()

    def _turn_is_ready(self) -> None:
        self._are_users_silent = False
        self._changes.notify()

    def _end_wait_for_turns(self) -> None:
        if self._live_timer is not None:
            self._live_timer.cancel()
            self._live_timer = None

    def _take_measures(self) -> None:
        """Keep groups that are believed to kill the trainer out of the next batch, or out of all."""
        if not self._quarantine.suspects:
            return
        for id_ in self._quarantine.suspects:
            if id_ not in self._ready and not self.core.live.is_alive(
                id_
            ):  # it has expired, or begins anew: there is nothing to search for
                self._quarantine.given_up(id_)
        measures = self._quarantine.measures()
        for id_ in measures.quarantined:
            self.core.quarantine(id_)
            self._write_quarantined(id_)
            self._quarantine.given_up(id_)
        self.core.withhold(measures.withheld)
        if measures.withheld:
            self._notify()  # they hold no slot now

    def _write_quarantined(self, id_: int) -> None:
        note = "training steps with it have ended the trainer"
        if id_ < 0:
            assert self._live is not None
            self._live.quarantined(id_, note)
            self._listener.note(f"turn {id_} of a live user is quarantined: {note}")
            return
        group = self._ready.pop(id_)
        self._lost(id_, Loss.QUARANTINED, group.headers, note, group)
        self._listener.note(f"group {id_} is quarantined: {note}")

    def _training(self, group: CollectedGroup) -> Training:
        """Return the account of a group that is trained by a step from the present version."""
        tokens, sampled = group.trained_tokens, group.sampled_length
        head_lag = max(map(self.core.lag, tokens), default=-1)
        trained = sum(tokens.values())
        return Training(group.id, head_lag, trained, sampled - trained, sampled, tuple(tokens.items()))

    def _settle_expired(self) -> bool:
        """Write down the groups that have expired. Return True if there were any."""
        expired = self.core.take_expired()
        for id_, loss in expired.items():
            group = self._ready.pop(id_, None)
            headers = group.headers if group else []
            self._given_up.append(id_)
            self._tell(id_, loss, "", group)
            self._ledger.lost(id_, loss, _sampled(headers))
            if loss is not Loss.REQUEUED:
                self._intake.ended(id_)
            self._listener.lost(loss, headers)
        live_expired = self._live is not None and self._live.settle()
        return bool(expired) or live_expired

    def _lost(
        self,
        id_: int,
        loss: Loss,
        trajectories: Sequence[TrajectoryHeader],
        note: str = "",
        ready: CollectedGroup | None = None,
    ) -> None:
        self._tell(id_, loss, note, ready)
        self._ledger.lost(id_, loss, _sampled(trajectories), note)
        self._intake.ended(id_)
        self._listener.lost(loss, trajectories, note)
        self._notify()

    def _tell(self, id_: int, loss: Loss, note: str, ready: CollectedGroup | None) -> None:
        if self._when_lost:
            prompt = self._intake.prompt_of(id_)
            for then in self._when_lost:
                then(id_, prompt, loss, note, ready)

    def _notify(self) -> None:
        self._has_changed = True
        self._changes.notify()


def _sampled(headers: Sequence[TrajectoryHeader]) -> int:
    return count_tokens(headers)[1]
