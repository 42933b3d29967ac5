"""A gateway inside this process: the parts of ``rollout.gateway.gateway_process``, on engines of a test."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.engine_pool import EnginePool, GeneratingClient
from slipstream.rollout.gateway.conversations import User
from slipstream.rollout.gateway.engines import EngineTokens
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.link import DriverLink
from slipstream.rollout.gateway.spec import GatewaySpec, GatewaySurroundings
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.tokens.turn_entries import TurnType

if TYPE_CHECKING:
    from slipstream.rollout.gateway.compose import ServedSessions


_PATH = [*sys.path]


@contextmanager
def without_stand_ins() -> Iterator[None]:
    """Start processes inside the block that import nothing of what SGLang is given in place of packages."""
    path = [*sys.path]
    sys.path[:] = _PATH
    try:
        yield
    finally:
        sys.path[:] = path


class Keys:
    """Three users: two who say what they want, and one whose turns are side turns."""

    USERS: ClassVar = {
        "key-anna": User("anna"),
        "key-berta": User("berta"),
        "key-side": User("side", turn_type=TurnType.SIDE),
    }

    def user(self, key: str) -> User | None:
        return self.USERS.get(key)


def recipe(folder: Path, model: Path, gateway: dict[str, Any], temperature: float) -> RunConfig:
    """Return a recipe of which the gateway reads its settings."""
    return RunConfig.model_validate(
        {
            "run": {"name": "exact", "root": str(folder), "steps": 1},
            "model": {"path": str(model)},
            "data": {"path": str(folder / "data.jsonl")},
            "rollout": {
                "max_head_offpolicyness": 2,
                "batch_size": 2,
                "n_samples_per_prompt": 2,
                "reward": {"path": "slipstream.rollout.reward.FinalAnswer"},
                "sampling": {"temperature": temperature},
            },
            "gateway": gateway,
        }
    )


class Gateway:
    """One gateway, which may be ended and started again on the same journal."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        context: int,
        connect: Callable[[Any], GeneratingClient],
        decode: Callable[[Sequence[int]], str],
        find: Callable[[], DriverAddress | None],
    ) -> None:
        self._path = folder / "gateway.sqlite"
        self._spec = GatewaySpec(0, 1, context, 60.0, config)
        self._connect = connect
        self._decode = decode
        self._find = find
        self._minted = 0
        self.running = 0
        """Number of requests that run."""
        self._changed = asyncio.Event()
        self._open = asyncio.Event()
        self.counters: list[Any] = []
        """``SessionCounters`` of each life."""

    async def start(self) -> None:
        """Start it, with the sessions that the journal knows."""
        from slipstream.rollout.gateway.compose import build

        self.journal = TurnJournal.open(self._path, "gateway-0")
        self.pool = EnginePool(
            wait_timeout_s=30.0,
            isolate_versions=False,
            connect=self._connect,
            report=lambda: self._link.report(),
        )
        self._link = DriverLink(self.journal, self.pool, self._find)
        self.source = EngineTokens(self.pool, self._decode)
        retained = ((row.number, row.entry()) for row in self.journal.retained())
        self.served: ServedSessions = build(
            GatewaySurroundings(
                self._spec, self.source, self.journal, Keys(), retained, self._decode, self._mint
            )
        )
        self.counters.append(self.served._sessions.counters)
        self._linking = asyncio.create_task(self._link.run(), name="handing over")
        self._open.set()

    def _mint(self) -> str:
        self._minted += 1
        return f"minted-{self._minted}-{self.journal.last}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. Requests wait while the gateway is started again."""
        while not (self._open.is_set() and self.pool.capacity):
            await self._open.wait()
            await asyncio.sleep(0.001)
        self.running += 1
        try:
            await self.served.app(scope, receive, send)
        finally:
            self.running -= 1
            self._changed.set()

    async def stop(self) -> None:
        """End it when no request runs. Nothing of it goes on."""
        self._open.clear()
        while self.running:
            self._changed.clear()
            await self._changed.wait()
        await self.served.close()
        self._linking.cancel()
        with suppress(asyncio.CancelledError):
            await self._linking
        await self.pool.close()
        await asyncio.to_thread(self.journal.close)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def end_sessions(self) -> None:
        """End all sessions as if nobody had said anything for days, and hand everything over."""
        entries = self.served.sweep(time.time() + 1e6)
        if entries:
            self.journal.append(entries)
        await self.journal.durable(self.journal.last)
        await self.journal.handed_over()
