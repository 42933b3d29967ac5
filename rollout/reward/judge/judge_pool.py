"""Judges finished episodes in processes of their own: the reward is user code, and may do anything.

    score() ──► queue, first come first served ──► seat 1..n ──► judge process ──► reward
                  ▲                                                   │
                  └──────── after a wait ◄──── failed attempt ◄───────┘

A question is encoded when a process takes it, so that a waiting question costs a reference. The queue is as
long as there are callers, each of which waits, and a process has at most ``rollout.judging.concurrency``.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType

from slipstream.configs.schema import JudgingConfig, PluginConfig
from slipstream.rollout.reward.judge.judge_errors import (
    JudgesClosed,
    JudgeStartFailed,
    JudgingFailed,
    failed_judging,
)
from slipstream.rollout.reward.judge.seat import OpenQuestion, Seat
from slipstream.rollout.reward.judge.wire import (
    Answer,
    Engines,
    GroupScored,
    JudgeSetup,
    ModelSetup,
    Ruled,
    Scored,
    TurnQuestion,
    framed,
    framed_group,
    framed_question,
)
from slipstream.rollout.reward.live import JudgedTurn, Verdict
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.tokens.record import CorruptRecord, decode_scores
from slipstream.rollout.tokens.teacher import TeacherScores
from slipstream.rollout.tokens.trajectory import Messages, Prompt, Trajectory

__all__ = ["JudgePool", "JudgeStartFailed", "JudgeStatus", "JudgesClosed", "JudgingFailed"]

LONGEST_WAIT_S = 60.0
"""Most seconds between two attempts."""


@dataclass(frozen=True, slots=True)
class JudgeStatus:
    """State of a judge pool, for metrics."""

    waiting: int
    """Questions that no process has, those included that wait for their next attempt."""
    running: int
    """Questions that a process has."""
    oldest_s: float
    """Age of the oldest of all of them, in seconds; 0 without any."""
    restarts: int
    """Number of processes that were replaced so far."""
    failed_attempts: int
    """Number of attempts that have failed so far."""


class JudgePool:
    """The judge processes of one collector.

        async with JudgePool(rollout.judging, rollout.reward, run.folder / "logs", "collector-0") as judges:
            judgement = await judges.score(prompt, response, trajectory)

    Entering starts every process, so that a reward that cannot be constructed is an error at once:
    JudgeStartFailed. Leaving ends them, with everything that they have started.
    """

    def __init__(
        self,
        settings: JudgingConfig,
        plugin: PluginConfig,
        logs_folder: Path,
        name: str,
        *,
        of_turns: bool = False,
        reward_key: str = "reward",
        model: ModelSetup | None = None,
        engines: Engines = bytes,
    ) -> None:
        """``name`` distinguishes the logs of the pools of a run: judge-NAME-0.log and so on. ``of_turns``:
        the plugin judges turns of live users. ``reward_key``: ``rollout.reward_key``. ``model``: that the
        plugin may ask. ``engines``: of the policy, if the model or its teacher is the policy.
        """
        self._settings = settings
        self._engines = engines
        self._setup = JudgeSetup(
            plugin.path,
            plugin.args,
            settings.timeout_s,
            settings.start_timeout_s,
            settings.memory_mb,
            "live.judging" if of_turns else "rollout.judging",
            of_turns,
            reward_key,
            model,
        )
        self._logs = [logs_folder / f"judge-{name}-{number}.log" for number in range(settings.processes)]
        self._seats: list[Seat] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._open: dict[int, OpenQuestion] = {}
        self._queue: deque[OpenQuestion] = deque()
        self._numbers = count()
        self._failed_attempts = 0
        self._broken: str | None = None
        """Why no question can be answered any more."""
        self._is_open = False

    async def __aenter__(self) -> "JudgePool":
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._seats = [
            Seat(self._setup, settings.concurrency, settings.attempts, self._delay, log) for log in self._logs
        ]
        starts = [self._loop.create_task(seat.start()) for seat in self._seats]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await asyncio.gather(*(seat.close() for seat in self._seats))
            raise
        self._is_open = True
        for seat in self._seats:
            keeping = self._loop.create_task(seat.keep(self._next, self._attempt_failed))
            keeping.add_done_callback(self._on_seat_lost)
            self._keeping.append(keeping)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        for keeping in self._keeping:
            keeping.cancel()
        if self._keeping:
            await asyncio.wait(self._keeping)
        await asyncio.gather(*(seat.close() for seat in self._seats))  # a task that never ran has closed none
        for question in self._open.values():
            if not question.answer.done():
                question.answer.set_exception(JudgesClosed("the judge pool was closed before the answer"))

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        """Return the judgement of an episode. A caller that is cancelled withdraws its question.

        Raises JudgingFailed when every attempt has failed or the reward judges whole groups only,
        JudgeStartFailed when processes cannot be started any more, and JudgesClosed.
        """
        if self.of_groups:
            raise JudgingFailed(
                f"the reward {self._setup.path} judges whole groups (`score_group`): a workflow cannot ask "
                "it about a single trajectory"
            )
        frame = partial(
            framed_question, prompt=prompt, response=response, trajectory=trajectory, engines=self._engines
        )
        reply = await self._ask(f"prompt {prompt.id}", "trajectory", frame)
        assert isinstance(reply, Scored)
        scores = _scores(reply.teacher, len(trajectory.tokens_T))
        return Judgement(reply.reward, reply.parts, scores, reply.turn_rewards)

    async def score_group(
        self, prompt: Prompt, responses: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> list[Judgement]:
        """Return the judgement of each episode of a group: for a pool ``of_groups``. Errors: as of ``score``.

        The group is one question: it has one time limit, and is asked again as a whole.
        """
        frame = partial(
            framed_group,
            prompt=prompt,
            responses=responses,
            trajectories=trajectories,
            engines=self._engines,
        )
        reply = await self._ask(f"the group of {prompt.reference}", "trajectories", frame)
        assert isinstance(reply, GroupScored)
        return [
            Judgement(reward, parts, _scores(teacher, len(trajectory.tokens_T)), turns)
            for (reward, parts, teacher, turns), trajectory in zip(
                reply.judgements, trajectories, strict=True
            )
        ]

    async def judge(self, turn: JudgedTurn, next_state: Messages) -> Verdict:
        """Return the verdict on a turn of a live user. Cancellation and errors: as of ``score``."""

        def frame(number: int) -> bytes:
            return framed(TurnQuestion(number, turn, next_state, self._engines()))

        reply = await self._ask("a turn", "next state", frame)
        assert isinstance(reply, Ruled)
        return Verdict(
            reply.score,
            reply.hint,
            _scores(reply.teacher, turn.tokens),
            reply.votes,
            reply.nothing_to_learn,
        )

    async def _ask(self, subject: str, content: str, frame: Callable[[int], bytes]) -> Answer:
        if self._broken is not None:
            raise JudgeStartFailed(self._broken)
        if not self._is_open:
            raise JudgesClosed("the judge pool is not open: use it as an asynchronous context manager")
        number = next(self._numbers)
        question = OpenQuestion(
            number, subject, content, frame, self._loop.create_future(), self._loop.time()
        )
        self._open[number] = question
        self._queue.append(question)
        self._feed()
        try:
            return await question.answer
        finally:
            del self._open[number]
            if question.seat is not None:
                question.seat.withdraw(question)

    @property
    def of_groups(self) -> bool:
        """True if the reward judges all episodes of a group at once. Known when the pool is open."""
        return any(seat.of_groups for seat in self._seats)

    def status(self) -> JudgeStatus:
        """Return the present state."""
        running = sum(seat.n_open for seat in self._seats)
        oldest = next(iter(self._open.values()), None)
        return JudgeStatus(
            waiting=max(0, len(self._open) - running),
            running=running,
            oldest_s=0.0 if oldest is None else self._loop.time() - oldest.asked_at,
            restarts=sum(seat.restarts for seat in self._seats),
            failed_attempts=self._failed_attempts,
        )

    # -- Questions, as seats see them

    def _next(self) -> OpenQuestion | None:
        """Return the longest waiting question, and forget it. None: there is none."""
        while self._queue:
            question = self._queue.popleft()
            if not question.answer.done():
                return question
        return None

    def _attempt_failed(self, question: OpenQuestion, cause: str, ask: Callable[[], None] | None) -> None:
        """Charge a question with an attempt, and ask it again after a wait: by ``ask``, or in the queue."""
        self._failed_attempts += 1
        question.causes.append(cause)
        if question.answer.done():
            return
        if len(question.causes) >= self._settings.attempts:
            question.answer.set_exception(failed_judging(self._setup, question.subject, question.causes))
        else:
            again = ask or partial(self._enqueue_first, question)
            self._loop.call_later(self._delay(len(question.causes)), again)

    def _enqueue_first(self, question: OpenQuestion) -> None:
        self._queue.appendleft(question)
        self._feed()

    def _feed(self) -> None:
        for seat in sorted(self._seats, key=lambda seat: seat.n_open):
            if self._queue:
                seat.feed()

    def _delay(self, failures: int) -> float:
        return min(LONGEST_WAIT_S, self._settings.retry_after_s * 2 ** (failures - 1))

    def _on_seat_lost(self, keeping: "asyncio.Task[None]") -> None:
        """Fail every question when a seat has given up: the others would only take longer to find out."""
        if keeping.cancelled() or not self._is_open:
            return
        error = keeping.exception()
        self._broken = str(error) if isinstance(error, JudgeStartFailed) else f"a seat of a judge: {error!r}"
        for question in self._open.values():
            if not question.answer.done():
                question.answer.set_exception(JudgeStartFailed(self._broken))


def _scores(encoded: bytes, tokens: int) -> TeacherScores | None:
    """Return a teacher's scores from a reply. Raises JudgingFailed: user code may have written the reply."""
    try:
        return decode_scores(encoded, tokens) if encoded else None
    except CorruptRecord as error:
        raise JudgingFailed(f"a judge process has sent {error}") from error
