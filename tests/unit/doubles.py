"""Small stand-ins that several unit tests share."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.backend.driver.weights.served_weights import ServedWeights, TrainedWeights
from slipstream.rollout.collection.messages import DOWN, UP, Down, Status, Up
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import Routing
from slipstream.rollout.system.frames import pack, split
from slipstream.rollout.tokens.trajectory import TrajectoryHeader


@dataclass
class Policy:
    """The policy version, and the control core and the batches that own it."""

    version: int = 0

    @property
    def core(self) -> "Policy":
        return self

    @property
    def sampled_version(self) -> int:
        return self.version

    def published(self, version: int) -> None:
        assert version == self.version + 1
        self.version = version


@dataclass
class Listener:
    """Remembers what collection reports."""

    losses: list[tuple[Loss, tuple[TrajectoryHeader, ...]]] = field(default_factory=list)
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lost(self, loss: Loss, trajectories: Sequence[TrajectoryHeader], reason: str = "") -> None:
        self.losses.append((loss, tuple(trajectories)))

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        self.failures.append((prompt, attempt, error))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Collector:
    """A collector without a process: its pool follows a roster, by messages that a test may hold up."""

    def __init__(
        self,
        roster: EngineRoster,
        name: str = "collector",
        *,
        connect: Callable[[EngineAddress], object] = EngineClient,
        wait_timeout_s: float = 5.0,
        on_held: Callable[[bool], None] | None = None,
    ) -> None:
        self.name = name
        self.hears = True
        """Records arrive. Those that a test holds up are lost: the next one is the whole truth."""
        self.records: list[Routing] = []
        self.lags = False
        self._roster = roster
        self._is_here = True
        self.pool = EnginePool(
            wait_timeout_s=wait_timeout_s,
            isolate_versions=False,
            connect=connect,
            report=self._report,
            on_held=on_held,
        )
        roster.joined(name)
        roster.subscribe(self._send, self._lagging)

    def hear(self) -> None:
        """Let the present record, and those that follow, arrive."""
        self.hears = True
        self._send()

    def leave(self) -> None:
        """End, as the driver learns from the connection. The pool goes on: nothing of it counts any more."""
        self._is_here = False
        self._roster.left(self.name)

    def _send(self) -> None:
        if self._is_here:
            frame = pack(Down(routing=self._roster.routing_for(self.name)), ())
            asyncio.get_running_loop().call_soon(self._arrived, frame)

    def _arrived(self, frame: bytes) -> None:
        if self._is_here and self.hears:
            record = split(frame, DOWN)[0].routing
            assert record is not None
            self.records.append(record)
            self.pool.follow(record)

    def _report(self) -> None:
        frame = pack(Up(status=Status(self.pool.status(), judging=0, judging_s=0.0)), ())
        status = split(frame, UP)[0].status
        assert status is not None
        asyncio.get_running_loop().call_soon(self._roster.reported, self.name, status.pool)

    def _lagging(self, name: str) -> None:
        self.lags = self.lags or name == self.name


async def advance(weights: ServedWeights[Any], version: int) -> TrainedWeights:
    """Train a step of no batch, and publish it as ``version``."""
    batch: Any = None
    async with weights.trained(batch, version) as trained:
        await trained.publish()
    return trained


class PutForward(asyncio.SelectorEventLoop):
    """An event loop whose clock a test puts forward."""

    forward_s = 0.0

    def time(self) -> float:
        return super().time() + self.forward_s
