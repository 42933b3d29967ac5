"""All turns of sessions that are not over: entries and verdicts in, trajectories out.

    take() ──► ledger ──► core: waits ──► unjudged() ──► verdict() ──► ledger ──on disk──► core: ready
                                                                                              │
    published(), given back ◄── training step ◄── trajectories() ◄── core: batch ◄────────────┘

Single event loop. What gateways send is recorded at once, and what is trained is on disk first. While the
ledger goes back to an older version (``hold``), nothing is recorded: entries wait, unacknowledged.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from slipstream.rollout.changes import Changes
from slipstream.rollout.control.core import Loss, RolloutControl
from slipstream.rollout.control.errors import UnknownVersion
from slipstream.rollout.control.live import TurnEnd
from slipstream.rollout.ledger.segments import Buffer
from slipstream.rollout.ledger.turn_log import TurnLog
from slipstream.rollout.ledger.turns import (
    CLIENT,
    JUDGE,
    RecoveredTurns,
    Stage,
    TurnHead,
    VerdictRow,
    named,
    session_of,
    turn_id,
)
from slipstream.rollout.live.baseline import Score, ScoreBaseline
from slipstream.rollout.live.batches import LiveTrajectory, live_trajectory
from slipstream.rollout.live.conversation import question_of
from slipstream.rollout.live.known import KnownTurn, Said, Session
from slipstream.rollout.live.status import LiveStatus, SinceLastBatch
from slipstream.rollout.record import CorruptRecord, decode_chunks, encode, encode_scores
from slipstream.rollout.reward.live import NO_VOTES, JudgedTurn, Verdict
from slipstream.rollout.teacher import NOTHING_NEEDED, TeacherNeeds, TeacherScores
from slipstream.rollout.trajectory import Messages
from slipstream.rollout.turns import Entry, Forgotten, NextState, SessionEnd, Turn, TurnType, UserReward

LARGEST_LOGPROB = 1e-3
"""Log-probs may be above 0 by what rounding adds."""

NOTHING_FOLLOWED = b"[]"

SOONEST_S = 0.01
LOOK_AGAIN_S = 1.0
"""Fewest and, while the ledger is held, most seconds until waiting turns are looked at again."""


class LiveLedger(Protocol):
    """The part of the ledger that live users need: ``rollout.ledger.writer.Ledger``."""

    turns: TurnLog

    def read(self, refs: bytes) -> bytes: ...
    def when_durable(self, then: Callable[[], None]) -> None: ...


class JournalGap(RuntimeError):
    """A gateway has left out entries of its journal: a bug, or a journal that was replaced."""


class _Held(NamedTuple):
    gateway: str
    first_number: int
    entries: Sequence[Entry]
    chunks: Sequence[Buffer]


class LiveTurns:
    """The live users of a run. Implements ``LiveIntake`` of the hand-over."""

    def __init__(
        self,
        core: RolloutControl,
        ledger: LiveLedger,
        baseline: Callable[[Iterable[tuple[int, float]]], ScoreBaseline],
        recovered: RecoveredTurns,
        *,
        train: bool,
        vocab: int,
        needs: TeacherNeeds = NOTHING_NEEDED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``baseline``: makes one of the scores that were trained. ``train``: whether turns are judged and
        trained. ``vocab``: number of token ids. ``needs``: what the recipe needs of a teacher. ``clock``:
        seconds since the epoch.
        """
        self._ledger = ledger
        self._make_baseline = baseline
        self._train = train
        self._vocab = vocab
        self._needs = needs
        self._clock = clock
        self._changes = Changes()
        self._ready_listeners: list[Callable[[], None]] = []
        self._held: list[_Held] | None = None
        self._late: list[Callable[[], None]] = []
        """Verdicts that wait while the ledger is held."""
        self._taken: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        self._side_reasons: Counter[str] = Counter()
        self._late_rewards = self._verdicts = self._put_off = self._given_up = self.judge_outages = 0
        self.votes = NO_VOTES
        """Votes of language models that gave no verdict, or were not needed for it."""
        self._since = SinceLastBatch()
        for gateway in recovered.gateways:
            self._taken[gateway.name] = self._durable[gateway.name] = gateway.durable
        self._restore(core, recovered)

    # ---- entries, from gateways

    def take(
        self, gateway: str, first_number: int, entries: Sequence[Entry], chunks: Sequence[Buffer]
    ) -> None:
        """Take consecutive entries of a journal, each with its chunk. Numbers that are known are passed over.

        Raises JournalGap when entries were left out.
        """
        if self._held is not None:
            self._held.append(_Held(gateway, first_number, entries, chunks))
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
        for entry_number, (entry, chunk) in enumerate(zip(entries, chunks, strict=True), first_number):
            if entry_number > known:
                self._enter(number, entry_number, entry, chunk)
        self._taken[gateway] = last
        self._ledger.turns.taken(gateway, last)
        self._ledger.when_durable(partial(self._is_durable, gateway, last))
        self.settle()

    def durable(self, gateway: str) -> int:
        """Return the number of the last entry of a gateway that the ledger holds; 0: none."""
        return self._durable.get(gateway, 0)

    def when_durable(self, then: Callable[[], None]) -> None:
        """Call ``then`` once everything that was taken is on disk; never after a failure."""
        if self._held is not None:
            self._late.append(partial(self._ledger.when_durable, then))
        else:
            self._ledger.when_durable(then)

    def _is_durable(self, gateway: str, number: int) -> None:
        self._durable[gateway] = max(number, self._durable.get(gateway, 0))

    def _enter(self, gateway: int, number: int, entry: Entry, chunk: Buffer) -> None:
        match entry:
            case Turn():
                self._enter_turn(gateway, turn_id(gateway, number), entry, chunk)
            case NextState():
                self._enter_next(turn_id(gateway, entry.turn), bytes(entry.messages))
            case UserReward():
                self._enter_reward(turn_id(gateway, entry.turn), entry.reward)
            case SessionEnd():
                self._enter_end(session_of(named(entry.key), named(entry.session)))
            case Forgotten():
                self._enter_forgotten(turn_id(gateway, number), entry)

    def _enter_turn(self, gateway: int, id_: int, entry: Turn, chunk: Buffer) -> None:
        key = named(entry.key)
        session = session_of(key, named(entry.session))
        parent_id = None if entry.parent is None else turn_id(gateway, entry.parent)
        parent = None if parent_id is None else self._turns.get(parent_id)
        if parent is not None and parent.session != session:
            parent = None
        context, problem = self._checked(entry, chunk)
        is_lost = problem is not None
        if parent_id is not None and not _can_continue(entry.shared, parent):
            problem, is_lost = problem or "the tokens before it are not there", entry.shared > 0 or is_lost
        elif entry.parent is None and entry.shared:
            problem, is_lost = problem or f"it shares {entry.shared} tokens with no turn", True
        head = TurnHead(entry.shared, context, entry.spans, entry.finish, entry.ended_s, not is_lost)
        problem = problem or self._version_problem(head)
        end, loss = self._end_at_once(entry, head, problem)
        said = encode(Said(entry.session, entry.key, entry.kept, bytes(entry.messages), bytes(entry.answer)))
        payload = self._ledger.turns.turn(
            id_,
            session,
            key,
            parent_id if parent is not None else None,
            head,
            chunk,
            said,
            end=end,
            loss=loss,
            note=problem or "",
        )
        turn = KnownTurn(id_, session, key, parent, head, payload, is_lost=is_lost)
        self._remember(turn)
        self._sessions[session].goes_on()
        before = turn.continues
        link = None if before is None else before.id
        if end is None:
            self._core.live.arrived(id_, head.versions, link)
        else:
            self._core.live.is_context(id_, link, end)
            if end is TurnEnd.SIDE:
                self._side_reasons[entry.reason] += 1

    def _checked(self, entry: Turn, chunk: Buffer) -> tuple[int, str | None]:
        """Return the number of context tokens of a chunk, and what is wrong with it, if anything."""
        try:
            chunks = list(decode_chunks(chunk))
        except CorruptRecord as error:
            return 0, str(error)
        if len(chunks) != 1:
            return 0, f"{len(chunks)} chunks, expected 1"
        context, tokens, logprobs = chunks[0]
        sampled = sum(number for _, number in entry.spans)
        if len(tokens) != sampled or any(number < 0 for _, number in entry.spans):
            return len(context), f"{len(tokens)} sampled tokens, and version spans {entry.spans}"
        for ids in (context, tokens):
            if len(ids) and not (ids.min() >= 0 and ids.max() < self._vocab):
                return len(context), f"token ids outside the vocabulary of {self._vocab}"
        if not (np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)).all():
            return len(context), "log-probs that are no finite numbers of at most 0"
        return len(context), None

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
                self._core.lag(version)
        except UnknownVersion as error:
            return str(error)
        return None

    def _enter_next(self, id_: int, messages: bytes) -> None:
        turn = self._turns.get(id_)
        if turn is None or turn.has_followed or not self._core.live.is_waiting(id_):
            return
        turn.has_followed = True
        turn.followed_s = self._clock()
        ref = self._ledger.turns.followed(id_, messages)
        turn.payload = turn.payload._replace(next=ref)
        self._ask(id_)

    def _enter_reward(self, id_: int, reward: float) -> None:
        turn = self._turns.get(id_)
        if turn is None or not self._core.live.is_alive(id_) or self._is_in_training(id_):
            self._late_rewards += 1
        elif math.isfinite(reward) and not (self._needs.alone and turn.payload.teacher is None):
            self._rule(turn, VerdictRow(reward, CLIENT, turn.payload.teacher is not None))

    def _enter_end(self, id_: int) -> None:
        self._ledger.turns.session_ended(id_)
        session = self._sessions.get(id_)
        if session is None:
            return
        for turn in list(session.turns.values()):
            self._enter_next(turn.id, NOTHING_FOLLOWED)
        session.has_ended = True
        self._drop_if_over(id_)

    def _enter_forgotten(self, entry_id: int, entry: Forgotten) -> None:
        name = None if entry.session is None else named(entry.session)
        key = None if entry.key is None else named(entry.key)
        self._ledger.turns.forget(name, key, entry_id)
        for turn in list(self._turns.values()):
            is_meant = key is None or turn.key == key
            if name is not None:
                is_meant = is_meant and turn.session == session_of(turn.key, name)
            if is_meant:
                turn.is_lost = True
                self._sessions[turn.session].forget()
                self._core.live.ended(turn.id, TurnEnd.FORGOTTEN)
        self._erase()
        for id_ in list(self._sessions):
            self._drop_if_over(id_)

    # ---- judging

    async def unjudged(self) -> int:
        """Wait for a turn that is to be judged, and take it off the queue."""
        return await self._changes.first(self._next_unjudged)

    def question(self, id_: int, *, with_ids: bool = False) -> tuple[JudgedTurn, Messages] | None:
        """Return what a judge is asked about a turn; None if it needs no verdict any more. ``with_ids``: with
        its token ids.

        May be called in any thread. Raises LedgerError and CorruptRecord when it cannot be read.
        """
        turn = self._turns.get(id_)
        if turn is None or not self._needs_verdict(turn):
            return None
        return question_of(turn, self._ledger.read, with_ids=with_ids)

    def verdict(self, id_: int, verdict: Verdict) -> None:
        """Take a verdict with a score or with a teacher's, unless the turn needs none any more.

        A verdict whose teacher's scores do not fit the turn gives the turn up. One without a teacher's scores
        filters it if the recipe trains on nothing else.
        """
        if self._held is not None:
            self._late.append(partial(self.verdict, id_, verdict))
            return
        turn = self._turns.get(id_)
        teacher = verdict.teacher
        if turn is None or (verdict.score is None and teacher is None) or not self._needs_verdict(turn):
            return
        if teacher is not None and (problem := self._problem_of_scores(turn, teacher)) is not None:
            self.unanswerable(id_, problem)
            return
        self._verdicts += 1
        if teacher is None and self._needs.alone:
            self._filter_out(turn)
            return
        scores = b"" if teacher is None else encode_scores(teacher)
        self._rule(turn, VerdictRow(verdict.score, JUDGE, teacher is not None), verdict.hint, scores)

    def _problem_of_scores(self, turn: KnownTurn, teacher: TeacherScores) -> str | None:
        """Return what is wrong with a teacher's scores of a turn, if anything."""
        if len(teacher) != turn.head.sampled or not teacher.has_T.all():
            return (
                f"its judge gave a teacher's scores of {int(teacher.has_T.sum())} tokens, expected one for "
                f"each of the {turn.head.sampled} sampled tokens"
            )
        missing = self._needs.problem(teacher, np.ones(len(teacher), np.bool_))
        if missing is not None:
            return f"its judge has not given {missing}"
        if teacher.largest_id >= self._vocab:
            return f"its judge gave a teacher's token ids outside the vocabulary of {self._vocab}"
        return None

    def _filter_out(self, turn: KnownTurn) -> None:
        """End a turn that would train nothing."""
        if self._core.live.ended(turn.id, TurnEnd.FILTERED):
            self._ledger.turns.ended(turn.id, TurnEnd.FILTERED, Loss.FILTERED)
            self._drop_if_over(turn.session)

    def unanswerable(self, id_: int, problem: str) -> None:
        """Give up a turn whose question cannot be read, or whose verdict cannot be used."""
        self._end_unjudged(id_, TurnEnd.FAILED, Loss.FAILED, problem)

    def nothing_to_learn(self, id_: int) -> None:
        """End a turn that the judge has decided about without a score and without a hint."""
        self._end_unjudged(id_, TurnEnd.FILTERED, Loss.FILTERED, "the judge has neither a score nor a hint")

    def give_up(self, after_s: float) -> float:
        """Fail the turns that have waited for their verdicts for so long. Return when to look again: the
        number of seconds until the next turn may have.
        """
        now, oldest_s = self._clock(), 0.0
        if self._held is not None:
            return min(after_s, LOOK_AGAIN_S)
        for turn in list(self._turns.values()):
            if not self._needs_verdict(turn):
                continue
            waited_s = now - turn.followed_s
            if waited_s >= after_s:
                self._given_up += 1
                problem = f"it has waited {waited_s:.0f} s for its verdict (judge.give_up_s: {after_s:g})"
                self._end_unjudged(turn.id, TurnEnd.FAILED, Loss.FAILED, problem)
            else:
                oldest_s = max(oldest_s, waited_s)
        return max(SOONEST_S, after_s - oldest_s)

    def _end_unjudged(self, id_: int, end: TurnEnd, loss: Loss, note: str) -> None:
        if self._held is not None:
            self._late.append(partial(self._end_unjudged, id_, end, loss, note))
        elif self._core.live.ended(id_, end):
            self._ledger.turns.ended(id_, end, loss, note=note)
            self._drop_if_over(self._turns[id_].session)

    def put_off(self, id_: int) -> int:
        """Note that a turn gets no verdict for the time being. Return how often that was so before."""
        self._put_off += 1
        turn = self._turns.get(id_)
        if turn is None:
            return 0
        turn.put_off += 1
        return turn.put_off - 1

    def ask_again(self, id_: int) -> None:
        """Put a turn back onto the queue, if it still needs a verdict."""
        turn = self._turns.get(id_)
        if turn is not None and self._needs_verdict(turn):
            self._ask(id_)

    def _needs_verdict(self, turn: KnownTurn) -> bool:
        is_waiting = self._core.live.is_waiting(turn.id)
        return is_waiting and turn.has_followed and turn.verdict is None and not turn.is_lost

    def _ask(self, id_: int) -> None:
        self._queue.append(id_)
        self._changes.notify()

    def _next_unjudged(self) -> int | None:
        while self._queue:
            id_ = self._queue.popleft()
            turn = self._turns.get(id_)
            if turn is not None and self._needs_verdict(turn):
                return id_
        return None

    def _rule(
        self, turn: KnownTurn, verdict: VerdictRow, hint: str | None = None, scores: bytes = b""
    ) -> None:
        turn.verdict = verdict
        ref = self._ledger.turns.judged(turn.id, verdict, hint, scores)
        if ref is not None:
            turn.payload = turn.payload._replace(teacher=ref)
        self._ledger.when_durable(partial(self._has_verdict, self._core, turn.id))

    def _has_verdict(self, core: RolloutControl, id_: int) -> None:
        """Let a turn be trained whose verdict is on disk. ``core``: the one that was in charge then."""
        if core is self._core and core.live.is_waiting(id_):
            core.live.ready(id_)
            self._notify_ready()

    # ---- training

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` whenever a turn has become ready."""
        self._ready_listeners.append(then)

    def trajectories(self) -> list[LiveTrajectory]:
        """Return the live trajectories of the batch that the core has taken."""
        batch = [
            live_trajectory(taken, [self._turns[each.id] for each in taken])
            for taken in self._core.live.training
        ]
        scores = [each.scores for each in batch]
        advantages = iter(self._baseline.advantages(list(chain.from_iterable(scores))))
        for trajectory in batch:
            trajectory.advantages = tuple(
                None if turn.score is None else next(advantages) for turn in trajectory.turns
            )
        now = self._clock()
        ages_s = [max(0.0, now - turn.head.ended_s) for each in batch for turn in each.turns]
        self._since = SinceLastBatch(
            trained_ages_s=ages_s, scores=[score.score for each in scores for score in each]
        )
        return batch

    def trained(self, batch: Iterable[LiveTrajectory]) -> None:
        """Note that the version was published which was trained on a batch."""
        turns = sorted((turn for each in batch for turn in each.turns), key=lambda turn: -turn.id)
        self._baseline.trained(Score(turn.key, turn.score) for turn in turns if turn.score is not None)
        self._erase()
        self.settle()
        for session in {turn.session for turn in turns}:
            self._drop_if_over(session)

    def quarantined(self, id_: int, note: str) -> None:
        """Write down that a turn is given up because it kills the trainer."""
        self._ledger.turns.ended(id_, TurnEnd.FAILED, Loss.QUARANTINED, note=note)
        self._erase()

    def training_ends(self) -> None:
        """Train none of the turns that come from now on: the run has done its last step.

        They would wait without end, because no version makes them too old.
        """
        self._train = False

    def settle(self) -> bool:
        """Write down the turns that have expired. Return True if there were any."""
        sessions = self._write_expired()
        for session in sessions:
            self._drop_if_over(session)
        return bool(sessions)

    def _write_expired(self) -> set[int]:
        """Write down the turns that have expired, and return their sessions."""
        sessions: set[int] = set()
        now = self._clock()
        for expired in self._core.live.take_expired():
            turn = self._turns[expired.id]
            sessions.add(turn.session)
            self._ledger.turns.ended(
                turn.id, TurnEnd.EXPIRED, Loss.STALE, version=self._core.version, lag=expired.lag
            )
            self._since.expired_lags.append(expired.lag)
            self._since.expired_ages_s.append(max(0.0, now - turn.head.ended_s))
        return sessions

    # ---- restarts

    def hold(self) -> None:
        """Record nothing until ``restored``: the ledger goes back to an older version."""
        self._held = []

    def restored(self, core: RolloutControl, recovered: RecoveredTurns) -> None:
        """Go on with another control core, and with what the ledger has read again."""
        self._restore(core, recovered)
        held, self._held = self._held or [], None
        late, self._late = self._late, []
        for each in held:
            self.take(each.gateway, each.first_number, each.entries, each.chunks)
        for event in late:
            event()
        self._erase()

    def _restore(self, core: RolloutControl, recovered: RecoveredTurns) -> None:
        self._core = core
        self._baseline = self._make_baseline(recovered.trained)
        self._turns: dict[int, KnownTurn] = {}
        self._sessions: dict[int, Session] = {}
        self._queue: deque[int] = deque()
        door = core.live
        for stored in recovered.turns:
            parent = None if stored.parent is None else self._turns.get(stored.parent)
            turn = KnownTurn.stored(stored, parent)
            self._remember(turn)
            before = turn.continues
            link = None if before is None else before.id
            if stored.state not in set(Stage):
                door.is_context(turn.id, link)
                continue
            door.arrived(turn.id, turn.head.versions, link)
            if turn.verdict is not None and door.is_waiting(turn.id):
                door.ready(turn.id)
            elif self._needs_verdict(turn):
                turn.followed_s = self._clock()
                self._queue.append(turn.id)
        door.ends.update({end: n for end in TurnEnd if (n := recovered.counts.get(end.value))})
        for id_ in recovered.ended_sessions:
            if id_ in self._sessions:
                self._sessions[id_].has_ended = True
        for session in self._sessions.values():
            *_, newest = session.turns.values()
            if not newest.payload.all:  # nothing that continues it could be trained
                session.forget()
        self.settle()
        for id_ in list(self._sessions):
            self._drop_if_over(id_)
        self._notify_ready()
        self._changes.notify()

    # ---- status

    def status(self) -> LiveStatus:
        """Return the present state."""
        ages: dict[Stage, list[float]] = {stage: [] for stage in Stage}
        for turn in self._turns.values():
            if self._core.live.is_alive(turn.id):
                ages[_stage_of(turn)].append(turn.head.ended_s)
        now = self._clock()
        oldest = {stage: max(0.0, now - min(ended)) if ended else 0.0 for stage, ended in ages.items()}
        return LiveStatus(
            waiting=len(ages[Stage.WAITING]),
            unjudged=len(ages[Stage.UNJUDGED]),
            ready=len(ages[Stage.READY]),
            oldest_waiting_s=oldest[Stage.WAITING],
            oldest_unjudged_s=oldest[Stage.UNJUDGED],
            oldest_ready_s=oldest[Stage.READY],
            ends=dict(self._core.live.ends),
            side_reasons=dict(self._side_reasons),
            verdicts=self._verdicts,
            put_off=self._put_off,
            given_up=self._given_up,
            votes=self.votes,
            judge_outages=self.judge_outages,
            late_rewards=self._late_rewards,
            baseline=self._baseline.mean,
            since=self._since,
        )

    # ---- what is known

    def _remember(self, turn: KnownTurn) -> None:
        self._turns[turn.id] = turn
        self._sessions.setdefault(turn.session, Session()).turns[turn.id] = turn

    def _is_in_training(self, id_: int) -> bool:
        return any(taken.id == id_ for path in self._core.live.training for taken in path)

    def _erase(self) -> None:
        """Have what is forgotten written over, unless a training step may read it."""
        if not self._core.is_training:
            self._ledger.turns.may_erase()

    def _drop_if_over(self, id_: int) -> None:
        """Forget a session of which no turn is to be trained or continued."""
        self._write_expired()  # it knows the turns
        session = self._sessions.get(id_)
        if session is None or not session.has_ended:
            return
        if not any(map(self._core.live.is_alive, session.turns)):
            self._core.live.unlink(session.turns)
            for turn in session.turns:
                del self._turns[turn]
            del self._sessions[id_]
            if session.is_forgotten:
                self._ledger.turns.session_ended(id_)

    def _notify_ready(self) -> None:
        for then in self._ready_listeners:
            then()


def _can_continue(shared: int, parent: KnownTurn | None) -> bool:
    """True if a turn can share so many tokens with its parent; None: there is no such turn."""
    if parent is None:
        return False
    return not shared or (not parent.is_lost and shared <= parent.head.length)


def _stage_of(turn: KnownTurn) -> Stage:
    if turn.verdict is not None:
        return Stage.READY
    return Stage.UNJUDGED if turn.has_followed else Stage.WAITING
