"""The control core with everything about its groups: prompts, trajectories, and the ledger behind each event.

leases   ──admit()──► ticket ──► judged, ended ──► core ──batch()──► training
            while a slot is free          on disk first     waits for a ready batch
training ──step_begins(), published()──► core frees the slots; whoever waits on ``changed`` goes on
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.rollout.changes import Changes
from slipstream.rollout.collect.intake import Assignment, Intake
from slipstream.rollout.collect.journal import Journal
from slipstream.rollout.collect.listener import CollectionListener
from slipstream.rollout.control.core import GroupCounts, Loss, RolloutControl
from slipstream.rollout.control.quarantine import Quarantine
from slipstream.rollout.control.slots import State
from slipstream.rollout.ledger.transaction import Training
from slipstream.rollout.trajectory import TrajectoryHeader, count_tokens

LEAST_FAILURES = 8
"""Number of failed groups in a row that never end a run: with few slots, one bad prompt must not end it."""


class StalledRun(RuntimeError):
    """Nothing can be trained: no batch came in time, or group after group fails."""


class StoredTrajectory(NamedTuple):
    """A judged trajectory: its header, and where its chunks are in the ledger."""

    header: TrajectoryHeader
    refs: bytes
    """``record.REF`` of each chunk, one behind the other."""


@dataclass(slots=True)
class ReadyGroup:
    """The trajectories of one group, complete and judged. Its tokens are counted once, when it is made."""

    id: int
    trajectories: tuple[StoredTrajectory, ...]
    trained_tokens: dict[int, int] = field(init=False)
    """Number of tokens that carry loss, by policy version."""
    sampled_length: int = field(init=False)
    """Number of sampled tokens."""

    def __post_init__(self) -> None:
        self.trained_tokens, self.sampled_length = count_tokens(self.headers)

    @property
    def headers(self) -> list[TrajectoryHeader]:
        return [trajectory.header for trajectory in self.trajectories]


@dataclass(slots=True)
class _Batch:
    groups: list[ReadyGroup] = field(default_factory=list[ReadyGroup])
    version: int | None = None
    """Number of the version that is trained on it."""


class AdmissionGate:
    """All users run on one event loop. Every method but ``batch``, ``changed`` and ``step_begins`` returns at
    once.
    """

    def __init__(
        self,
        core: RolloutControl,
        intake: Intake,
        journal: Journal,
        listener: CollectionListener,
        ready: Iterable[ReadyGroup] = (),
        failures: Iterable[Sequence[int]] = (),
    ) -> None:
        """``ready``: groups from before a restart that are ready in ``core`` already. ``failures``:
        as ``Quarantine`` needs them.
        """
        self._core = core
        self._intake = intake
        self._journal = journal
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

    @property
    def version(self) -> int:
        """Policy version that every serving engine holds. The control core owns it."""
        return self._core.version

    @property
    def step(self) -> int:
        """Number of training steps behind ``version``."""
        return self._core.step

    @property
    def counts(self) -> GroupCounts:
        return self._core.counts

    @property
    def losses(self) -> dict[Loss, int]:
        """Number of groups lost so far, by cause."""
        return self._core.losses

    @property
    def position(self) -> int:
        """Number of prompts drawn from the prompt set so far."""
        return self._intake.position

    @property
    def states(self) -> dict[State, int]:
        """Number of groups that have not ended, by state."""
        return dict(self._core.states)

    def is_open(self, id_: int) -> bool:
        """Return whether work on the group is still needed. An expired group is not open."""
        return self._core.is_open(id_)

    def lag(self, version: int) -> int:
        """Return the lag of a token of ``version`` at a step that starts from the present version."""
        return self._core.lag(version)

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
        """Return whether a group may start."""
        return self._core.may_admit()

    def admit(self) -> Assignment:
        """Give a slot to the next group. Raises ControlError when ``may_admit`` is False."""
        ticket = self._core.admit()
        assignment = self._intake.assign(ticket)
        self._journal.admitted(ticket, assignment.position)
        self._core.generating(ticket.id)
        return assignment

    def judging(self, id_: int) -> None:
        """Note that the group waits for nothing but rewards."""
        if self._core.is_open(id_):
            self._core.judging(id_)

    def finished(self, groups: Sequence[ReadyGroup]) -> None:
        """Take complete and judged groups, which are on disk."""
        for group in groups:
            if self._core.is_open(group.id):
                self._ready[group.id] = group
                self._core.finished(group.id, group.trained_tokens.keys())
        self._failures_in_a_row = 0
        self._settle_expired()
        self._notify()

    def filtered(self, id_: int, trajectories: Sequence[TrajectoryHeader]) -> None:
        """Give up a complete group that the recipe's filter rejects."""
        self._core.filtered(id_)
        self._failures_in_a_row = 0
        self._lost(id_, Loss.FILTERED, trajectories)

    def failed(self, id_: int, reason: str, trajectories: Sequence[TrajectoryHeader] = ()) -> None:
        """Give up a group of which an episode failed; ``trajectories`` are its finished ones."""
        self._core.failed(id_)
        self._failures_in_a_row += 1
        self._last_failure = reason
        self._lost(id_, Loss.FAILED, trajectories, reason)

    # ---- training

    def end(self) -> None:
        """Give out no further batch."""
        self._is_ended = True
        self._changes.notify()

    async def batch(self, timeout_s: float) -> list[ReadyGroup]:
        """Wait for the next batch. It is empty once the gate was ended.

        Raises StalledRun after ``timeout_s``, or when group after group fails.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._batch = _Batch(await self._changes.first(self._next_batch))
                return self._batch.groups
        except TimeoutError:
            counts = self._core.counts
            raise StalledRun(
                f"no batch of {self._core.batch_size} groups within {timeout_s:.0f} s: "
                f"{counts.in_flight} in flight, {self._core.ready} ready, {counts.filtered} filtered, "
                f"{counts.failed} failed" + (f" ({self._last_failure})" if counts.failed else "")
            ) from None

    async def step_begins(self) -> None:
        """Write down that the batch is about to be trained: the number of the next version is taken now."""
        version = self._batch.version = self._core.begin_step()
        self._journal.step_begins(version, self._core.version, [group.id for group in self._batch.groups])
        await self._journal.flushed()

    async def step_failed(self, reason: str) -> None:
        """Write down that the trainer has ended in the step under way."""
        ids = [group.id for group in self._batch.groups]
        self._quarantine.failed(ids)
        self._journal.step_failed(self.next_version, reason)
        await self._journal.flushed()

    @property
    def next_version(self) -> int:
        """Version that the step under way makes."""
        assert self._batch.version is not None
        return self._batch.version

    def published(self, version: int) -> None:
        """Move to ``version``, trained on the last batch: every engine in the pool holds it."""
        trainings = [self._training(group) for group in self._batch.groups]
        self._core.published(version)
        self._journal.published(version, trainings)
        for group in self._batch.groups:
            self._intake.ended(group.id)
        self._quarantine.trained([group.id for group in self._batch.groups])
        self._batch = _Batch()
        self._settle_expired()
        self._notify()

    def _next_batch(self) -> list[ReadyGroup] | None:
        if self._is_ended:
            return []
        if self._failures_in_a_row >= max(self._core.capacity, LEAST_FAILURES):
            raise StalledRun(
                f"{self._failures_in_a_row} groups in a row have failed; the last one: {self._last_failure}"
            )
        self._take_measures()
        batch = self._core.take_batch()
        if self._settle_expired():
            self._notify()
        if batch is None:
            return None
        return [_masked(self._ready.pop(taken.id), taken.stale) for taken in batch]

    def _take_measures(self) -> None:
        """Keep groups that are believed to kill the trainer out of the next batch, or out of all."""
        if not self._quarantine.suspects:
            return
        for id_ in self._quarantine.suspects:
            if id_ not in self._ready:  # it has expired, or begins anew: there is nothing to search for
                self._quarantine.given_up(id_)
        measures = self._quarantine.measures()
        for id_ in measures.quarantined:
            self._core.quarantine(id_)
            group = self._ready.pop(id_)
            note = "training steps with this group have ended the trainer"
            self._lost(id_, Loss.QUARANTINED, group.headers, note)
            self._listener.note(f"group {id_} is quarantined: {note}")
            self._quarantine.given_up(id_)
        self._core.withhold(measures.withheld)
        if measures.withheld:
            self._notify()  # they hold no slot now

    def _training(self, group: ReadyGroup) -> Training:
        """Return the account of a group that is trained by a step from the present version."""
        tokens, sampled = group.trained_tokens, group.sampled_length
        head_lag = max(map(self._core.lag, tokens), default=-1)
        trained = sum(tokens.values())
        return Training(group.id, head_lag, trained, sampled - trained, sampled, tuple(tokens.items()))

    def _settle_expired(self) -> bool:
        """Write down the groups that have expired. Return whether there were any."""
        expired_groups = self._core.take_expired()
        for expired in expired_groups:
            group = self._ready.pop(expired.id, None)
            headers = group.headers if group else []
            self._given_up.append(expired.id)
            self._journal.lost(expired.id, expired.loss, _sampled(headers))
            if expired.loss is not Loss.REQUEUED:
                self._intake.ended(expired.id)
            self._listener.lost(expired.loss, headers)
        return bool(expired_groups)

    def _lost(self, id_: int, loss: Loss, trajectories: Sequence[TrajectoryHeader], note: str = "") -> None:
        self._journal.lost(id_, loss, _sampled(trajectories), note)
        self._intake.ended(id_)
        self._listener.lost(loss, trajectories, note)
        self._notify()

    def _notify(self) -> None:
        self._has_changed = True
        self._changes.notify()


def _sampled(headers: Sequence[TrajectoryHeader]) -> int:
    return count_tokens(headers)[1]


def _masked(group: ReadyGroup, stale: frozenset[int]) -> ReadyGroup:
    """Return the group, in which no token of the versions ``stale`` carries loss."""
    if not stale:
        return group
    return ReadyGroup(
        group.id,
        tuple(StoredTrajectory(each.header.without(stale), each.refs) for each in group.trajectories),
    )
