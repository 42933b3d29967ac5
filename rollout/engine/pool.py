"""The serving engines, seen by workflows as one generator.

A request goes to the least loaded engine. When its engine is lost or gives it up, another request goes on
with what it had generated, on whichever engine; when there is none, it waits until one serves again. Only
engines that hold the current policy version are in the pool.

    limit -> engine -> whole answer
               ^ |
               | +-> lost, aborted: the answer so far is the prefix of the next request, for the rest of
               +---- the token budget
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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
"""How often one request may be met with silence by an engine that is well: once is a long pause; again and
again is the request's fault, or a time-out that is too short."""

OnPartial = Callable[[Completion], None]


class NoEngine(RuntimeError):
    """No engine has served for the allowed time."""


class EnginePool:
    """Routes requests. Single event loop."""

    def __init__(
        self,
        *,
        max_concurrent: int,
        wait_timeout_s: float,
        isolate_versions: bool,
        trace: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        """``trace`` is called once for every engine request that has ended."""
        self._wait_timeout_s = wait_timeout_s
        self._isolate_versions = isolate_versions
        self._trace = trace
        self._load: dict[EngineClient, int] = {}
        self._changes = Changes()
        self._requests = Limit(max_concurrent)
        self._held = False
        self.version = 0
        self._doubted: WeakKeyDictionary[EngineClient, int] = WeakKeyDictionary()
        """Engines, also such as are gone, by the first version that they have not been found to hold."""
        self.lost: asyncio.Queue[tuple[EngineClient, str]] = asyncio.Queue()
        """Engines that were fenced off, each once, and why; their supervisor decides about them."""
        self.tokens_generated = 0
        """Sampled ones: greedy answers are evaluation. Each token counts once, prefixes of callers do not."""
        self.tokens_continued = 0
        """Tokens of interrupted answers that were gone on with, which would otherwise have been lost."""
        self.requests_resent = 0

    @property
    def clients(self) -> list[EngineClient]:
        return list(self._load)

    @property
    def limit(self) -> int:
        """How many ``generate`` calls go on at one time. Lowering it disturbs none of those that do."""
        return self._requests.size

    @limit.setter
    def limit(self, size: int) -> None:
        self._requests.size = size

    @property
    def in_use(self) -> int:
        """How many ``generate`` calls go on now; more than ``limit`` for a while after it was lowered."""
        return self._requests.inside

    async def add(self, client: EngineClient) -> None:
        """The engine serves, and holds the current version."""
        self._load.setdefault(client, 0)
        self._changes.notify()

    async def remove(self, client: EngineClient) -> None:
        """Fence the engine off: no further request goes to it."""
        self._load.pop(client, None)
        self._changes.notify()

    async def condemn(self, client: EngineClient, reason: str) -> None:
        """Fence an engine off that is not to serve again as it is. Does nothing when that is so already."""
        if self._load.pop(client, None) is not None:
            self.lost.put_nowait((client, reason))
            self._changes.notify()

    def doubt(self, version: int) -> None:
        """What the present engines sample from ``version`` on is held back until they are trusted.

        Before the version is published: what has arrived by now is older, and is not held back.
        """
        for client in self._load:
            self._doubted[client] = version

    def trust(self, client: EngineClient) -> None:
        """The engine was found to hold what it says it does."""
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

        ``prefix`` is a partial answer of before, of a run that was resumed for example: it is continued, and
        counts as part of the answer and of its token budget. ``progress`` is called with the answer so far,
        the prefix included, whenever there is more of it.

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
        """One request to one engine, for what is missing of the answer. A lost engine is fenced off.

        Gives and tells nothing that was sampled from weights in doubt.
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
                        return  # the versions of an answer that goes on are lower bounds
                    sure = len(part.tokens)
                    if progress is not None:
                        progress(merge(so_far, part) if so_far else part)

                answer = await client.generate(
                    ids,
                    sampling.model_copy(update={"max_new_tokens": rest}),
                    greedy=greedy,
                    cache_key=self._cache_key(),
                    version=self.version,
                    progress=grown,
                )
                watch.saw(answer)
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
        return await self._vouched_for(client, answer)

    async def _vouched_for(self, client: EngineClient, answer: Completion) -> Completion:
        """``answer``, once the engine is trusted with the versions in it. Raises EngineLost if it is not."""
        if self._undoubted(client, answer) is answer:
            return answer

        def verdict() -> bool | None:
            return True if client not in self._doubted else False if client not in self._load else None

        try:
            async with asyncio.timeout(self._wait_timeout_s):
                right = await self._changes.first(verdict)
        except TimeoutError:
            right = False
            await self.condemn(client, f"no verdict on its weights in {self._wait_timeout_s:g} s")
        if right:
            return answer
        raise EngineLost(f"{client.name} held wrong weights", self._undoubted(client, answer))

    def _undoubted(self, client: EngineClient, answer: Completion) -> Completion | None:
        """The tokens before the first that was sampled from weights in doubt; None when there is none."""
        version = self._doubted.get(client)
        if version is None:
            return answer
        n = next((span.start for span in answer.spans if span.version >= version), None)
        return answer if n is None else head(answer, n) if n else None

    @asynccontextmanager
    async def drained(self, timeout_s: float) -> AsyncIterator[None]:
        """Nothing is generated inside: new requests wait, and running ones are waited for.

        Those that take longer than ``timeout_s`` are left to run. Not to be nested.
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
        """Make every engine give up what it is generating. For the end of a run, when nobody waits for it."""
        await asyncio.gather(*(client.abort_all() for client in self._load), return_exceptions=True)

    def _cache_key(self) -> str | None:
        """With in-place updates old KV survives in the prefix cache; new requests must not build on it."""
        return f"v{self.version}" if self._isolate_versions else None

    async def _acquire(self) -> EngineClient:
        while True:
            # Whoever holds requests back has a time-out of its own, so that the wait for it needs none here.
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
