"""The steps of a publication, with engines that only record the calls."""

import asyncio
import itertools
import json
import pickle
import time
import typing
from dataclasses import asdict

import pytest
import torch

from slipstream.bridge.engine.memory_reader import located
from slipstream.bridge.engine.orders import TAKE, Load, Order, RankAnswer, answer_key
from slipstream.bridge.engine.take import ORDER, decoded_order
from slipstream.bridge.group.store import put
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.endpoint import PAUSE
from slipstream.bridge.publish.publication import NoRoom, Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.transport.tensor import TensorTransport
from slipstream.configs.schema import WeightsConfig
from tests.unit.doubles import PutForward

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


class World:
    """A log of what the engines and the sender do."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.transport = TensorTransport(CPU)

    def did(self, step: str) -> list[tuple]:
        return [event for event in self.log if event[1] == step]

    def names(self, step: str) -> list[str]:
        return [event[0] for event in self.did(step)]


class FakeEngine:
    """``misbehaves``: by step, an exception to raise, "hangs", or a delay in seconds."""

    def __init__(
        self, world: World, name: str, ranks: int = 1, address: str | None = None, **misbehaves
    ) -> None:
        self.name, self.ranks, self.address = name, ranks, address or name
        self._world, self._misbehaves = world, misbehaves

    async def _do(self, step: str, *details) -> None:
        self._world.log.append((self.name, step, *details))
        trouble = self._misbehaves.get(step)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble == "hangs":
            for _ in range(100):  # the others have answered by then
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, PutForward)
            loop.forward_s += 2 * TIMEOUT_S
            await asyncio.sleep(1000)
        elif callable(trouble):
            await trouble()
        elif trouble is not None:
            await asyncio.sleep(trouble)

    async def respond(self):
        await self._do("ask")

    async def pause(self, mode):
        await self._do("pause", mode)

    async def begin_update(self):
        await self._do("begin")

    async def take(self, handles, *, load_format, version):
        assert len(handles) == self.ranks
        assert (load_format, version) == (TAKE, None)
        orders = [decoded_order(dict(pickle.loads(handle))[ORDER]) for handle in handles]
        loads = isinstance(orders[0], Load)
        await self._do("take" if loads else "locate")
        await asyncio.to_thread(self._answer, orders)
        if loads:
            self._world.log.append((self.name, "taken"))

    def _answer(self, orders: list[Order]) -> None:
        for rank, order in enumerate(orders):
            put(self._world.transport._store, answer_key(order, rank), RankAnswer(place=located(CPU)))

    async def end_update(self):
        await self._do("end")

    async def rename_version(self, version):
        await self._do("stamp", version)

    async def resume(self):
        await self._do("resume")


@pytest.fixture
def world() -> World:
    return World()


def publisher(world, interrupt="retract") -> Publisher:
    return Publisher(world.transport, interrupt=interrupt, timeouts=Timeouts(TIMEOUT_S, TIMEOUT_S))


class FakeExport:
    """An iterator over n buckets that records whether it was exhausted."""

    def __init__(self, world: World, n: int = 3, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self._world, self._n, self._seconds, self._fails_at = world, n, seconds, fails_at
        self.exhausted = False
        self._buckets = self._make()

    def _make(self):
        for i in range(self._n):
            self._world.log.append(("sender", "gather", i))
            time.sleep(self._seconds)
            if i == self._fails_at:
                raise RuntimeError("a trainer rank is gone")
            yield FlatBucket((f"w{i}",), ((4,),), torch.zeros(4, dtype=torch.bfloat16), i == self._n - 1)
        self.exhausted = True

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._buckets)


def publish(publisher, version, engines, buckets):
    with asyncio.Runner(loop_factory=PutForward) as runner:
        return runner.run(publisher.publish(version, engines, buckets))


def test_the_steps_of_a_publication_happen_in_order(world):
    report = publish(publisher(world), 7, [FakeEngine(world, "a")], FakeExport(world))
    assert [event for event in world.log if event[0] == "a" and event[1] != "taken"] == [
        ("a", "ask"),
        ("a", "pause", "retract"),
        ("a", "begin"),
        ("a", "locate"),
        ("a", "take"),
        ("a", "take"),
        ("a", "take"),
        ("a", "end"),
        ("a", "stamp", 7),
        ("a", "resume"),
    ]
    assert (report.version, report.updated, report.failed, report.bytes_sent) == (7, ["a"], {}, 24)
    steps = ["ask", "gather", "pause", "begin", "locate", "send", "end", "stamp", "resume"]
    assert list(report.parts_s) == steps
    assert json.loads(json.dumps(asdict(report)))["ways"] == {"shared": 1}, "the recorder writes it"
    stall = sum(report.parts_s[part] for part in steps[2:])
    assert stall <= report.stall_s <= report.total_s
    assert report.total_s >= sum(report.parts_s.values())


@pytest.mark.parametrize(
    ("interrupt", "pause"), [("in_place", "in_place"), ("abort", "abort"), ("drain", "retract")]
)
def test_the_interrupt_says_how_engines_are_paused(world, interrupt, pause):
    publish(publisher(world, interrupt), 1, [FakeEngine(world, "a")], FakeExport(world))
    assert world.did("pause") == [("a", "pause", pause)]


def test_every_interrupt_of_a_recipe_has_a_pause():
    assert set(typing.get_args(WeightsConfig.model_fields["interrupt"].annotation)) == set(PAUSE)


def test_the_first_bucket_is_gathered_before_the_pause_and_the_next_while_one_is_sent(world):
    next_bucket = itertools.count(1)

    async def until_the_next_is_gathered() -> None:
        known = min(next(next_bucket) + 1, 3)
        while len(world.did("gather")) < known:
            await asyncio.sleep(0.001)

    publish(publisher(world), 1, [FakeEngine(world, "a", take=until_the_next_is_gathered)], FakeExport(world))
    order = [event[1] for event in world.log]
    gathers = [i for i, step in enumerate(order) if step == "gather"]
    taken = [i for i, step in enumerate(order) if step == "taken"]
    assert gathers[0] < order.index("pause") < gathers[1] < taken[0]
    assert taken[0] < gathers[2] < taken[1]


@pytest.mark.parametrize("trouble", [RuntimeError("HTTP 500"), "hangs"], ids=["refuses", "hangs"])
@pytest.mark.parametrize("step", ["pause", "begin"])
def test_an_engine_that_is_lost_before_the_weights_are_sent_drops_out_and_the_others_go_on(
    world, step, trouble
):
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b", **{step: trouble}), FakeEngine(world, "c")]
    buckets = FakeExport(world)
    report = publish(publisher(world), 1, engines, buckets)
    assert report.updated == ["a", "c"]
    assert report.failed.keys() == {"b"}
    assert report.failed["b"].startswith(f"{step} for version 1: ")
    assert ("no answer in" if trouble == "hangs" else "RuntimeError: HTTP 500") in report.failed["b"]
    assert world.names("resume") == world.names("end") == ["a", "c"]
    assert "b" not in world.names("take")
    assert buckets.exhausted


@pytest.mark.parametrize("trouble", [ConnectionError("gone"), "hangs"], ids=["is gone", "hangs"])
def test_nobody_stands_still_for_an_engine_that_does_not_answer(world, trouble):
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b", ask=trouble), FakeEngine(world, "c")]
    report = publish(publisher(world), 1, engines, FakeExport(world))
    assert report.updated == ["a", "c"]
    assert report.failed.keys() == {"b"}
    assert world.names("pause") == ["a", "c"]
    assert sorted(set(world.names("take"))) == ["a", "c"]


@pytest.mark.parametrize("step", ["end", "resume"])
def test_an_engine_that_is_lost_after_the_weights_were_sent_does_not_count_as_updated(world, step):
    engines = [FakeEngine(world, "a", **{step: ConnectionError("gone")}), FakeEngine(world, "b")]
    report = publish(publisher(world), 3, engines, FakeExport(world))
    assert report.updated == ["b"]
    assert report.failed == {"a": f"{step} for version 3: ConnectionError: gone"}
    assert world.names("resume") == (["b"] if step == "end" else ["a", "b"])


@pytest.mark.parametrize("step", ["ask", "pause", "begin"])
def test_the_buckets_are_exhausted_when_no_engine_is_left(world, step):
    buckets = FakeExport(world)
    report = publish(publisher(world), 1, [FakeEngine(world, "a", **{step: RuntimeError("x")})], buckets)
    assert report.updated == []
    assert world.did("take") == []
    assert buckets.exhausted


@pytest.mark.parametrize("step", ["ask", "pause", "begin", "locate", "take", "end", "stamp", "resume"])
def test_the_report_tells_a_failure_of_the_transport_from_one_of_the_engine(world, step):
    engine = FakeEngine(world, "a", **{step: RuntimeError("broken")})
    report = publish(publisher(world), 1, [engine, FakeEngine(world, "b")], FakeExport(world))
    assert report.cut_off == (["a"] if step in ("begin", "locate", "take", "end", "stamp") else [])


def test_without_engines_the_buckets_are_exhausted_and_nothing_else_happens(world):
    buckets = FakeExport(world)
    report = publish(publisher(world), 1, [], buckets)
    assert (report.updated, report.failed, report.bytes_sent) == ([], {}, 0)
    assert {event[1] for event in world.log} == {"gather"}
    assert buckets.exhausted


def test_the_stall_is_the_time_from_the_first_pause_to_the_last_resume(world):
    engine = FakeEngine(world, "a", ask=0.1, pause=0.05, take=0.02, resume=0.05)
    report = publish(publisher(world), 1, [engine], FakeExport(world, n=2))
    assert 0.14 <= report.stall_s < report.total_s - 0.09


def test_a_bucket_that_cannot_be_gathered_fails_the_publication_with_its_own_error(world):
    engine = FakeEngine(world, "a", take=0.1)
    with pytest.raises(RuntimeError, match="a trainer rank is gone"):
        publish(publisher(world), 1, [engine], FakeExport(world, fails_at=1))


def test_a_cancelled_publication_exhausts_the_buckets_although_one_is_being_gathered(world):
    buckets = FakeExport(world, n=4, seconds=0.1)

    async def cancelled() -> None:
        task = asyncio.ensure_future(publisher(world).publish(1, [FakeEngine(world, "a")], buckets))
        while len(world.did("gather")) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert buckets.exhausted


def test_every_combination_of_one_failure_leaves_each_engine_updated_or_failed(world):
    steps = ["ask", "pause", "begin", "locate", "take", "end", "stamp", "resume"]
    for step, position in itertools.product(steps, range(3)):
        engines = [
            FakeEngine(
                world, n, 1, f"{n} {step} {position}", **({step: RuntimeError("x")} if i == position else {})
            )
            for i, n in enumerate("abc")
        ]
        buckets = FakeExport(world, n=2)
        report = publish(publisher(world), 1, engines, buckets)
        assert buckets.exhausted
        assert sorted([*report.updated, *report.failed]) == ["a", "b", "c"]
        assert list(report.failed) == ["abc"[position]]


def test_a_version_for_which_there_is_no_room_reaches_no_engine_and_says_so(world):
    class Full:
        async def prepare(self, publication, buckets):
            raise NoRoom("make room in /versions")

        async def update(self, publication, buckets):
            raise AssertionError

    exported = []
    buckets = (exported.append(number) for number in range(3))
    full = Publisher(Full(), interrupt="retract", timeouts=Timeouts(TIMEOUT_S, TIMEOUT_S))
    report = asyncio.run(full.publish(4, [FakeEngine(world, "a")], buckets))
    assert (report.no_room, report.updated, report.failed) == ("make room in /versions", [], {})
    assert [step for _, step, *_ in world.log] == ["ask"]
    assert exported == [0, 1, 2], "the other ranks have sent their shards"
