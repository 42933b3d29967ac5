"""What surrounds the endpoints of a gateway in tests: sessions that tell what they have seen, a journal in
memory, and keys that are known.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from slipstream.rollout.gateway.conversations import (
    Answer,
    Arrival,
    ClientReward,
    TakenReward,
    UnknownTurn,
    User,
)
from slipstream.rollout.gateway.sessions.placing import SessionLimits
from slipstream.rollout.gateway.sessions.running import RunningRequest
from slipstream.rollout.gateway.sessions.sessions import Sessions
from slipstream.rollout.tokens.turn_entries import Entry, Turn, TurnType


class WatchedSessions(Sessions):
    """Sessions, and everything that arrived and was answered."""

    def __init__(self, temperature: float, decode: Callable[[Sequence[int]], str]) -> None:
        names = itertools.count()
        super().__init__(
            SessionLimits(1000, 1 << 30, 3600.0),
            temperature=temperature,
            override=False,
            decode=decode,
            mint=lambda: f"minted-{next(names)}",
        )
        self.arrivals: list[Arrival] = []
        self.answers: list[tuple[str, Answer]] = []
        self.rewards: list[tuple[str, str, float, list[int]]] = []

    def begin(self, arrival: Arrival) -> RunningRequest:
        self.arrivals.append(arrival)
        return super().begin(arrival)

    def end(self, running: RunningRequest, answer: Answer) -> Sequence[Entry]:
        self.answers.append((running.session, answer))
        return super().end(running, answer)

    def reward(self, user: User, reward: ClientReward) -> TakenReward:
        given = super().reward(user, reward)
        self.rewards.append((user.name, given.session, reward.value, [turn.turn for turn in given.turns]))
        return given


class MemoryLog:
    """Entries are durable at once, or when ``release`` is called."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._durable = asyncio.Event()
        self._durable.set()

    def append(self, entries: Sequence[Entry]) -> Sequence[int]:
        first = len(self.entries) + 1
        self.entries += entries
        return range(first, len(self.entries) + 1)

    @property
    def last(self) -> int:
        return len(self.entries)

    async def durable(self, number: int) -> None:
        await self._durable.wait()

    async def turns(self, numbers: Sequence[int]) -> list[Turn]:
        entries = [self.entries[number - 1] for number in numbers]
        turns = [entry for entry in entries if isinstance(entry, Turn)]
        if len(turns) < len(entries):
            raise UnknownTurn("one of the entries is no turn")
        return turns

    async def outcomes(self, numbers: Sequence[int]) -> list[str]:
        return ["counted" for _ in numbers]

    def hold(self) -> None:
        self._durable.clear()

    def release(self) -> None:
        self._durable.set()


class FixedKeys:
    """Three users whose keys are known."""

    def __init__(self) -> None:
        self._users = {
            "key-anna": User("anna"),
            "key-berta": User("berta"),
            "key-side": User("side", session="the-one", turn_type=TurnType.SIDE),
        }

    def user(self, key: str) -> User | None:
        return self._users.get(key)
