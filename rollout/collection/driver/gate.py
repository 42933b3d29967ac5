"""The slots of a run: who gets one, and what becomes of the groups that lose theirs.

assignments ──admit()──► ticket ──► judged, on disk ──finished()──► ready ──take_batch()──► batches
            while a slot is free        │                             │
            ◄──changed()── free again ◄─┴── filtered, failed ◄────────┴── expired, quarantined, trained
"""

from collections.abc import Callable, Iterable, Sequence

from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.driver.group_ledger import GroupLedger
from slipstream.rollout.collection.driver.intake import Intake
from slipstream.rollout.collection.driver.listener import CollectionListener
from slipstream.rollout.control.core import RolloutControl, Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.live.live_turns import LiveTurns
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.tokens.trajectory import Prompt, TrajectoryHeader, count_tokens

LEAST_FAILURES = 8
"""Number of failed groups in a row that never end a run: with few slots, one bad prompt must not end it."""

LossListener = Callable[[int, Prompt, Loss, str, CollectedGroup | None], None]
"""Hears of a group that has ended untrained, before the ledger does: its number, its prompt, its end, a note,
and the group itself if it was complete and waited for a batch."""


class StalledRun(RuntimeError):
    """Nothing can be trained: no batch came in time, or group after group fails."""


class AdmissionGate:
    """The control core with the prompts and trajectories of its groups. Each end of a group is written into
    the ledger.

    All users run on one event loop. Every method but ``changed`` returns at once.
    """

    def __init__(
        self,
        core: RolloutControl,
        intake: Intake,
        ledger: GroupLedger,
        listener: CollectionListener,
        ready: Iterable[CollectedGroup] = (),
        live: LiveTurns | None = None,
    ) -> None:
        """``ready``: groups from before a restart that are ready in ``core`` already. ``live``: turns of the
        users of a gateway, which may expire with groups.
        """
        self.core = core
        """The control core, which ``restored`` replaces: ask it for versions, lags, counts and states."""
        self.intake = intake
        """The prompts of the groups, which ``restored`` replaces as well."""
        self.changes = Changes()
        """Notified of all that a batch may wait for."""
        self._ledger = ledger
        self._listener = listener
        self._live = live
        self._ready = {group.id: group for group in ready}
        self._given_up: list[int] = []
        self._failures_in_a_row = 0
        self._last_failure = ""
        self._has_changed = True
        self._when_lost: list[LossListener] = []

    def when_lost(self, then: LossListener) -> None:
        """Call ``then`` too whenever a group has ended untrained."""
        self._when_lost.append(then)

    # ---- slots

    async def changed(self) -> list[int]:
        """Wait until slots may have become free or groups were given up. Return the groups given up.

        There is no time-out: slots become free as soon as the trainer steps. One caller.
        """
        await self.changes.first(lambda: self._has_changed or None)
        self._has_changed = False
        given_up, self._given_up = self._given_up, []
        return given_up

    def notify(self) -> None:
        """Wake all tasks that wait for slots or for a batch, for example because prompts have come."""
        self._has_changed = True
        self.changes.notify()

    def may_admit(self) -> bool:
        """True if a group may start."""
        return self.core.may_admit() and self.intake.is_ready

    def admit(self) -> tuple[Ticket, Prompt]:
        """Give a slot to the next group. Raises ControlError when ``may_admit`` is False."""
        ticket = self.core.admit()
        self._ledger.admitted(ticket, self.intake.position_of(ticket))
        self.core.generating(ticket.id)
        return ticket, self.intake.prompt_of(ticket.id)

    # ---- ends of groups

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
        self.notify()

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

    def quarantined(self, id_: int, note: str) -> None:
        """Give up a group that is ready in ``core`` no more, because it kills the trainer."""
        group = self._ready.pop(id_)
        self._lost(id_, Loss.QUARANTINED, group.headers, note, group)

    # ---- batches

    def is_ready(self, id_: int) -> bool:
        """True if the group waits for a batch."""
        return id_ in self._ready

    def described(self) -> str:
        """Return how many groups are where, for an error."""
        counts = self.core.counts
        return (
            f"{counts.in_flight} in flight, {self.core.ready} ready, {counts.filtered} filtered, "
            f"{counts.failed} failed" + (f" ({self._last_failure})" if counts.failed else "")
        )

    def take_batch(self) -> list[CollectedGroup] | None:
        """Take the groups of the next batch, without the tokens that are too old; None while it is not
        complete (``RolloutControl.take_batch``). Raises StalledRun when group after group fails.
        """
        if self._failures_in_a_row >= max(self.core.capacity, LEAST_FAILURES):
            raise StalledRun(
                f"{self._failures_in_a_row} groups in a row have failed; the last one: {self._last_failure}"
            )
        batch = self.core.take_batch()
        if self._settle_expired():
            self.notify()
        if batch is None:
            return None
        return [self._ready.pop(id_).masked(stale) for id_, stale in batch.items()]

    def trained(self, groups: Iterable[CollectedGroup]) -> None:
        """Note that a version was published that was trained on ``groups``, whose slots are free."""
        for group in groups:
            self.intake.ended(group.id)
        self._settle_expired()
        self.notify()

    def restored(self, core: RolloutControl, intake: Intake, ready: Iterable[CollectedGroup]) -> None:
        """Go on with another control core: the trainer was restored from an older version.

        ``ready``: groups that are ready in ``core``. Nobody waits for a batch, and all work on groups of the
        core before has been called off.
        """
        self.core, self.intake = core, intake
        self._ready = {group.id: group for group in ready}
        self._given_up = []
        self.notify()

    def _settle_expired(self) -> bool:
        """Write down the groups and turns that have expired. Return True if there were any."""
        expired = self.core.take_expired()
        for id_, loss in expired.items():
            group = self._ready.pop(id_, None)
            headers = group.headers if group else []
            self._given_up.append(id_)
            self._tell(id_, loss, "", group)
            self._ledger.lost(id_, loss, _sampled(headers))
            if loss is not Loss.REQUEUED:
                self.intake.ended(id_)
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
        self.intake.ended(id_)
        self._listener.lost(loss, trajectories, note)
        self.notify()

    def _tell(self, id_: int, loss: Loss, note: str, ready: CollectedGroup | None) -> None:
        if self._when_lost:
            prompt = self.intake.prompt_of(id_)
            for then in self._when_lost:
                then(id_, prompt, loss, note, ready)


def _sampled(headers: Sequence[TrajectoryHeader]) -> int:
    return count_tokens(headers)[1]
