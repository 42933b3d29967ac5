"""One place for a judge process: gives it questions, replaces it when it ends, and finds out who ended it.

    questions ──► process ──► reply: a reward, or a failed attempt
                     │
                     └─ ends ──► 1 question open: a failed attempt of that one
                                 more open: nobody is charged. They are asked again in two parts, each
                                 of them apart, and a part that ends the process again is parted again.
                                 If the process has said whose code ran, that question is one part

So a question is charged with the end of a process only if it was asked alone.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from slipstream.rollout.reward.judge.judge_errors import Ending, JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.judge.judge_process import GRACE_S, JudgeProcess
from slipstream.rollout.reward.judge.wire import (
    Answer,
    Blame,
    JudgeSetup,
    Reply,
    Retiring,
    Unscored,
    Withdrawal,
    framed,
)
from slipstream.rollout.system.restarts import RestartLimit, Restarts


@dataclass(eq=False, slots=True)
class OpenQuestion:
    """Finished episodes that wait for their rewards, or a turn that waits for its verdict."""

    number: int
    subject: str
    """Name of what is judged, for messages."""
    content: str
    """Name of what belongs to the subject, for messages."""
    frame: Callable[[int], bytes]
    """Encodes the question, given its number."""
    answer: "asyncio.Future[Answer]"
    asked_at: float
    """Time at which the pool was asked; the time of the event loop."""
    causes: list[str] = field(default_factory=list[str])
    """Cause of each failed attempt."""
    seat: "Seat | None" = None
    """Place whose process has the question now."""
    sent_at: float = 0.0
    """Time at which that process was asked."""
    overlapped: bool = False
    """True if that process has had another question open meanwhile."""


Charge = Callable[[OpenQuestion, str, Callable[[], None] | None], None]
"""Charges a question with an attempt, which has failed for the cause given. The last argument is to be called
for the next attempt; None: the question is queued."""


class Seat:
    """Keeps one judge process running, and up to ``concurrency`` questions open in it."""

    def __init__(
        self, setup: JudgeSetup, concurrency: int, attempts: int, delay: Callable[[int], float], log: Path
    ) -> None:
        """``delay``: seconds to wait before what has failed a number of times is tried again."""
        self._setup = setup
        self._concurrency = concurrency
        self._attempts = attempts
        self._delay = delay
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[], OpenQuestion | None] | None = None
        self._process: JudgeProcess | None = None
        self._open: dict[int, OpenQuestion] = {}
        self._apart: list[list[OpenQuestion]] = []
        """Questions to be asked apart from all others, each list in one go."""
        self._is_apart = False
        self._is_retiring = False
        self._answered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failures = Restarts(
            # Attempts are counted one after another, and questions answer for the ends of processes.
            RestartLimit(f"{setup.section}.attempts", None, math.inf, "nothing was judged")
        )
        self.restarts = 0
        self.of_groups = False
        """True if the reward judges all episodes of a group at once."""

    @property
    def n_open(self) -> int:
        """Number of questions that the process has."""
        return len(self._open)

    async def start(self) -> None:
        """Start the first process. Raises JudgeStartFailed."""
        self._process = await self._start_process()
        self.of_groups = self._process.of_groups

    async def keep(self, take: Callable[[], OpenQuestion | None], charge: Charge) -> None:
        """Ask questions until the task is cancelled. Raises JudgeStartFailed if no process can be started.

        ``take``: returns the longest waiting question, and forgets it; None: there is none.
        """
        self._take, self._charge = take, charge
        idle_ends = 0
        try:
            while True:
                self.feed()
                assert self._process is not None
                ending = await self._process.ended()
                self._process = None
                if not self._open and not self._answered and not self._is_retiring:
                    idle_ends += 1
                    cause = f"ends its process while it is asked nothing: {ending.cause('its time')}"
                    self._failed(JudgeStartFailed(f"the reward {self._setup.path} {cause}"), idle_ends)
                else:
                    idle_ends = 0
                    self._failures.progressed()
                self._sort_out(ending)
                self.restarts += 1
                self._process = await self._restart(idle_ends)
        finally:
            await self.close()

    async def close(self) -> None:
        """End the process and everything that it has started, in a bounded time."""
        process, self._process = self._process, None
        if process is not None:
            if self._open:
                process.kill("the judge pool is closed")
            else:
                process.close()
            await process.end()

    def feed(self) -> None:
        """Give the process as many questions as it may have."""
        process = self._process
        if process is None or self._take is None:
            return
        if self._is_retiring:
            if not self._open:
                process.close()
            return
        if not self._open:
            self._is_apart = False
            while self._apart and not self._is_apart:
                for question in self._apart.pop():
                    self._is_apart |= self._ask(process, question)
        capacity = self._concurrency if process.concurrent else 1
        while not self._is_apart and not self._apart and len(self._open) < capacity:
            question = self._take()
            if question is None:
                break
            self._ask(process, question)

    def ask_apart(self, question: OpenQuestion) -> None:
        """Ask a question apart from all others, before those that wait for any seat."""
        self._apart.append([question])
        self.feed()

    def withdraw(self, question: OpenQuestion) -> None:
        """Stop judging a question whose reward is not needed any more. The process answers nevertheless."""
        if self._process is not None and question.number in self._open:
            self._process.ask(framed(Withdrawal(question.number)))

    # -- A question

    def _ask(self, process: JudgeProcess, question: OpenQuestion) -> bool:
        """Send a question. Return True if it was sent: not if nobody waits, or if it cannot be encoded."""
        if question.answer.done():
            return False
        try:
            frame = question.frame(question.number)
        except Exception as error:  # arrays and metadata are those of user code
            reason = f"{question.subject} or its {question.content} cannot be sent to a process: {error!r}"
            question.answer.set_exception(JudgingFailed(reason))
            return False
        process.ask(frame)
        question.seat, question.sent_at = self, self._loop.time()
        question.overlapped = bool(self._open)
        if len(self._open) == 1:  # more of them have overlapped already
            next(iter(self._open.values())).overlapped = True
        self._open[question.number] = question
        if self._timer is None:
            self._timer = self._loop.call_later(self._longest(), self._check_time)
        return True

    def _on_reply(self, reply: Reply) -> None:
        if isinstance(reply, Retiring):
            self._is_retiring = True
        elif isinstance(reply, Answer | Unscored):
            question = self._open.pop(reply.number, None)
            if question is None:
                return
            question.seat = None
            if isinstance(reply, Unscored):
                self._attempt_failed(question, reply)
            elif not question.answer.done():
                question.answer.set_result(reply)
            self._answered += 1
        self.feed()

    def _attempt_failed(self, question: OpenQuestion, reply: Unscored) -> None:
        may_be_innocent = question.overlapped and reply.blame is not Blame.QUESTION
        if reply.blame is Blame.MEMORY:
            self._is_retiring = True
            may_be_innocent = may_be_innocent or self._answered > 0
        if question.answer.done():
            return
        if may_be_innocent:
            self._apart.append([question])
        else:
            self._charge(question, reply.reason, None)

    # -- Time

    def _longest(self) -> float:
        """Seconds after which a question is overdue although the process watches its own time.

        A question that overlaps with others may get its time twice, because another one has blocked it.
        """
        overlaps = self._process is not None and self._process.concurrent
        return self._setup.timeout_s * (2 if overlaps else 1) + GRACE_S

    def _check_time(self) -> None:
        self._timer = None
        oldest = next(iter(self._open.values()), None)
        if oldest is None or self._process is None:
            return
        left = oldest.sent_at + self._longest() - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_time)
        else:
            limit = f"{self._setup.timeout_s:g} s ({self._setup.section}.timeout_s)"
            self._process.kill(f"it took longer than {limit}, and the watchdog of its process did not end it")

    # -- The process

    async def _start_process(self) -> JudgeProcess:
        self._is_retiring = False
        self._answered = 0
        return await JudgeProcess.start(self._setup, self._log, self._on_reply)

    async def _restart(self, failures: int) -> JudgeProcess:
        """Start another process, and try again when its start fails."""
        while True:
            if failures:
                await asyncio.sleep(self._delay(failures))
            try:
                return await self._start_process()
            except JudgeStartFailed as error:
                failures += 1
                self._failed(error, failures)

    def _failed(self, error: JudgeStartFailed, failures: int) -> None:
        """Note a failure of the process itself, of so many in a row. Raises the error if it is the last."""
        refused = self._failures.refused(str(error))
        if failures >= self._attempts:
            raise error
        if refused is not None:
            raise JudgeStartFailed(f"the reward {self._setup.path} {refused}") from error

    def _sort_out(self, ending: Ending) -> None:
        """Decide what becomes of the questions that were open when the process ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        was_alone = len(self._open) == 1
        questions = [question for question in self._open.values() if not question.answer.done()]
        self._open.clear()
        for question in questions:
            question.seat = None
        if was_alone:
            for question in questions:
                cause = ending.cause(f"{self._setup.timeout_s:g} s ({self._setup.section}.timeout_s)")
                self._charge(question, cause, partial(self.ask_apart, question))
        else:
            self._apart += filter(None, _parted(questions, ending.suspect))


def _parted(questions: list[OpenQuestion], suspect: int | None) -> Iterator[list[OpenQuestion]]:
    """Part questions, one of which has ended their process. The part to be asked first comes last."""
    suspects = [question for question in questions if question.number == suspect]
    if suspects:
        yield suspects
        yield [question for question in questions if question.number != suspect]
    else:
        middle = (len(questions) + 1) // 2
        yield questions[middle:]
        yield questions[:middle]
