"""One attempt at an episode, as its endpoint knows it: who asks, what was sampled, and where it must stop.

    begin ──► sessions ──► prompt ids ──► engines of the attempt ──► end ──► turn

All requests of an attempt that name no session are of one: its branches are what sub-agents, rewritten
histories and several answers to one prompt make of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import EngineError
from slipstream.rollout.engine.engine_pool import NoEngine
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.gateway.conversations import (
    Answer,
    Arrival,
    NamedAnswer,
    PromptTooLong,
    User,
)
from slipstream.rollout.gateway.endpoint.trajectories import (
    SampledTurn,
    replies_of,
    trajectories_of,
    untrained_replies_of,
)
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.sessions.sessions import Sessions
from slipstream.rollout.tokens.record import decode_chunks
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.trajectory import Finish, Trajectory
from slipstream.rollout.tokens.turn_entries import Entry, Turn, TurnType
from slipstream.rollout.workflow.endpoint import NothingToTrain, Reply

SESSION = "episode"
"""Session of all requests that name none."""

_UNLIMITED = SessionLimits(sessions=1 << 60, size=1 << 60, idle_timeout_s=float("inf"))
"""Nothing of an episode is evicted: its limits bound it."""


class EpisodeEngines(Protocol):
    """The engines as one attempt reaches them: its recording, or the greedy engines of an evaluation."""

    async def extend(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,
        completion: GrowingCompletion,
        *,
        grown: Callable[[], None] | None = None,
    ) -> None: ...


class AttemptLimits:
    """How much an attempt may ask for, and how much it has."""

    def __init__(self, *, max_turns: int | None, max_tokens: int | None, completion: int) -> None:
        """``completion``: largest number of tokens of one completion."""
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._completion = completion
        self.turns = 0
        self.tokens = 0
        self.reached: str | None = None
        """Name of the limit that has cut off the last completion, or refused the last request."""

    def check(self, choices: int) -> None:
        """Raises ValueError if another request with this number of answers is too much."""
        for name, done, limit, what in (
            ("max_turns", self.turns + choices - 1, self._max_turns, "completions"),
            ("max_tokens", self.tokens, self._max_tokens, "sampled tokens"),
        ):
            if limit is not None and done >= limit:
                self.reached = name
                raise ValueError(f"this episode must end here: it may have {limit} {what} ({name})")

    def sampled(self, completion: GrowingCompletion) -> None:
        """Count the tokens of a completion that has ended."""
        self.tokens += len(completion.tokens)
        is_used_up = self._max_tokens is not None and self.tokens >= self._max_tokens
        if is_used_up and completion.finish is Finish.LENGTH:
            self.reached = "max_tokens"

    def longest(self, wanted: object) -> int:
        """Return the number of tokens that a completion may have whose client wants so many."""
        longest = self._completion
        if isinstance(wanted, int):
            longest = min(longest, wanted)
        return longest if self._max_tokens is None else min(longest, self._max_tokens - self.tokens)


class Attempt:
    """One attempt at an episode. Single event loop."""

    def __init__(
        self,
        name: str,
        engines: EpisodeEngines,
        limits: AttemptLimits,
        *,
        sampling: SamplingConfig,
        is_trained: bool,
        override: bool,
        decode: Decode,
        mint: Callable[[], str],
    ) -> None:
        """``name``: of its key. ``sampling``: the recipe's. ``is_trained``: the trainer must reproduce it.
        ``override``: sample as the recipe says, whatever the client asks for, as evaluations always do.
        """
        self.user = User(name, SESSION)
        self.limits = limits
        self._engines = engines
        self._decode = decode
        self._sessions = Sessions(
            _UNLIMITED,
            temperature=sampling.temperature,
            override=override or not is_trained,
            decode=decode,
            mint=mint,
        )
        self._distribution: dict[str, object] = {}
        """Parameters that evaluations may have, and training may not."""
        if not is_trained:
            self._distribution = {"top_p": sampling.top_p, "top_k": sampling.top_k, **sampling.args}
        self._recorded: dict[int, Turn] = {}
        self._running: set[asyncio.Task[object]] = set()
        """Tasks that wait for the engines."""
        self._retractions = 0
        self._is_closed = False
        self.fatal: asyncio.Future[NoEngine] = asyncio.get_running_loop().create_future()
        """Why the run cannot go on."""

    # ---- conversations

    def begin(self, arrival: Arrival) -> RunningRequest:
        """Place a request. Raises ValueError for a mistake of the client, and once a limit is reached."""
        joined = self._sessions.join(arrival)
        if joined is not None:
            self.limits.reached = None
            return joined
        self.limits.check(arrival.choices)
        try:
            begun = self._sessions.begin_another(arrival)
        except PromptTooLong:
            self.limits.reached = "context"
            raise
        self.limits.reached = None
        self.limits.turns += arrival.choices
        length = self.limits.longest(begun.sampling.get("max_new_tokens"))
        distribution = self._distribution if begun.turn_type is TurnType.MAIN else {}
        begun.sampling = {**begun.sampling, **distribution, "max_new_tokens": length}
        return begun

    def end(self, running: RunningRequest, answer: Answer) -> Sequence[Entry]:
        """Store an answer, and return what is to be recorded of it."""
        return self._sessions.end(running, answer)

    def recorded(self, running: RunningRequest, choice: int, numbers: Sequence[int]) -> Sequence[Entry]:
        """Learn the numbers of the entries that ``end`` has returned."""
        return self._sessions.recorded(running, choice, numbers)

    def end_session(self, session: str) -> Sequence[Entry]:
        """End a session without a request. Raises UnknownTurn."""
        return self._sessions.end_session(self.user, session)

    def answer_of(self, request: str) -> NamedAnswer | None:
        """Return the answer to a request that can be named."""
        return self._sessions.answer_of(self.user, request)

    # ---- what was sampled

    def keep(self, number: int, turn: Turn) -> None:
        """Keep a turn that has ended."""
        self._recorded[number] = turn

    def turn(self, number: int) -> Turn | None:
        """Return a turn that was kept."""
        return self._recorded.get(number)

    def trajectories(self) -> list[Trajectory]:
        """Return what is trained of all turns. Raises NothingToTrain."""
        turns = self._sampled_turns()
        trajectories = trajectories_of(turns, self._retractions)
        if not trajectories:
            raise NothingToTrain(_why_nothing(list(turns.values())))
        return trajectories

    def replies(self) -> list[Reply]:
        """Return the completions of all turns that can be trained, in order. Raises NothingToTrain."""
        turns = self._sampled_turns()
        replies = replies_of(turns, self._retractions)
        if not replies:
            raise NothingToTrain(_why_nothing(list(turns.values())))
        return replies

    def untrained_replies(self) -> list[Reply]:
        """Return the completions of all turns that cannot be trained, in order."""
        return untrained_replies_of(self._sampled_turns())

    def _sampled_turns(self) -> dict[int, SampledTurn]:
        return {number: _sampled(number, turn) for number, turn in self._recorded.items()}

    # ---- engines

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: LiveSampling,
        completion: GrowingCompletion,
        *,
        grown: Callable[[], None] | None = None,
    ) -> None:
        """Continue a completion on the engines, as ``EnginePool.generate`` does.

        Raises EngineError when the attempt ends meanwhile.
        """
        if self._is_closed:
            raise EngineError("the attempt at the episode has ended")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._engines.extend(input_ids, sampling, completion, grown=grown)
        except asyncio.CancelledError:
            if self._is_closed:  # by ``close``, not by the client
                task.uncancel()
                raise EngineError("the attempt at the episode has ended") from None
            raise
        except NoEngine as error:
            if not self.fatal.done():
                self.fatal.set_result(error)
            raise
        finally:
            self._running.discard(task)
            self.limits.sampled(completion)
            self._retractions += completion.retractions

    def close(self) -> None:
        """End all requests that still run: their clients get an error."""
        self._is_closed = True
        for task in self._running:
            task.cancel()
        self.fatal.cancel()


def _sampled(number: int, turn: Turn) -> SampledTurn:
    [decoded] = decode_chunks(turn.chunk)
    return SampledTurn(
        number,
        turn.parent,
        turn.shared,
        decoded.context,
        decoded.tokens,
        decoded.logprobs,
        turn.spans,
        turn.finish,
        turn.turn_type,
        turn.cancelled,
        turn.reason,
    )


def _why_nothing(turns: Sequence[SampledTurn]) -> str:
    if not turns:
        return "the agent has got no completion: it has not asked, or every request of it has failed"
    if all(turn.cancelled for turn in turns):
        return f"the agent has waited for the end of none of its {len(turns)} completions"
    reasons = sorted({turn.reason for turn in turns if turn.reason}) or ["their requests say so"]
    return (
        f"none of the agent's {len(turns)} completions can be trained, because of: {', '.join(reasons)}; "
        "leave sampling parameters to the recipe, or set rollout.endpoint.sampling to recipe"
    )
