"""The serving engines, seen by workflows as one generator. Every generating process has a pool of its own.

A request goes to the least loaded engine; a slow one counts as loaded (``pace.py``). When that engine is
lost or aborts the request, the tokens generated so far become the prefix of a further request to any engine.
While no engine serves, requests wait. An engine is lost when it does not answer, when its weights are wrong,
or when nothing but malformed replies come from it.

A request of a client may be why its engine is lost. One that ran on a lost engine is on trial: such requests
are asked one at a time, until their first token comes. If that engine is lost as well, the client gets an
error in place of a third engine.

    limit -> engine -> complete
               ^ |
               | +-> lost or aborted: the completion so far is the prefix of the next request, which has
               +---- the rest of the token budget

Which engines serve, whose weights are in doubt, and how many requests may run is not decided here: the pool
follows the numbered routing records of the driver (``routing.py``, ``roster.py``) and says in its status
which one is in force.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.rollout.engine.client import (
    EngineAddress,
    EngineClient,
    EngineError,
    EngineLost,
    Malformed,
    RequestRefused,
    Silent,
)
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.pace import Pace, weights
from slipstream.rollout.engine.request_trace import RequestTrace, watched
from slipstream.rollout.engine.routing import LostEngine, PoolStatus, Routing, ServingEngine, Suspect
from slipstream.rollout.engine.sampling import LiveSampling, Sampling, starts_over
from slipstream.rollout.system.adjustable_limit import Limit
from slipstream.rollout.system.changes import Changes

log = logging.getLogger(__name__)

SILENCES = 3
"""Number of times that a healthy engine may stay silent about one request. One silence is a long pause;
several are the request's fault, or a time-out that is too short."""


MALFORMED_REPLIES = 3
"""Number of malformed replies in a row after which an engine is given up. One may be the fault of an odd
request. An engine that has nothing else to give answers faster than the others, and so is the least loaded
one: it would attract all requests."""


TRIAL_S = 10.0
"""Longest trial of a request that ran on a lost engine, in seconds: its engine may be busy with others."""

MOST_LOSSES = 3
"""Number of engines that are lost under a request of a client, at whatever time, before it is given up."""

WEIGHED_EVERY_S = 0.1
"""Least time between two comparisons of the engines' paces."""

MOST_SUSPECTS = 64
"""Number of suspects that a status has."""


class NoEngine(RuntimeError):
    """No engine has served for the allowed time."""


class GeneratingClient(Protocol):
    """The part of ``EngineClient`` that a pool uses."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        cache_key: str | None = None,
        version: int,
        grown: Callable[[], None] | None = None,
    ) -> None: ...
    async def close(self) -> None:
        """End all running requests: each of them raises EngineLost."""
        ...


@dataclass(eq=False)
class _Engine:
    """One start of one server."""

    name: str
    life: int
    client: GeneratingClient
    doubted: int | None
    load: int = 0
    pace: Pace = field(default_factory=Pace)
    weight: float = 1.0
    """How many requests of a quick engine one of this engine stands for."""
    malformed: int = 0
    """Number of malformed replies since the last good one."""
    lost: str | None = None
    """Why it is out of use; None while it serves."""
    growths: "set[_Growth]" = field(default_factory=set["_Growth"])
    """Completions that it generates."""


class _Growth:
    """The part of a completion that its caller knows of. None of that is ever taken back."""

    def __init__(self, completion: GrowingCompletion, grown: Callable[[], None] | None) -> None:
        self.completion = completion
        self.known = len(completion.tokens)
        self.lost: list[str] = []
        """Engines that were lost while they ran this request of a client."""
        self.on_trial = False
        self._grown = grown

    def tell(self) -> None:
        """Tell the caller of the tokens that are new to it."""
        if len(self.completion.tokens) > self.known:
            self.known = len(self.completion.tokens)
            if self._grown is not None:
                self._grown()


class EnginePool:
    """Routes the requests of one process. Single event loop."""

    def __init__(
        self,
        *,
        wait_timeout_s: float,
        isolate_versions: bool,
        most_requests: int | None = None,
        connect: Callable[[EngineAddress], GeneratingClient] = EngineClient,
        report: Callable[[], None] | None = None,
        on_held: Callable[[bool], None] | None = None,
        trace: Callable[[RequestTrace], None] | None = None,
    ) -> None:
        """``wait_timeout_s``: longest time without an engine, and longest wait for a verdict on weights.

        ``isolate_versions``: keep KV caches of different versions apart. ``most_requests``: number of
        requests that this process has descriptors for; None: as many as the driver allows. ``report`` is
        called when the driver should have the ``status`` at once: another record is in force, an engine is
        lost, or the last running request has ended while requests are held. ``on_held`` is called with True
        when requests are held from now on, and with False when they go on: engines stand still in between, so
        that clocks of episodes should stand still, too. ``trace`` is called once for every engine request
        that has ended.
        """
        self._wait_timeout_s = wait_timeout_s
        self._isolate_versions = isolate_versions
        self._most_requests = most_requests
        self._connect = connect
        self._report = report
        self._on_held = on_held
        self._trace = trace
        self._engines: dict[str, _Engine] = {}
        """Engines of the record in force, in its order; some may be out of use."""
        self._requests = Limit(1)
        self._trial = Limit(1)
        self._weighed_s = -WEIGHED_EVERY_S
        self._suspects: deque[Suspect] = deque(maxlen=MOST_SUSPECTS)
        self._changes = Changes()
        self._closing: set[asyncio.Task[None]] = set()
        self._number = 0
        self.version = 0
        """Policy version that every engine of the record in force holds."""
        self.held = False
        """Requests wait, because the engines are to be idle or stand still."""
        self.tokens_generated = 0
        """Number of sampled tokens. Evaluation (greedy) and the prefixes of callers do not count."""
        self.tokens_continued = 0
        """Number of tokens of interrupted completions that were continued instead of lost."""
        self.requests_resent = 0

    def status(self) -> PoolStatus:
        engines = self._engines.values()
        return PoolStatus(
            number=self._number,
            in_use=self._requests.inside,
            running=self._running,
            tokens_generated=self.tokens_generated,
            tokens_continued=self.tokens_continued,
            requests_resent=self.requests_resent,
            lost=tuple(LostEngine(e.name, e.life, e.lost) for e in engines if e.lost is not None),
            suspects=tuple(self._suspects),
        )

    @property
    def capacity(self) -> int:
        """Number of requests that may run at one time; 0 while there is no engine.

        Engines whose requests are held count: an update of the weights makes requests wait, and no more.
        """
        serve = any(engine.lost is None for engine in self._engines.values())
        return self._requests.size if serve else 0

    def follow(self, routing: Routing) -> None:
        """Put a routing record into force; does nothing unless it is newer than the one in force.

        Requests of engines that are not in the record any more end, and go on elsewhere.
        """
        if routing.number <= self._number:
            return
        self._number, self.version = routing.number, routing.version
        self._requests.size = min(routing.limit, self._most_requests or routing.limit)
        before = self._engines
        doubted = [engine for engine in before.values() if engine.doubted is not None]
        self._engines = {serving.address.name: self._engine(serving) for serving in routing.engines}
        for engine in before.values():
            if self._engines.get(engine.name) is not engine:
                self._close(engine, "the driver has given it up")
        for engine in doubted:
            if engine.doubted is None:  # the next doubt may come before the next token
                for growth in list(engine.growths):
                    growth.tell()
        if routing.held != self.held:
            self.held = routing.held
            if self._on_held is not None:
                self._on_held(self.held)
        self._changes.notify()
        self._tell_driver()

    def lose_touch(self) -> None:
        """Hold back what is sampled from later versions than that of the record in force, until the next
        record: nobody tells this process whether they are in doubt.
        """
        for engine in self._engines.values():
            if engine.doubted is None:
                engine.doubted = self.version + 1

    async def close(self) -> None:
        """Close the connections to all engines. Cancel the calls of ``generate`` before."""
        for engine in self._engines.values():
            self._close(engine, "the pool is closed")
        self._engines = {}
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Sampling,
        completion: GrowingCompletion,
        *,
        greedy: bool = False,
        grown: Callable[[], None] | None = None,
    ) -> None:
        """Continue ``completion`` of ``input_ids`` on any engine, up to ``sampling.max_new_tokens``.

        ``completion`` is empty, or partial, of a collector that has ended for example. ``grown`` is called
        whenever it has grown by tokens whose weights are not in doubt. Only inside of that call, and after
        this one has returned or raised, is everything in ``completion`` to be relied on: in between it may
        hold tokens that are taken back. A token of which ``grown`` was told stays; its version may yet change
        from a lower bound to the engine's own. Under a grammar an interrupted completion starts over, so that
        ``grown`` must not be given.

        Raises InvalidRequest, EngineError, NoEngine; RequestRefused also for a client's request under which
        engines are lost.
        """
        self.tokens_continued += len(completion.tokens)
        growth, silences, begin = _Growth(completion, grown), 0, len(completion.tokens)
        if completion.is_due(sampling.max_new_tokens):
            async with self._requests:
                while completion.is_due(sampling.max_new_tokens):
                    length = len(completion.tokens)
                    try:
                        await self._ask(input_ids, sampling, growth, greedy)
                    except (EngineLost, Aborted) as cut:
                        silences += isinstance(cut, Silent)
                        if silences == SILENCES:
                            raise EngineError(
                                f"given up after {silences} times: {cut}, though the engine is well; "
                                "rollout.engine.request_timeout_s may be too short"
                            ) from cut
                        self.requests_resent += 1
                        if starts_over(sampling):
                            completion.cut(begin)
                            growth.known = length = begin
                        self.tokens_continued += len(completion.tokens) - length
                        growth.tell()
                        completion.resumed = len(completion.tokens)
        completion.ended()

    async def _ask(self, input_ids: Sequence[int], sampling: Sampling, growth: _Growth, greedy: bool) -> None:
        """Ask one engine for the missing rest of a completion, and lose the engine if it is lost.

        However this ends, the completion then holds no token that was sampled from weights in doubt.
        """
        if not growth.lost:
            await self._ask_engine(await self._acquire(), input_ids, sampling, growth, greedy)
            return
        with contextlib.ExitStack() as trial:
            await self._trial.__aenter__()
            trial.callback(self._trial.leave)
            engine = await self._acquire()
            growth.on_trial = True
            trial.callback(setattr, growth, "on_trial", False)
            trial.callback(asyncio.get_running_loop().call_later(TRIAL_S, trial.close).cancel)
            await self._ask_engine(engine, input_ids, sampling, growth, greedy, trial.close)

    async def _ask_engine(
        self,
        engine: _Engine,
        input_ids: Sequence[int],
        sampling: Sampling,
        growth: _Growth,
        greedy: bool,
        acquitted: Callable[[], None] = lambda: None,
    ) -> None:
        """``acquitted`` is called when the engine has given a token."""
        completion = growth.completion
        completion.newest = None
        length, attested = len(completion.tokens), False
        clock = asyncio.get_running_loop().time
        began_s = clock()

        def grown() -> None:
            acquitted()
            watch.grown()
            newest = completion.newest  # versions are lower bounds: of the weights in doubt may be any token
            if engine.doubted is None or (newest is not None and newest < engine.doubted):
                growth.tell()

        try:
            try:
                engine.growths.add(growth)
                with watched(engine.name, len(input_ids) + length, completion, self._trace) as watch:
                    await engine.client.generate(
                        input_ids,
                        sampling,
                        completion,
                        greedy=greedy,
                        cache_key=self._cache_key(),
                        version=self.version,
                        grown=grown,
                    )
                attested, engine.malformed = True, 0
                engine.pace.took(clock() - began_s, len(completion.tokens) - length, clock())
            except Malformed as error:
                self._blame(engine, growth, error)
                raise
            except EngineLost as error:
                self._lose(engine, "it does not answer")
                self._suspect(engine, sampling, growth, error)
                raise
            except Aborted as cut:
                attested = cut.attested
                raise
            finally:
                engine.growths.discard(growth)
                self._release(engine)
            await self._vouched_for(engine, growth)
        except BaseException:
            if engine.doubted is not None:
                completion.cut(self._undoubted(engine, growth) if attested else growth.known)
            raise
        finally:
            if not greedy:
                self.tokens_generated += len(completion.tokens) - length

    def _blame(self, engine: _Engine, growth: _Growth, error: Malformed) -> None:
        """Count a malformed reply against its engine, and lose the engine after too many of them in a row.

        Raises EngineLost when the engine is lost, so that the request goes on elsewhere, without what its
        caller does not know of yet.
        """
        engine.malformed += 1
        log.warning("malformed reply %d in a row: %s", engine.malformed, error)
        if engine.malformed >= MALFORMED_REPLIES:
            self._lose(engine, f"its last {engine.malformed} replies in a row were malformed: {error}")
        if engine.lost is not None:
            growth.completion.cut(growth.known)
            raise EngineLost(str(error)) from error

    def _suspect(self, engine: _Engine, sampling: Sampling, growth: _Growth, error: EngineLost) -> None:
        """Note that an engine was lost under a request. Raises RequestRefused if it is to cost no other one.

        Requests of workflows are sampled as the recipe says: no engine is lost for that.
        """
        if not isinstance(sampling, LiveSampling):
            return
        self._suspects.append(Suspect(engine.name, engine.life, sampling.request))
        self._tell_driver()
        growth.lost.append(engine.name)
        if growth.on_trial or len(growth.lost) >= MOST_LOSSES:
            engines = " and ".join(growth.lost)
            log.warning("%s is given up: %s were lost while they ran it", sampling.request, engines)
            raise RequestRefused(f"{engines} were lost while they ran this request: {error}") from error

    async def _vouched_for(self, engine: _Engine, growth: _Growth) -> None:
        """Wait until the engine's weights are trusted. Raises EngineLost when they were wrong."""

        def verdict() -> bool | None:
            if self._undoubted(engine, growth) == len(growth.completion.tokens):
                return True
            return None if engine.lost is None else False

        if verdict():  # as a rule: a time-out costs more
            return
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                is_right = await self._changes.first(verdict)
        except TimeoutError:
            is_right = False
            self._lose(engine, f"no verdict on its weights in {self._wait_timeout_s:g} s")
        if not is_right:
            raise EngineLost(f"{engine.name} held wrong weights")

    def _undoubted(self, engine: _Engine, growth: _Growth) -> int:
        """Return the number of tokens before the first one that was sampled from weights in doubt."""
        if engine.doubted is None:
            return len(growth.completion.tokens)
        return growth.completion.first_of(engine.doubted, start=growth.known)

    def _cache_key(self) -> str | None:
        """After an in-place update the prefix cache holds old KV, on which new requests must not build."""
        return f"v{self.version}" if self._isolate_versions else None

    # ---- engines

    def _engine(self, serving: ServingEngine) -> _Engine:
        """Return the engine of a record: the one that is here already, or a new one."""
        name = serving.address.name
        engine = self._engines.get(name)
        if engine is None or engine.life != serving.life:
            return _Engine(name, serving.life, self._connect(serving.address), serving.doubted)
        engine.doubted = serving.doubted
        return engine

    def _lose(self, engine: _Engine, reason: str) -> None:
        """Put an engine out of use until a record has a later start of it. Does nothing the second time."""
        if engine.lost is None:
            engine.lost = reason
            self._changes.notify()
            self._tell_driver()

    def _close(self, engine: _Engine, reason: str) -> None:
        engine.lost = engine.lost or reason
        closing = asyncio.get_running_loop().create_task(engine.client.close(), name=f"closing {engine.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _acquire(self) -> _Engine:
        while True:
            # No time-out here: the part that holds requests has one, and ends with the driver's connection.
            await self._changes.first(lambda: None if self.held else True)
            if (engine := self._charge_least_loaded()) is not None:  # as a rule: a time-out costs more
                return engine
            try:
                async with asyncio.timeout(self._wait_timeout_s):
                    return await self._changes.first(self._charge_least_loaded)
            except TimeoutError:
                if not self.held:
                    raise NoEngine(f"no engine has served for {self._wait_timeout_s:.0f} s") from None

    def _charge_least_loaded(self) -> _Engine | None:
        serving = [engine for engine in self._engines.values() if engine.lost is None]
        if self.held or not serving:
            return None
        self._weigh(serving, asyncio.get_running_loop().time())
        loads = [(engine.load + 1) * engine.weight for engine in serving]
        engine = serving[loads.index(min(loads))]
        engine.load += 1
        return engine

    def _weigh(self, serving: Sequence[_Engine], now_s: float) -> None:
        """Compare the paces of the engines, which change more slowly than requests come."""
        if now_s < self._weighed_s + WEIGHED_EVERY_S:
            return
        self._weighed_s = now_s
        paces = [engine.pace for engine in serving]
        for engine, weight in zip(serving, weights(paces, now_s), strict=True):
            engine.weight = weight

    def _release(self, engine: _Engine) -> None:
        engine.load -= 1
        if self.held and not self._running:
            self._tell_driver()

    @property
    def _running(self) -> int:
        return sum(engine.load for engine in self._engines.values() if engine.lost is None)

    def _tell_driver(self) -> None:
        if self._report is not None:
            self._report()
