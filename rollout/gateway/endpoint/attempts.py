"""All attempts at episodes that run in this process, as the gateway's application knows its surroundings.

    key ──► user ──► sessions of the attempt        ──► its turns, in memory
                 └─► engines of the attempt (tokens)

Nothing is shared between two attempts. A request after the end of an attempt is refused, because its key is
void. Requests of the attempt that still run at its end are dropped.
"""

import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from slipstream.rollout.gateway.conversations import (
    Answer,
    Arrival,
    ClientReward,
    ListedSession,
    NamedAnswer,
    TakenReward,
    TooManySessions,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.endpoint.attempt import Attempt
from slipstream.rollout.gateway.engines import EngineTokens
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.source import Interrupted, TokenDelta, TokenRequest
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.turn_entries import Entry, Turn

KEY_PREFIX = "sk-episode-"

ROLLOUT_PRIORITY = 0
"""Users go before rollouts."""

UNLIMITED = 1 << 60
"""Requests of episodes wait for engines. None is refused because of others."""


class Attempts:
    """The ``KeyRing``, ``Conversations``, ``EntryLog`` and ``TokenSource`` of a collector's endpoint."""

    def __init__(self, version: Callable[[], int], decode: Decode) -> None:
        """``version``: returns the policy version that a new request gets."""
        self._version = version
        self._decode = decode
        self._names = count()
        self.last = 0
        """Number of the last entry."""
        self._by_key: dict[bytes, Attempt] = {}
        self._by_name: dict[str, Attempt] = {}

    def __len__(self) -> int:
        """Return the number of attempts that run."""
        return len(self._by_name)

    def open(self, make: Callable[[str], Attempt]) -> tuple[str, Attempt]:
        """Return the key of a new attempt, and the attempt that ``make`` returns for a name."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        return key, self.renew(key, make)

    def renew(self, key: str, make: Callable[[str], Attempt]) -> Attempt:
        """End the attempt of a key, and let the key name another one."""
        self.close(key)
        name = str(next(self._names))
        attempt = self._by_key[_hash(key)] = self._by_name[name] = make(name)
        return attempt

    def close(self, key: str) -> None:
        """Make a key void, and end all requests of its attempt."""
        attempt = self._by_key.pop(_hash(key), None)
        if attempt is not None:
            del self._by_name[attempt.user.name]
            attempt.close()

    # ---- KeyRing

    def user(self, key: str) -> User | None:
        """Return whose key it is; None: nobody's."""
        attempt = self._by_key.get(_hash(key))
        return None if attempt is None else attempt.user

    # ---- Conversations

    def begin(self, arrival: Arrival) -> RunningRequest:
        """Place a request. Raises ValueError for what the client did wrong."""
        attempt = self._by_name.get(arrival.user.name)
        if attempt is None:
            raise ValueError("the episode has ended")
        return attempt.begin(arrival)

    def end(self, running: RunningRequest, answer: Answer) -> Sequence[Entry]:
        """Store an answer, and return what is to be recorded of it."""
        attempt = self._by_name.get(running.key)
        return () if attempt is None else attempt.end(running, answer)

    def recorded(self, running: RunningRequest, choice: int, numbers: Sequence[int]) -> Sequence[Entry]:
        """Learn the numbers of the entries that ``end`` has returned."""
        attempt = self._by_name.get(running.key)
        return () if attempt is None else attempt.recorded(running, choice, numbers)

    def reward(self, user: User, reward: ClientReward) -> TakenReward:
        """Refuse the reward of a turn. Raises UnknownTurn."""
        raise UnknownTurn("an episode takes no reward of a turn: its agent returns that of the episode")

    def open_sessions(
        self, user: User, count: int, tags: Mapping[str, object], *, is_group: bool, once: str, now_s: float
    ) -> tuple[list[str], Sequence[Entry]]:
        """Refuse to open a session. Raises TooManySessions."""
        raise TooManySessions("an episode is one session: its agent returns its reward", 60.0)

    def listed(self, user: User, name: str | None = None) -> Iterator[ListedSession]:
        """Return nothing: nobody rewards a turn of an episode. Raises UnknownTurn for a name."""
        if name is not None:
            raise UnknownTurn("an episode shows no sessions")
        return iter(())

    def forget(self, session: str | None, key: str | None) -> Sequence[Entry]:
        """Refuse to forget. Raises UnknownTurn."""
        raise UnknownTurn("an episode forgets nothing before its end")

    def end_session(self, user: User, session: str) -> Sequence[Entry]:
        """End a session without a request. Raises UnknownTurn."""
        attempt = self._by_name.get(user.name)
        if attempt is None:
            raise UnknownTurn("the episode has ended")
        return attempt.end_session(session)

    def answer_of(self, user: User, request: str) -> NamedAnswer | None:
        """Return the answer to a request of this user; None: none that can be named, or not any more."""
        attempt = self._by_name.get(user.name)
        return None if attempt is None else attempt.answer_of(request)

    # ---- EntryLog

    def append(self, entries: Sequence[Entry]) -> Sequence[int]:
        """Number entries, and keep the turns among them."""
        numbers = range(self.last + 1, self.last + 1 + len(entries))
        self.last += len(entries)
        for number, entry in zip(numbers, entries, strict=True):
            if isinstance(entry, Turn) and (attempt := self._by_name.get(entry.key)) is not None:
                attempt.keep(number, entry)
        return numbers

    async def durable(self, number: int) -> None:
        """Return at once: the record of the episode has the completions, from which turns are made anew."""

    async def turns(self, numbers: Sequence[int]) -> Sequence[Turn]:
        """Return the turns with these numbers. Raises UnknownTurn if one of them is not kept any more."""
        turns: list[Turn] = []
        for number in numbers:
            kept = (attempt.turn(number) for attempt in self._by_name.values())
            turn = next((turn for turn in kept if turn is not None), None)
            if turn is None:
                raise UnknownTurn("its episode has ended")
            turns.append(turn)
        return turns

    async def outcomes(self, numbers: Sequence[int]) -> Sequence[str]:
        """Return nothing: no reward of a turn is taken."""
        return [""] * len(numbers)

    # ---- TokenSource

    @property
    def version(self) -> int:
        """Policy version that a new request gets."""
        return self._version()

    def retry_after_s(self) -> None:
        """Return None: requests of episodes wait."""

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenDelta]:
        """Yield the completion of a request as it grows. Raises Rejected and Interrupted."""
        attempt = self._by_name.get(request.key)
        if attempt is None:
            raise Interrupted("the episode has ended")
        tokens = EngineTokens(_AttemptPool(attempt, self._version), self._decode)
        async with aclosing(tokens.generate(replace(request, priority=ROLLOUT_PRIORITY))) as deltas:
            async for delta in deltas:
                yield delta


class _AttemptPool:
    """The engines of an attempt, as ``EngineTokens`` asks a pool."""

    capacity = UNLIMITED

    def __init__(self, attempt: Attempt, version: Callable[[], int]) -> None:
        self._version = version
        self.generate = attempt.generate

    @property
    def version(self) -> int:
        return self._version()


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
