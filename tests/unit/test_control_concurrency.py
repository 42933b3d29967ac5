"""The controller of the concurrency, against a small simulated engine."""

import random
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.control.concurrency import (
    CUT,
    FORGET,
    GROW,
    KV_FREE,
    KV_FULL,
    MINIMUM,
    PATIENCE,
    ConcurrencyController,
    EngineLoad,
)
from tests.tries import tries


@dataclass
class SimulatedEngine:
    """Decodes running requests by ``speed`` tokens a tick; retracts the youngest when its memory is full.

    As many requests as the limit allows are under way at all times; each starts with an empty completion.
    """

    memory: int
    max_running: int
    lengths: tuple[int, int]
    speed: int = 50
    seed: int = 0
    running: list[list[int]] = field(default_factory=list)
    """[tokens so far, tokens at its end]"""
    waiting: deque[list[int]] = field(default_factory=deque)
    done: int = 0
    lost: int = 0
    """Tokens whose KV had to be computed again."""
    debt: float = 0.0
    """Ticks of computing that again, in which nothing is decoded."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def in_use(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def used(self) -> int:
        return sum(so_far for so_far, _ in self.running)

    def tick(self, limit: int) -> EngineLoad:
        while self.in_use < limit:
            self.waiting.append([0, self.random.randint(*self.lengths)])
        while self.waiting and len(self.running) < self.max_running:
            if self.used + self.waiting[0][0] + self.speed > self.memory:
                break
            self.running.append(self.waiting.popleft())
        if self.debt >= 1:
            self.debt -= 1
            return EngineLoad(len(self.running), len(self.waiting), min(1.0, self.used / self.memory))
        for request in self.running:
            request[0] = min(request[0] + self.speed, request[1])
        retracted = 0
        while self.used > self.memory and len(self.running) > 1:
            self.waiting.appendleft(self.running.pop())
            self.lost += self.waiting[0][0]
            self.debt += self.waiting[0][0] / (100 * self.speed)
            retracted += 1
        load = EngineLoad(len(self.running), len(self.waiting), min(1.0, self.used / self.memory), retracted)
        self.done += sum(end for so_far, end in self.running if so_far >= end)
        self.running = [request for request in self.running if request[0] < request[1]]
        return load


def drive(engine: SimulatedEngine, controller: ConcurrencyController, ticks: int) -> list[int]:
    """The limit after each tick."""
    limits = []
    for _ in range(ticks):
        load = engine.tick(controller.limit)
        controller.observe([load], in_use=load.running + load.waiting)
        limits.append(controller.limit)
    return limits


class CountsCuts(ConcurrencyController):
    """Counts cuts: unlike a trim, a cut leaves room for growth below its ceiling."""

    cuts = 0

    def _lower(self, limit: int, ceiling: int) -> None:
        before = self.limit
        super()._lower(limit, ceiling)
        self.cuts += self.limit < before and ceiling > limit


def throughput(engine: SimulatedEngine, limit: int, ticks: int = 400) -> float:
    for _ in range(ticks // 2):
        engine.tick(limit)
    before = engine.done
    for _ in range(ticks // 2):
        engine.tick(limit)
    return (engine.done - before) / (ticks // 2)


loads = st.builds(
    EngineLoad,
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    kv_use=st.floats(0, 1),
    retracted=st.integers(0, 3),
)
engines = st.builds(
    SimulatedEngine,
    memory=st.integers(20_000, 150_000),
    max_running=st.integers(16, 250),
    lengths=st.tuples(st.integers(50, 400), st.integers(401, 2_000)),
    seed=st.integers(0, 5),
)


def again(engine: SimulatedEngine, **changes) -> SimulatedEngine:
    """The same engine, before anything has happened to it."""
    return replace(engine, running=[], waiting=deque(), done=0, lost=0, debt=0.0, **changes)


# ---- any observations


@given(
    st.integers(1, 500),
    st.integers(1, 50),
    st.lists(st.tuples(st.lists(loads, max_size=3), st.integers(0, 600)), max_size=60),
)
def test_the_limit_stays_within_its_bounds_whatever_is_observed(maximum, minimum, observations):
    controller = ConcurrencyController(maximum=maximum, minimum=minimum)
    for seen, in_use in observations:
        controller.observe(seen, in_use)
        assert min(minimum, maximum) <= controller.limit <= maximum


@given(st.integers(20, 300), st.floats(KV_FREE, KV_FULL), st.integers(1, 100))
def test_in_the_band_between_free_and_full_memory_nothing_changes(n, kv_use, observations):
    controller = ConcurrencyController(maximum=n)
    controller.observe([EngineLoad(n, 0, 0.99)], in_use=n)
    limit = controller.limit
    for _ in range(observations):
        controller.observe([EngineLoad(limit, 0, kv_use)], in_use=limit)
    assert controller.limit == limit


def test_no_step_of_growth_crosses_the_band_and_a_cut_leads_below_it():
    assert KV_FREE * (1 + 1 / GROW) < KV_FULL
    assert KV_FULL * CUT < KV_FREE < KV_FULL * CUT * (1 + 1 / GROW)


# ---- one reaction at a time


def calm(controller: ConcurrencyController, observations: int, in_use: int | None = None) -> list[int]:
    limits = []
    for _ in range(observations):
        n = controller.limit if in_use is None else in_use
        controller.observe([EngineLoad(n, 0, 0.3)], in_use=n)
        limits.append(controller.limit)
    return limits


def cut_once(maximum: int = 160) -> ConcurrencyController:
    controller = ConcurrencyController(maximum=maximum)
    controller.observe([EngineLoad(maximum, 0, 0.99)], in_use=maximum)
    return controller


@pytest.mark.parametrize(
    "load", [EngineLoad(100, 0, 0.96), EngineLoad(100, 0, 0.5, retracted=1)], ids=["full", "retracted"]
)
def test_memory_pressure_on_one_engine_cuts_at_once(load):
    controller = CountsCuts(maximum=200)
    controller.observe([EngineLoad(100, 0, 0.1), load], in_use=200)
    assert (controller.limit, controller.cuts) == (160, 1)


def test_a_cut_is_of_what_is_in_use_where_that_is_less_than_the_limit():
    controller = ConcurrencyController(maximum=500)
    controller.observe([EngineLoad(100, 0, 0.99)], in_use=100)
    assert controller.limit == 80


def test_a_cut_is_not_repeated_before_it_can_have_shown_what_it_does():
    controller = cut_once(160)
    for in_use in (160, 150, 140, 129, 128, 128):
        controller.observe([EngineLoad(in_use, 0, 0.99)], in_use=in_use)
        assert controller.limit == 128
    controller.observe([EngineLoad(128, 0, 0.99)], in_use=128)
    assert controller.limit == 102


def test_a_queue_that_lasts_is_trimmed_by_its_length_once():
    controller = ConcurrencyController(maximum=200)
    for n, _ in enumerate(range(6), start=1):
        controller.observe([EngineLoad(64, 136, 0.5)], in_use=200)
        assert controller.limit == (200 if n < PATIENCE else 68), "64 running and a tolerated queue of 4"
    controller.observe([EngineLoad(64, 36, 0.5)], in_use=100)
    assert controller.limit == 68, "a queue that drains asks for nothing more"


@pytest.mark.parametrize("passes", ["by itself", "by an update"])
def test_a_queue_that_passes_is_left_alone(passes):
    controller = ConcurrencyController(maximum=200)
    for _ in range(5):
        for _ in range(PATIENCE - 1):
            controller.observe([EngineLoad(64, 136, 0.5)], in_use=200)
        if passes == "by itself":
            controller.observe([EngineLoad(200, 0, 0.5)], in_use=200)
        else:
            controller.disturbed()
    assert controller.limit == 200


def test_calm_lets_the_limit_grow_in_small_steps_up_to_just_below_where_pressure_came_from():
    controller = cut_once(160)
    limits = [128, *calm(controller, 5 * PATIENCE)]
    assert limits[-1] == 150
    assert all(0 <= later - earlier <= earlier // GROW for earlier, later in pairwise(limits))
    assert sum(later != earlier for earlier, later in pairwise(limits)) <= len(limits) // PATIENCE


def test_after_a_long_calm_the_old_ceiling_is_tried_again():
    controller = cut_once(160)
    assert max(calm(controller, 20)) == 150
    assert calm(controller, 2 * FORGET)[-1] == 160


def test_calm_without_enough_work_lets_nothing_grow():
    controller = cut_once(160)
    assert set(calm(controller, 100, in_use=100)) == {128}


def test_without_an_observation_nothing_happens():
    controller = ConcurrencyController(maximum=10)
    for _ in range(100):
        controller.observe([], in_use=50)
    assert controller.limit == 10


def test_the_minimum_gives_way_to_a_smaller_maximum():
    controller = ConcurrencyController(maximum=MINIMUM - 1)
    controller.observe([EngineLoad(1, 0, 1.0)], in_use=1)
    assert controller.limit == MINIMUM - 1


# ---- against the simulated engine


@tries(10)
@given(engines)
def test_it_converges_to_nearly_the_throughput_of_the_best_fixed_limit(engine):
    controller = ConcurrencyController(maximum=250)
    drive(engine, controller, 700)
    before = engine.done
    drive(engine, controller, 700)
    rate = (engine.done - before) / 700
    candidates = (8, 16, 32, 64, 96, 128, 192, 250)
    best = max(throughput(again(engine), limit) for limit in candidates)
    assert rate > 0.75 * best, (rate, best, controller.limit)


@tries(10)
@given(engines)
def test_in_a_steady_state_pressure_is_the_exception(engine):
    controller = CountsCuts(maximum=250)
    drive(engine, controller, 700)
    cuts, retracted = controller.cuts, engine.lost
    drive(engine, controller, 700)
    assert controller.cuts - cuts <= 700 / FORGET
    always_full = again(engine)
    for _ in range(700):
        always_full.tick(250)
    assert engine.lost - retracted <= 0.5 * always_full.lost + 0.1 * engine.memory


@tries(10)
@given(st.integers(32, 200), st.integers(0, 5))
def test_where_only_the_number_of_running_requests_binds_the_limit_settles_on_it(max_running, seed):
    engine = SimulatedEngine(10**9, max_running, (50, 2000), seed=seed)
    limits = drive(engine, ConcurrencyController(maximum=250), 600)
    assert len(set(limits[-200:])) == 1
    assert max_running <= limits[-1] <= max_running * 1.1


@tries(10)
@given(st.integers(60_000, 120_000), st.integers(0, 5))
def test_it_recovers_when_memory_is_short_for_a_while(memory, seed):
    engine = SimulatedEngine(memory, 250, (100, 2000), seed=seed)
    controller = ConcurrencyController(maximum=250)
    usual = drive(engine, controller, 500)[-200:]
    engine.memory = memory // 4
    short = drive(engine, controller, 500)[-200:]
    engine.memory = memory
    recovered = drive(engine, controller, 500)[-200:]
    assert max(short) < min(usual)
    assert sum(recovered) > 0.85 * sum(usual)
