"""All turns of sessions that are not over: entries in, trajectories out.

    take() ──► ledger ──► core: waits ──► verdicts ──► core: ready ───────────────────────────┐
                                                                                              │
    published(), given back ◄── training step ◄── trajectories() ◄── core: batch ◄────────────┘

Single event loop. What gateways send is recorded at once, and what is trained is on disk first. While the
ledger goes back to an older version (``hold``), nothing is recorded: entries wait, unacknowledged.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain

from slipstream.configs.schema.sampling import NEUTRAL
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.live_door import TurnEnd, TurnState
from slipstream.rollout.control.versions import UnknownVersion
from slipstream.rollout.ledger.rows.stored_turns import (
    CLIENT,
    KnownTurn,
    RecoveredTurns,
    Stage,
    TurnHead,
    VerdictRow,
    named,
    session_of,
    turn_id,
)
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.live.baseline import Score, ScoreBaseline
from slipstream.rollout.live.batches import LiveTrajectory, live_trajectory
from slipstream.rollout.live.conversation import Said
from slipstream.rollout.live.status import LiveStatus, SinceLastBatch
from slipstream.rollout.live.table import TurnTable
from slipstream.rollout.live.verdicts import Verdicts, can_continue, check_chunk
from slipstream.rollout.tokens.record import encode
from slipstream.rollout.tokens.teacher import NOTHING_NEEDED, TeacherNeeds
from slipstream.rollout.tokens.trajectory import LARGEST_REWARD
from slipstream.rollout.tokens.turn_entries import (
    Entry,
    Forgotten,
    HeldReward,
    NextState,
    Opened,
    SessionEnd,
    Turn,
    TurnType,
    UserReward,
)

NOTHING_FOLLOWED = b"[]"

COUNTED, UNUSED, TOO_LARGE = "counted", "unused", "too large"
"""What becomes of a client's reward, beside the ends of turns, ``ended`` and ``training``.

``unused``: the recipe trains on a teacher's scores alone. ``too large``: the rewards of the turn add up to
more than float32 holds.
"""

OUTCOMES_KEPT = 10_000
"""Outcomes that wait for a connection with their gateway. Its clients stop waiting before."""


class JournalGap(RuntimeError):
    """A gateway has left out entries of its journal: a bug, or a journal that was replaced."""


SAMPLING = frozenset({"temperature", *NEUTRAL})
"""Parameters of sampling that make a side turn of a turn that was to be trained."""

NOTICED = 16
"""Number of such turns, without any that can be trained, after which the operator is told."""


class LiveTurns:
    """The live users of a run."""

    def __init__(
        self,
        core: RolloutControl,
        ledger: Ledger,
        baseline: Callable[[Iterable[tuple[int, float]]], ScoreBaseline],
        recovered: RecoveredTurns,
        *,
        train: bool,
        vocab: int,
        needs: TeacherNeeds = NOTHING_NEEDED,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``baseline``: makes one of the scores that were trained. ``train``: whether turns are judged and
        trained. ``vocab``: number of token ids. ``needs``: what the recipe needs of a teacher. ``note``:
        tells the operator what only a setting can change. ``clock``: seconds since the epoch.
        """
        self._ledger = ledger
        self._make_baseline = baseline
        self._train = train
        self._vocab = vocab
        self._needs = needs
        self._table = TurnTable(core, ledger, clock)
        self.verdicts = Verdicts(self._table, needs, vocab)
        self._held: list[Callable[[], None]] = []
        """Messages of gateways, as calls to make once the ledger is no longer held."""
        self._taken: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        self._note = note
        self._side_reasons: Counter[str] = Counter()
        self._sampled_otherwise: float = 0
        """Side turns because of their sampling, as long as no turn was one to train."""
        self._late_rewards = 0
        self._outcomes: dict[int, deque[tuple[int, str]]] = {}
        """By the number of a gateway: what has become of its rewards, by their numbers."""
        for gateway in recovered.gateways:
            self._taken[gateway.name] = self._durable[gateway.name] = gateway.durable
        self._restore(core, recovered)

    # ---- entries, from gateways

    def take(self, gateway: str, first_number: int, entries: Sequence[Entry]) -> None:
        """Take consecutive entries of a journal. Numbers that are known are passed over.

        Raises JournalGap when entries were left out.
        """
        if self._table.is_held:
            self._held.append(partial(self.take, gateway, first_number, entries))
            return
        known = self._taken.get(gateway, 0)
        if first_number > known + 1:
            raise JournalGap(
                f"gateway {gateway} sends entries from number {first_number} on, but the ledger has those up "
                f"to {known}: expected number {known + 1}"
            )
        last = first_number + len(entries) - 1
        if last <= known:
            return
        number = self._ledger.turns.gateway(gateway)
        for entry_number, entry in enumerate(entries, first_number):
            if entry_number > known:
                self._enter(number, entry_number, entry)
        self._taken[gateway] = last
        self._ledger.turns.taken(gateway, last)
        self._ledger.when_durable(partial(self._is_durable, gateway, last))
        self.settle()

    def outcomes(self, gateway: str) -> list[tuple[int, str]]:
        """Return the numbers of a gateway's rewards that were taken since the last call, and what has become
        of each: ``counted``, or why it does not count.
        """
        return list(self._outcomes.pop(self._ledger.turns.gateway(gateway), ()))

    def durable(self, gateway: str) -> int:
        """Return the number of the last entry of a gateway that the ledger holds; 0: none."""
        return self._durable.get(gateway, 0)

    def when_durable(self, then: Callable[[], None]) -> None:
        """Call ``then`` once everything that was taken is on disk; never after a failure."""
        if not self._table.defer(partial(self._ledger.when_durable, then)):
            self._ledger.when_durable(then)

    def _is_durable(self, gateway: str, number: int) -> None:
        self._durable[gateway] = max(number, self._durable.get(gateway, 0))

    def _enter(self, gateway: int, number: int, entry: Entry) -> None:
        match entry:
            case Turn():
                self._enter_turn(gateway, turn_id(gateway, number), entry)
            case NextState():
                self._enter_next(turn_id(gateway, entry.turn), bytes(entry.messages))
            case UserReward():
                outcome = self._enter_reward(turn_id(gateway, entry.turn), entry)
                self._outcomes.setdefault(gateway, deque(maxlen=OUTCOMES_KEPT)).append((number, outcome))
            case SessionEnd():
                unpaired = {turn_id(gateway, turn) for turn in entry.unpaired}
                self._enter_end(session_of(named(entry.key), named(entry.session)), unpaired)
            case Forgotten():
                self._enter_forgotten(turn_id(gateway, number), entry)
            case Opened() | HeldReward():
                pass  # a turn says itself that its client rewards it

    def _enter_turn(self, gateway: int, id_: int, entry: Turn) -> None:
        key = named(entry.key)
        session = session_of(key, named(entry.session))
        parent_id = None if entry.parent is None else turn_id(gateway, entry.parent)
        parent = None if parent_id is None else self._table.turns.get(parent_id)
        if parent is not None and parent.session != session:
            parent = None
        context, problem = check_chunk(entry, self._vocab)
        is_lost = problem is not None
        if parent_id is not None and not can_continue(entry.shared, parent):
            problem, is_lost = problem or "the tokens before it are not there", entry.shared > 0 or is_lost
        elif entry.parent is None and entry.shared:
            problem, is_lost = problem or f"it shares {entry.shared} tokens with no turn", True
        head = TurnHead(
            entry.shared,
            context,
            entry.spans,
            entry.finish,
            entry.ended_s,
            not is_lost,
            entry.is_rewarded,
        )
        problem = problem or self._version_problem(head)
        end, loss = self._end_at_once(entry, head, problem)
        said = encode(Said(entry.session, entry.key, entry.kept, bytes(entry.messages), bytes(entry.answer)))
        turn = KnownTurn(id_, session, key, parent, head, is_lost=is_lost)
        self._ledger.turns.turn(turn, entry.chunk, said, end=end, loss=loss, note=problem or "")
        self._table.remember(turn)
        self._table.sessions[session].goes_on()
        before = turn.continues
        link = None if before is None else before.id
        if end is None:
            self._table.core.live.arrived(id_, head.versions, link)
            self._sampled_otherwise = -math.inf
        else:
            self._table.core.live.is_context(id_, link, end)
            if end is TurnEnd.SIDE:
                self._side_reasons[entry.reason] += 1
                self._say_that_nothing_trains(entry.reason)

    def _say_that_nothing_trains(self, reason: str) -> None:
        """Tell the operator once if the clients' sampling keeps every turn from being trained."""
        if not SAMPLING.issuperset(reason.split(", ")):
            return
        self._sampled_otherwise += 1
        if self._sampled_otherwise == NOTICED:
            self._note(
                f"none of the first {NOTICED} turns that were to be trained can be: clients ask for another "
                f"{reason} than rollout.sampling, and `gateway.sampling: client` follows them; set "
                "`gateway.sampling: recipe` to sample such turns as the recipe says"
            )

    def _end_at_once(
        self, entry: Turn, head: TurnHead, problem: str | None
    ) -> tuple[TurnEnd | None, Loss | None]:
        """Return how a turn ends that is not to be trained; None: it is."""
        if problem is not None:
            return TurnEnd.FAILED, Loss.FAILED
        if entry.cancelled:
            return TurnEnd.CANCELLED, None
        if entry.turn_type is TurnType.SIDE:
            return TurnEnd.SIDE, None
        if not self._train or not head.sampled:
            return TurnEnd.FILTERED, Loss.FILTERED
        return None, None

    def _version_problem(self, head: TurnHead) -> str | None:
        try:
            for version in head.versions:
                self._table.core.lag(version)
        except UnknownVersion as error:
            return str(error)
        return None

    def _enter_next(self, id_: int, messages: bytes) -> None:
        turn = self._table.turns.get(id_)
        if turn is None or turn.has_followed or not self._table.core.live.is_waiting(id_):
            return
        turn.followed_s = self._table.clock()
        self._ledger.turns.followed(turn, messages)
        self.verdicts.ask(id_)

    def _enter_reward(self, id_: int, entry: UserReward) -> str:
        """Take a client's reward of a turn. Return what has become of it, for the client."""
        turn = self._table.turns.get(id_)
        if turn is None or not self._table.core.live.is_alive(id_):
            self._late_rewards += 1
            return self._table.end_of(id_)
        if any(id_ in path for path in self._table.core.live.training):
            self._late_rewards += 1
            return TurnState.TRAINING
        if self._needs.alone and turn.teacher is None:
            return UNUSED
        parts = _with_part(turn.verdict, entry)
        score = sum(parts.values())
        if not abs(score) <= LARGEST_REWARD:  # NaN is not
            return TOO_LARGE
        has_teacher = turn.teacher is not None
        self.verdicts.rule(turn, VerdictRow(score, CLIENT, has_teacher, tuple(parts.items()), entry.group))
        return COUNTED

    def _enter_end(self, id_: int, unpaired: Collection[int]) -> None:
        self._ledger.turns.session_ended(id_)
        session = self._table.sessions.get(id_)
        if session is None:
            return
        for turn in list(session.turns.values()):
            if turn.id not in unpaired:
                self._enter_next(turn.id, NOTHING_FOLLOWED)
            elif turn.verdict is None and not turn.has_followed:
                self.verdicts.unpaired(turn.id)
        session.has_ended = True
        self._table.drop_if_over(id_)

    def _enter_forgotten(self, entry_id: int, entry: Forgotten) -> None:
        name = None if entry.session is None else named(entry.session)
        key = None if entry.key is None else named(entry.key)
        self._ledger.turns.forget(name, key, entry_id)
        for turn in list(self._table.turns.values()):
            is_meant = key is None or turn.key == key
            if name is not None:
                is_meant = is_meant and turn.session == session_of(turn.key, name)
            if is_meant:
                turn.is_lost = True
                self._table.sessions[turn.session].forget()
                self._table.core.live.ended(turn.id, TurnEnd.FORGOTTEN)
        self._table.erase()
        for id_ in list(self._table.sessions):
            self._table.drop_if_over(id_)

    # ---- training

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` whenever a turn has become ready."""
        self._table.when_ready(then)

    def trajectories(self) -> list[LiveTrajectory]:
        """Return the live trajectories of the batch that the core has taken."""
        batch = [
            live_trajectory(stale, [self._table.turns[id_] for id_ in stale])
            for stale in self._table.core.live.training
        ]
        scores = [each.scores for each in batch]
        advantages = iter(self._baseline.advantages(list(chain.from_iterable(scores))))
        for trajectory in batch:
            trajectory.advantages = tuple(
                None if turn.score is None else next(advantages) for turn in trajectory.turns
            )
        now = self._table.clock()
        ages_s = [max(0.0, now - turn.head.ended_s) for each in batch for turn in each.turns]
        self._table.since = SinceLastBatch(
            trained_ages_s=ages_s, scores=[score.score for each in scores for score in each]
        )
        return batch

    def trained(self, batch: Iterable[LiveTrajectory]) -> None:
        """Note that the version was published which was trained on a batch."""
        turns = sorted((turn for each in batch for turn in each.turns), key=lambda turn: -turn.id)
        self._baseline.trained(
            Score(turn.key, turn.score)
            for turn in turns
            if turn.score is not None and (turn.verdict is None or turn.verdict.group is None)
        )
        self._table.erase()
        self.settle()
        for session in {turn.session for turn in turns}:
            self._table.drop_if_over(session)

    def quarantined(self, id_: int, note: str) -> None:
        """Write down that a turn is given up because it kills the trainer."""
        self._ledger.turns.ended(id_, TurnEnd.FAILED, Loss.QUARANTINED, note=note)
        self._table.erase()

    def training_ends(self) -> None:
        """Train none of the turns that come from now on: the run has done its last step.

        They would wait without end, because no version makes them too old.
        """
        self._train = False

    def settle(self) -> bool:
        """Write down the turns that have expired. Return True if there were any."""
        sessions = self._table.write_expired()
        for session in sessions:
            self._table.drop_if_over(session)
        return bool(sessions)

    # ---- restarts

    def hold(self) -> None:
        """Record nothing until ``restored``: the ledger goes back to an older version."""
        self._table.hold()

    def restored(self, core: RolloutControl, recovered: RecoveredTurns) -> None:
        """Go on with another control core, and with what the ledger has read again."""
        self._restore(core, recovered)
        held, self._held = self._held, []
        late = self._table.release()
        for event in (*held, *late):
            event()
        self._table.erase()

    def _restore(self, core: RolloutControl, recovered: RecoveredTurns) -> None:
        self._table.begin_again(core)
        self.verdicts.begin_again()
        self._baseline = self._make_baseline(recovered.trained)
        door = core.live
        for turn in recovered.turns:
            self._table.remember(turn)
            before = turn.continues
            link = None if before is None else before.id
            if turn.id not in recovered.open:
                door.is_context(turn.id, link)
                continue
            door.arrived(turn.id, turn.head.versions, link)
            if turn.verdict is not None and door.is_waiting(turn.id):
                door.ready(turn.id)
            elif self.verdicts.is_needed(turn):
                turn.followed_s = self._table.clock()
                self.verdicts.ask(turn.id)
        door.ends.update({end: n for end in TurnEnd if (n := recovered.counts.get(end.value))})
        for id_ in recovered.ended_sessions:
            if id_ in self._table.sessions:
                self._table.sessions[id_].has_ended = True
        for session in self._table.sessions.values():
            *_, newest = session.turns.values()
            if not newest.has_payload:  # nothing that continues it could be trained
                session.forget()
        self.settle()
        for id_ in list(self._table.sessions):
            self._table.drop_if_over(id_)
        self._table.notify_ready()

    # ---- status

    def status(self) -> LiveStatus:
        """Return the present state."""
        ages: dict[Stage, list[float]] = {stage: [] for stage in Stage}
        for turn in self._table.turns.values():
            if self._table.core.live.is_alive(turn.id):
                ages[_stage_of(turn)].append(turn.head.ended_s)
        now = self._table.clock()
        oldest = {stage: max(0.0, now - min(ended)) if ended else 0.0 for stage, ended in ages.items()}
        return LiveStatus(
            waiting=len(ages[Stage.WAITING]),
            unjudged=len(ages[Stage.UNJUDGED]),
            ready=len(ages[Stage.READY]),
            oldest_waiting_s=oldest[Stage.WAITING],
            oldest_unjudged_s=oldest[Stage.UNJUDGED],
            oldest_ready_s=oldest[Stage.READY],
            ends=dict(self._table.core.live.ends),
            side_reasons=dict(self._side_reasons),
            verdicts=self.verdicts.count,
            put_off=self.verdicts.put_off_count,
            given_up=self.verdicts.given_up,
            votes=self.verdicts.votes,
            judge_outages=self.verdicts.outages,
            late_rewards=self._late_rewards,
            baseline=self._baseline.mean,
            since=self._table.since,
        )


def _with_part(verdict: VerdictRow | None, entry: UserReward) -> dict[str, float]:
    """Return the rewards that clients have given a turn, by name, with another one."""
    parts = {} if verdict is None or verdict.source != CLIENT else dict(verdict.parts)
    return parts | {entry.name: entry.reward}


def _stage_of(turn: KnownTurn) -> Stage:
    if turn.verdict is not None:
        return Stage.READY
    return Stage.UNJUDGED if turn.has_followed else Stage.WAITING
