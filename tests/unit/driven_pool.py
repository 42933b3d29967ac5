"""A pool between engines and a driver that do what a test says."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.messages import DOWN, Down
from slipstream.rollout.engine.client import EngineLost
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.routing import Routing, ServingEngine
from slipstream.rollout.system.frames import pack, split
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span

SAMPLING = SamplingConfig(max_new_tokens=4)
COMPLETION = Completion((1, 2), (-1.0, -1.0), (Span(0, 0, 2),), Finish.STOP)


def part(*tokens: int, version: int = 0, finish=Finish.PARTIAL, retractions: int = 0) -> Completion:
    spans = (Span(version, 0, len(tokens)),) if tokens else ()
    return Completion(tokens, tuple(-float(token) for token in tokens), spans, finish, retractions)


def whole(*tokens: int, **more) -> Completion:
    return part(*tokens, **{"finish": Finish.STOP} | more)


def mixed(*versions: int, finish=Finish.STOP) -> Completion:
    """Token k is k + 1, of the k-th of ``versions``."""
    completion = GrowingCompletion()
    for token, version in enumerate(versions, 1):
        completion.add(version, [token], [-float(token)])
    completion.finish = finish
    return completion.completion()


def growing(completion: Completion) -> GrowingCompletion:
    """Return a completion that has arrived already."""
    copy = GrowingCompletion()
    arrive(copy, completion)
    return copy


def arrive(completion: GrowingCompletion, new: Completion) -> None:
    for span in new.spans:
        tokens, logprobs = new.tokens[span.start : span.end], new.logprobs[span.start : span.end]
        completion.add(span.version, tokens, logprobs)
    completion.finish = new.finish
    completion.retractions += new.retractions


@dataclass(eq=False)
class Request:
    """A request that runs until the test ends it."""

    asked: dict
    completion: GrowingCompletion
    grown: object
    future: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self._start = len(self.completion.tokens)

    def becomes(self, reply: Completion) -> None:
        """All of the reply so far: its tokens stay the same, but their versions may change."""
        self.completion.cut(self._start)
        arrive(self.completion, reply)


class FakeEngine:
    """A client whose requests grow and end when, and how, the test says."""

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self.requests: list[Request] = []
        self.closed = 0
        self.ignores_close = False

    @property
    def asked(self) -> list[dict]:
        return [request.asked for request in self.requests]

    @property
    def running(self) -> int:
        return sum(not request.future.done() for request in self.requests)

    async def generate(
        self, input_ids, sampling, completion, *, greedy=False, cache_key=None, version, grown=None
    ) -> None:
        asked = {
            "ids": [*input_ids, *completion.tokens],
            "budget": completion.tokens_left(sampling.max_new_tokens),
            "greedy": greedy,
            "key": cache_key,
            "version": version,
        }
        self.requests.append(Request(asked, completion, grown))
        await self.requests[-1].future

    async def close(self) -> None:
        self.closed += 1
        if not self.ignores_close:
            self.end(EngineLost("closed"), n=len(self.requests))

    def grow(self, reply: Completion, newest: int | None = None) -> None:
        """Let the reply to the oldest running request have grown to ``reply``.

        ``newest``: the engine's version when it hands the reply out, if it says that.
        """
        request = next(request for request in self.requests if not request.future.done())
        request.becomes(reply)
        request.completion.newest = newest
        request.grown()

    def end(self, outcome=COMPLETION, reply: Completion | None = None, n: int = 1) -> None:
        """End the ``n`` oldest running requests: with a completion, or an error and the reply until then."""
        for request in [request for request in self.requests if not request.future.done()][:n]:
            if isinstance(outcome, Exception):
                if reply is not None:
                    request.becomes(reply)
                request.future.set_exception(outcome)
            else:
                request.becomes(outcome)
                request.future.set_result(None)


class Driver:
    """Sends routing records to a pool."""

    def __init__(
        self, *engines: FakeEngine, max_concurrent=10, wait_timeout_s=60.0, isolate_versions=False, **more
    ) -> None:
        self._clients: dict[str, FakeEngine] = {}
        self._serving: dict[FakeEngine, ServingEngine] = {}
        self._lives = 0
        self.record = Routing(0, 0, False, max_concurrent)
        self.reports = 0
        self.pool = EnginePool(
            wait_timeout_s=wait_timeout_s,
            isolate_versions=isolate_versions,
            connect=lambda address: self._clients[address.url],
            report=self._report,
            **more,
        )
        for engine in engines:
            self.add(engine)

    def _report(self) -> None:
        self.reports += 1

    def send(self, **changes) -> None:
        """Put the next record into force, as it comes over a connection."""
        record = msgspec.structs.replace(
            self.record,
            number=self.record.number + 1,
            engines=tuple(self._serving.values()),
            **changes,
        )
        received = split(pack(Down(routing=record), ()), DOWN)[0].routing
        assert received is not None
        self.record = received
        self.pool.follow(received)

    def add(self, engine: FakeEngine) -> None:
        self._lives += 1
        url = f"http://{engine.name}/{self._lives}"
        self._clients[url] = engine
        address = EngineAddress(engine.name, url, 1, 100, 100, timeout_s=60)
        self._serving[engine] = ServingEngine(address, self._lives)
        self.send()

    def remove(self, engine: FakeEngine) -> None:
        del self._serving[engine]
        self.send()

    def doubt(self, version: int | None, *engines: FakeEngine) -> None:
        for engine in engines or list(self._serving):
            self._serving[engine] = msgspec.structs.replace(self._serving[engine], doubted=version)
        self.send()

    def trust(self, engine: FakeEngine) -> None:
        self.doubt(None, engine)

    @property
    def lost(self) -> list[tuple[str, str]]:
        return [(lost.name, lost.reason) for lost in self.pool.status().lost]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def start(
    driver: Driver, n: int = 1, sampling: SamplingConfig = SAMPLING, prefix: Completion | None = None, **more
) -> list[asyncio.Task[Completion]]:
    async def generate() -> Completion:
        completion = growing(prefix) if prefix is not None else GrowingCompletion()
        await driver.pool.generate([7], sampling, completion, **more)
        return completion.completion()

    return [asyncio.create_task(generate()) for _ in range(n)]


def watched(driver: Driver, **more) -> tuple[asyncio.Task[Completion], list[Completion]]:
    """Start a request. Return it, and the completion each time that its caller is told of growth."""
    completion, seen = GrowingCompletion(), []

    async def generate() -> Completion:
        def grown() -> None:
            seen.append(completion.completion())

        prefix = more.pop("prefix", None)
        if prefix is not None:
            arrive(completion, prefix)
        sampling = more.pop("sampling", SAMPLING)
        await driver.pool.generate([7], sampling, completion, grown=grown, **more)
        return completion.completion()

    return asyncio.create_task(generate()), seen


async def assert_nothing_left(driver: Driver, engine: FakeEngine, max_concurrent: int) -> None:
    """Every permit is back: as many requests as allowed run at once, and one more waits."""
    before = len(engine.requests)
    tasks = start(driver, n=max_concurrent + 1)
    await settle()
    assert len(engine.requests) - before == max_concurrent
    engine.end(n=max_concurrent)
    await settle()
    engine.end()
    assert await asyncio.gather(*tasks) == [COMPLETION] * (max_concurrent + 1)
    status = driver.pool.status()
    assert (status.running, status.in_use) == (0, 0)


def asked(ids: list[int], budget: int, **more) -> dict:
    return {"ids": ids, "budget": budget, "greedy": False, "key": None, "version": 0} | more
