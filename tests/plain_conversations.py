"""Sessions and a journal in memory that do the least, for tests of the endpoints alone."""

import asyncio
from collections.abc import Sequence

from slipstream.rollout.gateway.conversations import (
    Answer,
    Arrival,
    Begun,
    Joined,
    Recorded,
    UnknownTurn,
    User,
)
from slipstream.rollout.turns import SessionEnd, TurnType


class PlainConversations:
    """Every request is a turn by itself, in the session that it names or in a new one."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.answers: list[tuple[str, Answer]] = []
        self.rewards: list[tuple[str, str, float, int | None]] = []
        self._running: dict[bytes, Begun] = {}

    def begin(self, arrival: Arrival) -> Begun | Joined:
        self.arrivals.append(arrival)
        if arrival.retries and (running := self._running.get(arrival.digest)):
            return Joined(running)
        begun = Begun(
            arrival.session or f"minted-{len(self.arrivals)}",
            arrival.prompt_ids,
            arrival.sampling,
            arrival.user.turn_type if arrival.turn_type is None else arrival.turn_type,
        )
        self._running[arrival.digest] = begun
        return begun

    def end(self, begun: Begun, answer: Answer) -> Sequence[Recorded]:
        self._running = {digest: turn for digest, turn in self._running.items() if turn is not begun}
        self.answers.append((begun.session, answer))
        return [Recorded(SessionEnd(begun.session, "key"))] if answer.tokens else []

    def recorded(self, begun: Begun, choice: int, numbers: Sequence[int]) -> None:
        pass

    def reward(self, user: User, session: str, reward: float, turn: int | None) -> Sequence[Recorded]:
        if session not in {name for name, _ in self.answers}:
            raise UnknownTurn(f"no session {session}")
        self.rewards.append((user.name, session, reward, turn))
        return []


class MemoryLog:
    """Entries are durable at once, or when ``release`` is called."""

    def __init__(self) -> None:
        self.entries: list[Recorded] = []
        self._durable = asyncio.Event()
        self._durable.set()

    def append(self, entries: Sequence[Recorded]) -> Sequence[int]:
        first = len(self.entries) + 1
        self.entries += entries
        return range(first, len(self.entries) + 1)

    async def durable(self, number: int) -> None:
        await self._durable.wait()

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
