"""The model of an engine against a plain one that keeps each request's progress by itself, exactly."""

import asyncio
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.simulate import clock
from slipstream.backend.simulate.simulated_engine import Engine, Request
from slipstream.backend.simulate.trajectory import joined
from slipstream.configs.schema.simulate import EngineModel
from tests.tries import tries

STEP, PER_REQUEST, PREFILL = Fraction(1, 8), Fraction(1, 64), Fraction(1, 256)
MODEL = EngineModel(step_s=0.125, request_s=1 / 64, prefill_tokens_per_s=256, max_running=3, resend_s=0.25)


@dataclass
class Plain:
    """One request of the plain model."""

    prompt: int
    length: int
    made: Fraction = Fraction(0)
    versions: list[int] = field(default_factory=list)
    """Of each whole token."""
    ended: Fraction | None = None


@dataclass
class PlainEngine:
    """Time goes from event to event; each request's tokens are counted by themselves."""

    now: Fraction = Fraction(0)
    version: int = 0
    stall: Fraction = Fraction(0)
    paused: bool = False
    running: list[Plain] = field(default_factory=list)
    queue: list[Plain] = field(default_factory=list)

    def until(self, time: Fraction) -> None:
        while self.now < time:
            if self.paused or not self.running:
                self.now = time
            elif self.stall:
                passed = min(self.stall, time - self.now)
                self.stall -= passed
                self.now += passed
            else:
                token_s = STEP + PER_REQUEST * len(self.running)
                soonest = min(one.length - one.made for one in self.running)
                passed = min(time - self.now, soonest * token_s)
                self.now += passed
                for one in self.running:
                    one.made += passed / token_s
                    one.versions += [self.version] * (int(one.made) - len(one.versions))
                self._end()

    def _end(self) -> None:
        for one in [one for one in self.running if one.made == one.length]:
            one.ended = self.now
            self.running.remove(one)
        self._fill()

    def _fill(self) -> None:
        while self.queue and len(self.running) < MODEL.max_running and not self.paused:
            one = self.queue.pop(0)
            self.running.append(one)
            self.stall += PREFILL * one.prompt

    def take(self, one: Plain) -> None:
        if not self.running:
            self.stall = Fraction(0)
        self.queue.append(one)
        self._fill()

    def resume(self, version: int, reprefill: bool, resend: bool) -> None:
        self.version, self.paused = version, False
        if reprefill:
            self.stall += sum((PREFILL * (one.prompt + one.made) for one in self.running), Fraction(0))
        if resend:
            self.stall += Fraction(1, 4) * len(self.running)
        self._fill()


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 24),  # eighths of a second since the event before
        st.one_of(
            st.tuples(st.just("ask"), st.integers(1, 64), st.integers(1, 12)),
            st.tuples(
                st.just("update"), st.integers(0, 8), st.sampled_from(["in_place", "retract", "abort"])
            ),
        ),
    ),
    min_size=1,
    max_size=14,
)


def spans(versions: list[int]) -> tuple[tuple[int, int], ...]:
    found: tuple[tuple[int, int], ...] = ()
    for version in versions:
        found = joined(found, ((version, 1),))
    return found


def plainly(events) -> list[Plain]:
    engine, asked, version, at = PlainEngine(), [], 0, Fraction(0)
    for gap, (what, first, second) in events:
        at += Fraction(gap, 8)
        engine.until(at)
        if what == "ask":
            asked.append(Plain(first, second))
            engine.take(asked[-1])
        else:
            version += 1
            engine.paused = True
            at += Fraction(first, 8)
            engine.until(at)
            engine.resume(version, second in ("retract", "abort"), second == "abort")
    engine.until(at + 10**6)
    return asked


def modelled(events) -> list[tuple[Request, float]]:
    ends: dict[int, float] = {}

    async def main():
        loop = asyncio.get_running_loop()
        engine = Engine(0, MODEL, loop, lambda _, one: ends.update({one.order: loop.time()}), lambda: None)
        asked, version = [], 0
        for gap, (what, first, second) in events:
            await asyncio.sleep(gap / 8)
            if what == "ask":
                asked.append(Request(len(asked), first, second, None))
                engine.take(asked[-1])
            else:
                version += 1
                engine.pause()
                await asyncio.sleep(first / 8)
                engine.resume(version, reprefill=second in ("retract", "abort"), resend=second == "abort")
        await asyncio.sleep(10**6)
        engine.settle()
        total = engine.decode_s + engine.prefill_s + engine.paused_s + engine.idle_s + engine.down_s
        assert total == pytest.approx(loop.time())
        return asked

    return [(one, ends[one.order]) for one in clock.run(main())]


@tries(67)
@given(EVENTS)
def test_the_engine_ends_requests_when_a_step_by_step_model_does(events):
    for plain, (request, ended) in zip(plainly(events), modelled(events), strict=True):
        assert plain.ended is not None
        assert ended == pytest.approx(float(plain.ended), abs=1e-3)
        assert request.done == plain.length


@tries(67)
@given(EVENTS)
def test_every_token_has_the_version_that_the_engine_held_when_it_was_done(events):
    for plain, (request, _) in zip(plainly(events), modelled(events), strict=True):
        assert request.spans == spans(plain.versions)


def engine_of(model: EngineModel, scenario):
    """Run ``scenario(engine, ends)`` on an engine; what it returns."""

    async def main():
        loop = asyncio.get_running_loop()
        ends: dict[int, float] = {}
        engine = Engine(0, model, loop, lambda _, one: ends.update({one.order: loop.time()}), lambda: None)
        return await scenario(engine, ends)

    return clock.run(main())


def test_decoding_takes_longer_while_the_trainer_slows_it_down():
    async def scenario(engine, ends):
        engine.take(Request(0, 1, 10, None))
        await asyncio.sleep(4.0)
        engine.slow_down(2.0)
        await asyncio.sleep(100)
        return ends[0]

    model = EngineModel(step_s=1.0, request_s=0, prefill_tokens_per_s=1e12)
    assert engine_of(model, scenario) == pytest.approx(4 + 6 * 2)


def test_full_kv_memory_sends_the_newest_back_and_loses_nothing():
    async def scenario(engine, ends):
        requests = [Request(number, 10, 40, None) for number in range(3)]
        for request in requests:
            engine.take(request)
        most = 0.0
        for _ in range(200):
            await asyncio.sleep(0.9)
            engine.settle()
            most = max(most, engine.kv_tokens)
        return requests, ends, most

    model = EngineModel(step_s=1.0, request_s=0, prefill_tokens_per_s=1e12, kv_tokens=100)
    requests, ends, most = engine_of(model, scenario)
    assert most <= 101
    assert sorted(ends) == [0, 1, 2]
    assert [request.done for request in requests] == [40, 40, 40]
    assert requests[0].retractions == 0
    assert requests[2].retractions > 0


def test_an_engine_that_fails_gives_back_what_its_requests_had():
    async def scenario(engine, ends):
        requests = [Request(number, 1, 50, None) for number in range(4)]
        for request in requests:
            engine.take(request)
        await asyncio.sleep(10.5)
        lost = engine.fail()
        await asyncio.sleep(5)
        engine.settle()
        return requests, lost, ends, engine.down_s

    model = EngineModel(step_s=1.0, request_s=0, prefill_tokens_per_s=1e12, max_running=3)
    requests, lost, ends, down_s = engine_of(model, scenario)
    assert lost == requests
    assert [request.done for request in requests] == [10, 10, 10, 0]
    assert requests[0].spans == ((0, 10),)
    assert ends == {}
    assert down_s == 5


def test_a_dropped_request_makes_room_for_the_next():
    async def scenario(engine, ends):
        first, second = Request(0, 1, 50, None), Request(1, 1, 5, None)
        engine.take(first)
        engine.take(second)
        await asyncio.sleep(10)
        engine.drop(first)
        await asyncio.sleep(10)
        return first.done, ends

    model = EngineModel(step_s=1.0, request_s=0, prefill_tokens_per_s=1e12, max_running=1)
    done, ends = engine_of(model, scenario)
    assert done == 10
    assert ends == {1: pytest.approx(15)}
