"""The verdicts on turns: who waits for one, what a judge says, and what becomes of the turn.

ask() ──► queue ──► unjudged() ──► question() ──► take() ──► ledger ──on disk──► core: ready
            ▲                                      │
            └────────── ask_again() ◄── put_off() ─┘ no verdict
"""

from collections import deque
from functools import partial

import numpy as np

from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.live_door import TurnEnd
from slipstream.rollout.ledger.rows.stored_turns import JUDGE, KnownTurn, VerdictRow
from slipstream.rollout.live.conversation import question_of
from slipstream.rollout.live.table import TurnTable
from slipstream.rollout.reward.live import NO_VOTES, JudgedTurn, Verdict
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.tokens.record import CorruptRecord, decode_chunks, encode_scores
from slipstream.rollout.tokens.teacher import TeacherNeeds, TeacherScores
from slipstream.rollout.tokens.trajectory import Messages
from slipstream.rollout.tokens.turn_entries import Turn

SOONEST_S = 0.01
LOOK_AGAIN_S = 1.0
"""Fewest and, while the ledger is held, most seconds until waiting turns are looked at again."""


class Verdicts:
    """The turns that wait for verdicts. Single event loop."""

    def __init__(self, table: TurnTable, needs: TeacherNeeds, vocab: int) -> None:
        """``needs``: what the recipe needs of a teacher. ``vocab``: number of token ids."""
        self._table = table
        self._needs = needs
        self._vocab = vocab
        self._changes = Changes()
        self._queue: deque[int] = deque()
        self.count = self.put_off_count = self.given_up = self.outages = 0
        """Numbers of verdicts, of questions without one, of turns that waited too long, of outages."""
        self.votes = NO_VOTES
        """Votes of language models that gave no verdict, or were not needed for it."""

    def begin_again(self) -> None:
        """Forget who waits."""
        self._queue.clear()

    async def unjudged(self) -> int:
        """Wait for a turn that is to be judged, and take it off the queue."""
        return await self._changes.first(self._next_unjudged)

    def question(self, id_: int, *, with_ids: bool = False) -> tuple[JudgedTurn, Messages] | None:
        """Return the question to a judge about a turn; None: it needs no verdict any more. ``with_ids``: with
        its token ids.

        May be called in any thread. Raises LedgerError and CorruptRecord when it cannot be read.
        """
        turn = self._table.turns.get(id_)
        if turn is None or not self.is_needed(turn):
            return None
        return question_of(turn, self._table.ledger.read, with_ids=with_ids)

    def take(self, id_: int, verdict: Verdict) -> None:
        """Take a verdict with a score or with a teacher's, unless the turn needs none any more.

        A verdict whose teacher's scores do not fit the turn gives the turn up. One without a teacher's scores
        filters it if the recipe trains on nothing else.
        """
        if self._table.defer(partial(self.take, id_, verdict)):
            return
        turn = self._table.turns.get(id_)
        teacher = verdict.teacher
        if turn is None or (verdict.score is None and teacher is None) or not self.is_needed(turn):
            return
        problem = None if teacher is None else problem_of_scores(turn, teacher, self._needs, self._vocab)
        if problem is not None:
            self.unanswerable(id_, problem)
            return
        self.count += 1
        if teacher is None and self._needs.alone:
            if self._table.core.live.ended(turn.id, TurnEnd.FILTERED):
                self._table.ledger.turns.ended(turn.id, TurnEnd.FILTERED, Loss.FILTERED)
                self._table.drop_if_over(turn.session)
            return
        scores = b"" if teacher is None else encode_scores(teacher)
        self.rule(turn, VerdictRow(verdict.score, JUDGE, teacher is not None), verdict.hint, scores)

    def unanswerable(self, id_: int, problem: str) -> None:
        """Give up a turn whose question cannot be read, or whose verdict cannot be used."""
        self._end_unjudged(id_, TurnEnd.FAILED, Loss.FAILED, problem)

    def nothing_to_learn(self, id_: int) -> None:
        """End a turn that the judge has decided about without a score and without a hint."""
        self._end_unjudged(id_, TurnEnd.FILTERED, Loss.FILTERED, "the judge has neither a score nor a hint")

    def unpaired(self, id_: int) -> None:
        """End a turn whose next state was lost."""
        self._end_unjudged(id_, TurnEnd.UNPAIRED, None, "its client rewrote the history that would tell")

    def give_up(self, after_s: float) -> float:
        """Fail the turns that have waited for their verdicts for so long. Return when to look again: the
        number of seconds until the next turn may have.
        """
        now, oldest_s = self._table.clock(), 0.0
        if self._table.is_held:
            return min(after_s, LOOK_AGAIN_S)
        for turn in list(self._table.turns.values()):
            if not self.is_needed(turn):
                continue
            waited_s = now - turn.followed_s
            if waited_s >= after_s:
                self.given_up += 1
                problem = f"it has waited {waited_s:.0f} s for its verdict (judge.give_up_s: {after_s:g})"
                self._end_unjudged(turn.id, TurnEnd.FAILED, Loss.FAILED, problem)
            else:
                oldest_s = max(oldest_s, waited_s)
        return max(SOONEST_S, after_s - oldest_s)

    def _end_unjudged(self, id_: int, end: TurnEnd, loss: Loss | None, note: str) -> None:
        if self._table.defer(partial(self._end_unjudged, id_, end, loss, note)):
            return
        if self._table.core.live.ended(id_, end):
            self._table.ledger.turns.ended(id_, end, loss, note=note)
            self._table.drop_if_over(self._table.turns[id_].session)

    def put_off(self, id_: int) -> int:
        """Note that a turn gets no verdict for the time being. Return how often that was so before."""
        self.put_off_count += 1
        turn = self._table.turns.get(id_)
        if turn is None:
            return 0
        turn.put_off += 1
        return turn.put_off - 1

    def ask_again(self, id_: int) -> None:
        """Put a turn back onto the queue, if it still needs a verdict."""
        turn = self._table.turns.get(id_)
        if turn is not None and self.is_needed(turn):
            self.ask(id_)

    def is_needed(self, turn: KnownTurn) -> bool:
        """True if the turn waits for a verdict now."""
        is_waiting = self._table.core.live.is_waiting(turn.id)
        may_be_judged = not (turn.is_lost or turn.head.is_rewarded)
        return is_waiting and turn.has_followed and turn.verdict is None and may_be_judged

    def ask(self, id_: int) -> None:
        """Put a turn onto the queue."""
        self._queue.append(id_)
        self._changes.notify()

    def _next_unjudged(self) -> int | None:
        while self._queue:
            id_ = self._queue.popleft()
            turn = self._table.turns.get(id_)
            if turn is not None and self.is_needed(turn):
                return id_
        return None

    def rule(
        self, turn: KnownTurn, verdict: VerdictRow, hint: str | None = None, scores: bytes = b""
    ) -> None:
        """Record a verdict, of whomever, that lets the turn be trained. ``scores``: a teacher's, encoded."""
        self._table.ledger.turns.judged(turn, verdict, hint, scores)
        self._table.ledger.when_durable(partial(self._has_verdict, self._table.core, turn.id))

    def _has_verdict(self, core: RolloutControl, id_: int) -> None:
        """Let a turn be trained whose verdict is on disk. ``core``: the one that was in charge then."""
        if core is self._table.core and core.live.is_waiting(id_):
            core.live.ready(id_)
            self._table.notify_ready()


LARGEST_LOGPROB = 1e-3
"""Log-probs may be above 0 by what rounding adds."""


def check_chunk(entry: Turn, vocab: int) -> tuple[int, str | None]:
    """Return the number of context tokens of a turn's chunk, and what is wrong with the chunk, if anything.

    ``vocab``: number of token ids.
    """
    try:
        chunks = list(decode_chunks(entry.chunk))
    except CorruptRecord as error:
        return 0, str(error)
    if len(chunks) != 1:
        return 0, f"{len(chunks)} chunks, expected 1"
    context, tokens, logprobs = chunks[0]
    sampled = sum(number for _, number in entry.spans)
    if len(tokens) != sampled or any(number < 0 for _, number in entry.spans):
        return len(context), f"{len(tokens)} sampled tokens, and version spans {entry.spans}"
    for ids in (context, tokens):
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
            return len(context), f"token ids outside the vocabulary of {vocab}"
    if not (np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)).all():
        return len(context), "log-probs that are no finite numbers of at most 0"
    return len(context), None


def problem_of_scores(turn: KnownTurn, teacher: TeacherScores, needs: TeacherNeeds, vocab: int) -> str | None:
    """Return what is wrong with a teacher's scores of a turn, if anything."""
    if len(teacher) != turn.head.sampled or not teacher.has_T.all():
        return (
            f"its judge gave a teacher's scores of {int(teacher.has_T.sum())} tokens, expected one for "
            f"each of the {turn.head.sampled} sampled tokens"
        )
    missing = needs.problem(teacher, np.ones(len(teacher), np.bool_))
    if missing is not None:
        return f"its judge has not given {missing}"
    if teacher.largest_id >= vocab:
        return f"its judge gave a teacher's token ids outside the vocabulary of {vocab}"
    return None


def can_continue(shared: int, parent: KnownTurn | None) -> bool:
    """True if a turn can share so many tokens with its parent; None: there is no such turn."""
    if parent is None:
        return False
    return not shared or (not parent.is_lost and shared <= parent.head.length)
