"""The serving engines, seen by workflows as one generator.

A request goes to the least loaded engine. When that engine is lost or aborts the request, the tokens
generated so far become the prefix of a further request to any engine. While no engine serves, requests wait.
Only engines that hold the current policy version are in the pool.

    limit -> engine -> complete
               ^ |
               | +-> lost or aborted: the partial completion is the prefix of the next request, which has
               +---- the rest of the token budget
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol
from weakref import WeakKeyDictionary

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.changes import Changes
from slipstream.rollout.engine.client import EngineClient, EngineError, EngineLost, Silent
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.engine.continuation import ended, head, merge, tokens_left
from slipstream.rollout.engine.limit import Limit
from slipstream.rollout.engine.trace import RequestTrace, watched
from slipstream.rollout.trajectory import Completion, Finish

log = logging.getLogger(__name__)

SILENCES = 3
"""Number of times that a healthy engine may stay silent about one request. One silence is a long pause;
several are the request's fault, or a time-out that is too short."""

OnPartial = Callable[[Completion], None]


class NoEngine(RuntimeError):
    """No engine has served for the allowed time."""


class PolicyVersion(Protocol):
    """The owner of the policy version: the control core."""

    @property
    def version(self) -> int:
        """Version that every engine in the pool holds."""
        ...


class EnginePool:
    """Routes requests. Single event loop."""

    def __init__(
        self,
        policy: PolicyVersion,
        *,
        max_concurrent: int,
        wait_timeout_s: float,
        isolate_versions: bool,
        trace: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        """``max_concurrent``: requests that run at one time. ``wait_timeout_s``: longest time without an
        engine. ``isolate_versions``: keep KV caches of different versions apart. ``trace`` is called once for
        every engine request that has ended.
        """
        self._policy = policy
        self._wait_timeout_s = wait_timeout_s
        self._isolate_versions = isolate_versions
        self._trace = trace
        self._load: dict[EngineClient, int] = {}
        self._changes = Changes()
        self._requests = Limit(max_concurrent)
        self._held = False
        self._doubted: WeakKeyDictionary[EngineClient, int] = WeakKeyDictionary()
        """First unverified version of each engine in doubt, engines that are gone included."""
        self.lost: asyncio.Queue[tuple[EngineClient, str]] = asyncio.Queue()
        """Engines that were condemned, each once, with the reason; the supervisor restarts them."""
        self.tokens_generated = 0
        """Number of sampled tokens. Evaluation (greedy) and the prefixes of callers do not count."""
        self.tokens_continued = 0
        """Number of tokens of interrupted completions that were continued instead of lost."""
        self.requests_resent = 0

    @property
    def version(self) -> int:
        """Policy version that every engine in the pool holds."""
        return self._policy.version

    @property
    def clients(self) -> list[EngineClient]:
        return list(self._load)

    @property
    def limit(self) -> int:
        """Number of ``generate`` calls that run at one time. Lowering it does not disturb running calls."""
        return self._requests.size

    @limit.setter
    def limit(self, size: int) -> None:
        self._requests.size = size

    @property
    def in_use(self) -> int:
        """Number of ``generate`` calls that run now; above ``limit`` for a while after it was lowered."""
        return self._requests.inside

    async def add(self, client: EngineClient) -> None:
        """Send requests to an engine, which holds the current version."""
        self._load.setdefault(client, 0)
        self._changes.notify()

    async def remove(self, client: EngineClient) -> None:
        """Send no further request to an engine."""
        self._load.pop(client, None)
        self._changes.notify()

    async def condemn(self, client: EngineClient, reason: str) -> None:
        """Send no further request to an engine and have it restarted. Does nothing the second time."""
        if self._load.pop(client, None) is not None:
            self.lost.put_nowait((client, reason))
            self._changes.notify()

    def doubt(self, version: int) -> None:
        """Hold back what the present engines sample from ``version`` on until they are trusted.

        Call it before the version is published: tokens that have arrived by then are older and not held back.
        """
        for client in self._load:
            self._doubted[client] = version

    def trust(self, client: EngineClient) -> None:
        """Release what an engine in doubt has sampled: its weights are verified."""
        self._doubted.pop(client, None)
        self._changes.notify()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        prefix: Completion | None = None,
        progress: OnPartial | None = None,
    ) -> Completion:
        """Continue ``input_ids`` on any engine, up to ``sampling.max_new_tokens``.

        ``prefix`` is a partial completion, of a resumed run for example: it is continued, and counts as part
        of the completion and of its token budget. ``progress`` is called with the completion so far, prefix
        included, whenever it grows.

        Raises InvalidRequest, EngineError, NoEngine.
        """
        so_far, silences = prefix, 0
        if prefix is not None:
            self.tokens_continued += len(prefix.tokens)
            if not tokens_left(prefix, sampling.max_new_tokens):
                return ended(prefix)
        async with self._requests:
            while rest := tokens_left(so_far, sampling.max_new_tokens):
                try:
                    part = await self._ask(input_ids, sampling, so_far, rest, greedy, progress)
                except (EngineLost, Aborted) as cut:
                    silences += isinstance(cut, Silent)
                    if silences == SILENCES:
                        raise EngineError(
                            f"given up after {silences} times: {cut}, though the engine is well; "
                            "rollout.engine.request_timeout_s may be too short"
                        ) from cut
                    self.requests_resent += 1
                    if cut.partial is None:
                        continue
                    part = cut.partial
                    self.tokens_continued += len(part.tokens)
                if not greedy:
                    self.tokens_generated += len(part.tokens)
                so_far = part if so_far is None else merge(so_far, part)
                if progress is not None and so_far.finish is Finish.PARTIAL:
                    progress(so_far)
        assert so_far is not None  # the token budget is at least 1
        return ended(so_far)

    async def _ask(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        so_far: Completion | None,
        rest: int,
        greedy: bool,
        progress: OnPartial | None,
    ) -> Completion:
        """Ask one engine for the missing rest of a completion. Condemn the engine when it is lost.

        Neither the result nor ``progress`` holds a token that was sampled from weights in doubt.
        """
        client = await self._acquire()
        ids = [*input_ids, *(so_far.tokens if so_far else ())]
        sure = 0
        try:
            with watched(client.name, len(ids), self._trace) as watch:

                def grown(part: Completion) -> None:
                    nonlocal sure
                    watch.saw(part)
                    if client in self._doubted:
                        return  # the versions of a partial completion are lower bounds
                    sure = len(part.tokens)
                    if progress is not None:
                        progress(merge(so_far, part) if so_far else part)

                completion = await client.generate(
                    ids,
                    sampling.model_copy(update={"max_new_tokens": rest}),
                    greedy=greedy,
                    cache_key=self._cache_key(),
                    version=self._policy.version,
                    progress=grown,
                )
                watch.saw(completion)
        except (EngineLost, Silent) as cut:
            if client in self._doubted and cut.partial is not None:
                cut.partial = head(cut.partial, sure) if sure else None
            if isinstance(cut, EngineLost):
                await self.condemn(client, "it does not answer")
            raise
        except Aborted as cut:
            if cut.partial is not None:
                cut.partial = self._undoubted(client, cut.partial)
            raise
        finally:
            self._release(client)
        return await self._vouched_for(client, completion)

    async def _vouched_for(self, client: EngineClient, completion: Completion) -> Completion:
        """Return ``completion`` once its engine is trusted. Raises EngineLost when its weights were wrong."""
        if self._undoubted(client, completion) is completion:
            return completion

        def verdict() -> bool | None:
            return True if client not in self._doubted else False if client not in self._load else None

        try:
            async with asyncio.timeout(self._wait_timeout_s):
                right = await self._changes.first(verdict)
        except TimeoutError:
            right = False
            await self.condemn(client, f"no verdict on its weights in {self._wait_timeout_s:g} s")
        if right:
            return completion
        raise EngineLost(f"{client.name} held wrong weights", self._undoubted(client, completion))

    def _undoubted(self, client: EngineClient, completion: Completion) -> Completion | None:
        """Return the tokens before the first one sampled from weights in doubt; None if there is none."""
        version = self._doubted.get(client)
        if version is None:
            return completion
        n = next((span.start for span in completion.spans if span.version >= version), None)
        return completion if n is None else head(completion, n) if n else None

    @asynccontextmanager
    async def drained(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold new requests back inside the block, and enter it once no request runs.

        Requests that run longer than ``timeout_s`` go on inside the block. Must not be nested.
        """
        self._held = True
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changes.first(lambda: None if any(self._load.values()) else True)
            except TimeoutError:
                log.warning("%d requests outlast %.0f s of draining", sum(self._load.values()), timeout_s)
            yield
        finally:
            self._held = False
            self._changes.notify()

    async def abort_running(self) -> None:
        """Make every engine abort its requests: the run ends, and nobody waits for them."""
        await asyncio.gather(*(client.abort_all() for client in self._load), return_exceptions=True)

    def _cache_key(self) -> str | None:
        """After an in-place update the prefix cache holds old KV, on which new requests must not build."""
        return f"v{self._policy.version}" if self._isolate_versions else None

    async def _acquire(self) -> EngineClient:
        while True:
            # The holder of ``drained`` has a time-out of its own, so that this wait needs none.
            await self._changes.first(lambda: None if self._held else True)
            try:
                async with asyncio.timeout(self._wait_timeout_s):
                    return await self._changes.first(self._charge_least_loaded)
            except TimeoutError:
                if not self._held:
                    raise NoEngine(f"no engine has served for {self._wait_timeout_s:.0f} s") from None

    def _charge_least_loaded(self) -> EngineClient | None:
        if self._held or not self._load:
            return None
        client = min(self._load, key=self._load.__getitem__)
        self._load[client] += 1
        return client

    def _release(self, client: EngineClient) -> None:
        if client in self._load:
            self._load[client] -= 1
        if self._held and not any(self._load.values()):
            self._changes.notify()
