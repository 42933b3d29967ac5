"""The engines of a simulated run, seen by the loops as ``rollout.engine.engine_pool.EnginePool`` is.

A request goes to the least loaded engine, the first of several; beyond ``max_concurrent`` requests wait in
the order in which they were asked for.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from slipstream.backend.simulate.simulated_engine import Engine, Request
from slipstream.backend.simulate.trajectory import SimulatedCompletion, Spans
from slipstream.backend.simulate.workload import Workload
from slipstream.configs.schema import SamplingConfig
from slipstream.configs.schema.simulate import EngineModel


class SimulatedPool:
    """Routes requests, and knows what all engines have generated."""

    def __init__(self, engines: int, model: EngineModel, workload: Workload, max_concurrent: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._workload = workload
        self._room = max_concurrent
        self._waiting: deque[Request] = deque()
        self._abandoned: list[tuple[Request, bool, int]] = []
        """Requests that nobody waits for any more; evaluations or not; tokens that each had at its start."""
        self._loads = _Loads(engines)
        self._requests = 0
        self._draining: list[Engine] = []
        self._nothing_runs: asyncio.Future[None] | None = None
        self.engines = [
            Engine(index, model, self._loop, self._finished, self._drained) for index in range(engines)
        ]
        self.tokens_generated = 0
        self.requests_resent = 0

    @property
    def clients(self) -> list[Engine]:
        """Engines that serve now."""
        return [engine for engine in self.engines if engine.index in self._loads]

    def serves(self, engine: Engine) -> bool:
        """True if an engine serves now."""
        return engine.index in self._loads

    def add(self, engine: Engine) -> None:
        """The engine serves, and holds the current version."""
        self._loads.add(engine.index)
        while self._waiting and self._room:
            self._start(self._waiting.popleft())

    def named(self, names: Iterable[str]) -> list[Engine]:
        """Return the engines of these names, serving or not."""
        by_name = {engine.name: engine for engine in self.engines}
        return [by_name[name] for name in names]

    def condemn(self, client: Engine, reason: str) -> None:
        """Raise: no step of a simulated publication can fail."""
        raise AssertionError(f"a simulated publication cannot fail: {client.name}: {reason}")

    def withdraw(self, client: Engine, reason: str) -> None:
        """Raise: a publication that is cut off reaches no simulated engine."""
        raise AssertionError(f"no simulated engine is half updated: {client.name}: {reason}")

    def awaited(self) -> AbstractContextManager[None]:
        """Do nothing: simulated requests have patience."""
        return nullcontext()

    async def doubt(self, version: int) -> None:
        """Do nothing: simulated weights are not verified."""

    def trust(self, client: Engine) -> None:
        """Do nothing: simulated weights are not verified."""

    def announce(self) -> None:
        """Do nothing: simulated engines know their versions themselves."""

    def remove(self, engine: Engine) -> None:
        """The engine is lost. Its requests go on elsewhere with what they have."""
        self._loads.remove(engine.index)
        lost = engine.fail()
        self._room += len(lost)
        self.requests_resent += len(lost)
        self._waiting.extendleft(reversed(lost))
        while self._waiting and self._room and self._loads:
            self._start(self._waiting.popleft())

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        greedy: bool = False,
        prior: Spans = (),
        started: Callable[[Request], None] = lambda request: None,
    ) -> SimulatedCompletion:
        """Complete ``input_ids``, which are a prompt's position and the number of a sample.

        ``greedy``: for an evaluation, whose tokens do not count. ``prior``: version spans of the tokens that
        the completion has already. ``started`` is given the request.
        """
        sample = self._workload.sample(*input_ids)
        length = min(sample[1], sampling.max_new_tokens) if greedy else sample[1]
        request = Request(self._requests, sample[0], length, self._loop.create_future())
        request.spans, before = prior, sum(tokens for _, tokens in prior)
        request.done = before
        self._requests += 1
        started(request)
        if before == length:
            return SimulatedCompletion(sample, prior, 0)
        if self._room and self._loads:
            self._start(request)
        else:
            self._waiting.append(request)
        try:
            await request.future
        except asyncio.CancelledError:
            self._abandon(request, greedy, before)
            raise
        if not greedy:
            self.tokens_generated += length - before
        return SimulatedCompletion(sample, request.spans, request.retractions)

    def slow_down(self, factor: float) -> None:
        for engine in self.engines:
            engine.slow_down(factor)

    async def drained(self, engines: Sequence[Engine]) -> None:
        """These engines start no request until they are resumed; returns when none of them runs any."""
        for engine in engines:
            engine.hold()
        self._draining = [engine for engine in engines if engine.running]
        if self._draining:
            self._nothing_runs = self._loop.create_future()
            await self._nothing_runs

    def settle(self) -> None:
        """Bring the accounts of all engines up to now."""
        for engine in self.engines:
            engine.settle()

    def _start(self, request: Request) -> None:
        self._room -= 1
        self.engines[self._loads.charge_least()].take(request)

    def _finished(self, engine: int, request: Request) -> None:
        if not request.future.done():
            request.future.set_result(None)
        self._freed(engine)

    def _freed(self, engine: int) -> None:
        """A request has left the engine."""
        self._loads.release(engine)
        self._room += 1
        if self._waiting:
            self._start(self._waiting.popleft())

    def _drained(self) -> None:
        if self._nothing_runs is not None and not any(engine.running for engine in self._draining):
            self._nothing_runs.set_result(None)
            self._nothing_runs = None

    def _abandon(self, request: Request, greedy: bool, before: int) -> None:
        """asyncio cancels the tasks of a group in no particular order, so their requests are sorted first."""
        if not self._abandoned:
            self._loop.call_soon(self._drop_abandoned)
        self._abandoned.append((request, greedy, before))

    def _drop_abandoned(self) -> None:
        abandoned, self._abandoned = self._abandoned, []
        for request, greedy, before in sorted(abandoned, key=lambda abandoned: abandoned[0].order):
            engine = request.engine
            if engine is not None:
                engine.drop(request)
                self._freed(engine.index)
            elif request.done < request.length:  # else it is complete after all, in this instant
                self._waiting.remove(request)
            if not greedy:
                self.tokens_generated += request.done - before


class _Loads:
    """Number of requests of each serving engine, with the least loaded one found in constant time."""

    def __init__(self, engines: int) -> None:
        self._load: dict[int, int] = {}
        self._engines_with = [0]
        """By load: a bit for each engine that has it."""
        self._least = 0
        for index in range(engines):
            self.add(index)

    def __len__(self) -> int:
        return len(self._load)

    def __contains__(self, index: int) -> bool:
        return index in self._load

    def add(self, index: int) -> None:
        """The engine serves, and has nothing to do."""
        self._load[index] = 0
        self._engines_with[0] |= 1 << index
        self._least = 0

    def remove(self, index: int) -> None:
        self._engines_with[self._load.pop(index)] ^= 1 << index

    def charge_least(self) -> int:
        """Give one more request to the least loaded engine, the first of several. There must be one."""
        levels = self._engines_with
        while not levels[self._least]:
            self._least += 1
        bit = levels[self._least] & -levels[self._least]
        index = bit.bit_length() - 1
        load = self._least + 1
        levels[load - 1] ^= bit
        if load == len(levels):
            levels.append(0)
        levels[load] |= bit
        self._load[index] = load
        return index

    def release(self, index: int) -> None:
        """The engine has one request less; a lost engine has none."""
        load = self._load.get(index, 0)
        if load:
            bit = 1 << index
            self._engines_with[load] ^= bit
            load -= 1
            self._engines_with[load] |= bit
            self._load[index] = load
            if load < self._least:
                self._least = load
