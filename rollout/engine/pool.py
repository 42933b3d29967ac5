"""The serving engines, seen by workflows as one generator.

A request goes to the least loaded engine and is sent again elsewhere when its engine is lost; when there is
none, it waits until one serves again. Only engines that hold the current policy version are in the pool.
"""

import asyncio
from collections.abc import Sequence

from configs.schema import SamplingConfig
from rollout.changes import Changes
from rollout.engine.client import Aborted, EngineClient, EngineLost
from rollout.trajectory import Completion


class NoEngine(RuntimeError):
    """No engine has served for the allowed time."""


class EnginePool:
    """Routes requests. Single event loop."""

    def __init__(self, *, max_concurrent: int, wait_timeout_s: float, isolate_versions: bool) -> None:
        self._wait_timeout_s = wait_timeout_s
        self._isolate_versions = isolate_versions
        self._load: dict[EngineClient, int] = {}
        self._changes = Changes()
        self._requests = asyncio.Semaphore(max_concurrent)
        self.version = 0
        self.lost: asyncio.Queue[EngineClient] = asyncio.Queue()
        """Engines that did not answer and were fenced off, each once; their supervisor decides about them."""
        self.tokens_generated = 0
        """Sampled ones: greedy answers are evaluation."""
        self.requests_resent = 0

    @property
    def clients(self) -> list[EngineClient]:
        return list(self._load)

    async def add(self, client: EngineClient) -> None:
        """The engine serves, and holds the current version."""
        self._load.setdefault(client, 0)
        self._changes.notify()

    async def remove(self, client: EngineClient) -> None:
        """Fence the engine off: no further request goes to it."""
        self._load.pop(client, None)

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingConfig, *, greedy: bool = False
    ) -> Completion:
        """Continue ``input_ids`` on any engine. Raises InvalidRequest, EngineError, NoEngine."""
        async with self._requests:
            while True:
                client = await self._acquire()
                try:
                    completion = await client.generate(
                        input_ids, sampling, greedy=greedy, cache_key=self._cache_key()
                    )
                except EngineLost:
                    if self._load.pop(client, None) is not None:
                        self.lost.put_nowait(client)
                    self.requests_resent += 1
                    continue
                except Aborted:
                    self.requests_resent += 1
                    continue
                finally:
                    self._release(client)
                if not greedy:
                    self.tokens_generated += len(completion.tokens)
                return completion

    async def abort_running(self) -> None:
        """Make every engine give up what it is generating. For the end of a run, when nobody waits for it."""
        await asyncio.gather(*(client.abort_all() for client in self._load), return_exceptions=True)

    def _cache_key(self) -> str | None:
        """With in-place updates old KV survives in the prefix cache; new requests must not build on it."""
        return f"v{self.version}" if self._isolate_versions else None

    async def _acquire(self) -> EngineClient:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                return await self._changes.first(self._charge_least_loaded)
        except TimeoutError:
            raise NoEngine(f"no engine has served for {self._wait_timeout_s:.0f} s") from None

    def _charge_least_loaded(self) -> EngineClient | None:
        if not self._load:
            return None
        client = min(self._load, key=self._load.__getitem__)
        self._load[client] += 1
        return client

    def _release(self, client: EngineClient) -> None:
        if client in self._load:
            self._load[client] -= 1
