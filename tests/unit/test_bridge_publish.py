"""The steps of a publication, with engines and a process group that only record the calls."""

import asyncio
import itertools
import threading
import time
import typing

import pytest
import torch

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.endpoint import PAUSE
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.transport import engine_group
from slipstream.bridge.transport.distributed import DistributedTransport
from slipstream.configs.schema import WeightsConfig

TIMEOUT_S = 0.3


class World:
    """A log of what the engines and the sender do, and their rendezvous."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.rendezvous: dict[int, FakeRendezvous] = {}
        self.broadcast_fails = False

    def did(self, step: str) -> list[tuple]:
        return [event for event in self.log if event[1] == step]

    def names(self, step: str) -> list[str]:
        return [event[0] for event in self.did(step)]


class FakeRendezvous:
    """Complete when all ranks have arrived; like gloo's, it makes early ranks wait."""

    def __init__(self, world: World, world_size: int) -> None:
        self.world_size = world_size
        self.port = len(world.rendezvous) + 1
        self.present = 0
        self.closed = threading.Event()
        self.complete = threading.Event()
        world.rendezvous[self.port] = self

    def arrive(self, ranks: int) -> None:
        self.present += ranks
        if self.present == self.world_size:
            self.complete.set()

    def close(self) -> None:
        self.closed.set()


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
            await asyncio.sleep(60)
        elif trouble is not None:
            await asyncio.sleep(trouble)

    async def join_group(self, *, address, port, rank_offset, world_size, group, backend):
        await self._do("join", group, rank_offset, world_size)
        rendezvous = self._world.rendezvous[port]
        rendezvous.arrive(self.ranks)
        while not rendezvous.complete.is_set():
            if rendezvous.closed.is_set():
                raise ConnectionResetError("the rendezvous was closed")
            await asyncio.sleep(0.001)

    async def leave_group(self, group):
        await self._do("leave", group)

    async def respond(self):
        await self._do("ask")

    async def pause(self, mode):
        await self._do("pause", mode)

    async def begin_update(self):
        await self._do("begin")

    async def receive(self, *, names, shapes, dtype, group, flush_cache, version):
        await self._do("receive", tuple(names), dtype, flush_cache, version)
        self._world.log.append((self.name, "received"))

    async def end_update(self):
        await self._do("end")

    async def resume(self):
        await self._do("resume")


@pytest.fixture
def world(monkeypatch) -> World:
    world = World()

    class FakeGroup:
        def __init__(self, backend, rendezvous, name, timeout_s) -> None:
            self.name = name
            rendezvous.arrive(1)
            end = time.monotonic() + timeout_s
            while not rendezvous.complete.is_set():
                if rendezvous.closed.is_set() or time.monotonic() > end:
                    raise ConnectionResetError("the store is gone")
                time.sleep(0.001)

        def send(self, flat) -> None:
            world.log.append(("sender", "send", flat.numel()))
            if world.broadcast_fails:
                raise RuntimeError("connection closed by peer")

        def close(self) -> None:
            world.log.append(("sender", "close", self.name))

    monkeypatch.setattr(engine_group, "BroadcastGroup", FakeGroup)
    monkeypatch.setattr(
        engine_group,
        "Rendezvous",
        lambda address, size, timeout_s: FakeRendezvous(world, size),
    )
    return world


def publisher(interrupt="retract", timeout_s=TIMEOUT_S) -> Publisher:
    timeouts = Timeouts(timeout_s, timeout_s)
    transport = DistributedTransport(
        address="127.0.0.1", backend="gloo", timeouts=timeouts, label="slipstream-weights"
    )
    return Publisher(transport, interrupt=interrupt, timeouts=timeouts)


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
    return asyncio.run(publisher.publish(version, engines, buckets))


def test_the_steps_of_a_publication_happen_in_order(world):
    report = publish(publisher(), 7, [FakeEngine(world, "a")], FakeExport(world))
    assert [event for event in world.log if event[0] == "a" and event[1] != "received"] == [
        ("a", "ask"),
        ("a", "join", "slipstream-weights-1", 1, 2),
        ("a", "pause", "retract"),
        ("a", "begin"),
        ("a", "receive", ("w0",), "bfloat16", False, None),
        ("a", "receive", ("w1",), "bfloat16", False, None),
        ("a", "receive", ("w2",), "bfloat16", True, 7),
        ("a", "end"),
        ("a", "resume"),
    ]
    assert (report.version, report.updated, report.failed, report.bytes_sent) == (7, ["a"], {}, 24)
    assert list(report.parts_s) == ["ask", "gather", "join", "pause", "begin", "send", "end", "resume"]
    stall = sum(report.parts_s[part] for part in ("pause", "begin", "send", "end", "resume"))
    assert report.stall_s == pytest.approx(stall, rel=0.1, abs=0.05)
    assert report.total_s >= sum(report.parts_s.values())
    assert len(world.did("send")) == 3


def test_in_place_updates_keep_the_cache(world):
    publish(publisher("in_place"), 1, [FakeEngine(world, "a")], FakeExport(world))
    assert world.did("pause") == [("a", "pause", "in_place")]
    assert [event[4] for event in world.did("receive")] == [False, False, False]


@pytest.mark.parametrize(("interrupt", "pause"), [("abort", "abort"), ("drain", "retract")])
def test_updates_that_keep_no_request_flush_the_cache(world, interrupt, pause):
    publish(publisher(interrupt), 1, [FakeEngine(world, "a")], FakeExport(world))
    assert world.did("pause") == [("a", "pause", pause)]
    assert [event[4] for event in world.did("receive")] == [False, False, True]


def test_every_interrupt_of_a_recipe_has_a_pause():
    assert set(typing.get_args(WeightsConfig.model_fields["interrupt"].annotation)) == set(PAUSE)


def test_the_first_bucket_is_gathered_before_the_pause_and_the_next_while_one_is_sent(world):
    publish(publisher(), 1, [FakeEngine(world, "a", receive=0.05)], FakeExport(world))
    order = [event[1] for event in world.log]
    gathers = [i for i, step in enumerate(order) if step == "gather"]
    received = [i for i, step in enumerate(order) if step == "received"]
    assert gathers[0] < order.index("join") < order.index("pause") < gathers[1] < received[0]
    assert received[0] < gathers[2] < received[1]


def test_engines_of_several_ranks_get_consecutive_places_in_the_group(world):
    publish(
        publisher(), 1, [FakeEngine(world, "a", ranks=2), FakeEngine(world, "b", ranks=3)], FakeExport(world)
    )
    assert [event[3:] for event in world.did("join")] == [(1, 6), (3, 6)]


@pytest.mark.parametrize("trouble", [RuntimeError("HTTP 500"), "hangs"], ids=["refuses", "hangs"])
@pytest.mark.parametrize("step", ["pause", "begin"])
def test_an_engine_that_is_lost_before_the_weights_are_sent_drops_out_and_the_others_go_on(
    world, step, trouble
):
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b", **{step: trouble}), FakeEngine(world, "c")]
    buckets = FakeExport(world)
    report = publish(publisher(), 1, engines, buckets)
    assert report.updated == ["a", "c"]
    assert report.failed.keys() == {"b"}
    assert report.failed["b"].startswith(f"{step} for version 1: ")
    assert ("no answer in" if trouble == "hangs" else "RuntimeError: HTTP 500") in report.failed["b"]
    assert world.names("resume") == world.names("end") == ["a", "c"]
    assert "b" not in world.names("receive")
    assert [event[4] for event in world.did("join")] == [4, 4, 4, 3, 3]
    assert world.names("leave") == ["a", "c"]
    assert buckets.exhausted


@pytest.mark.parametrize("trouble", [ConnectionError("gone"), "hangs"], ids=["is gone", "hangs"])
def test_nobody_stands_still_for_an_engine_that_does_not_answer(world, trouble):
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b", ask=trouble), FakeEngine(world, "c")]
    report = publish(publisher(), 1, engines, FakeExport(world))
    assert report.updated == ["a", "c"]
    assert report.failed.keys() == {"b"}
    assert world.names("pause") == world.names("receive")[::3] == ["a", "c"]
    assert [event[4] for event in world.did("join")] == [3, 3], "the group is formed without it"


def test_an_engine_that_refuses_to_join_does_not_keep_the_others_waiting(world):
    engines = [
        FakeEngine(world, "a"),
        FakeEngine(world, "b", join=RuntimeError("HTTP 500")),
        FakeEngine(world, "c"),
    ]
    start = time.monotonic()
    report = publish(publisher(timeout_s=30), 1, engines, FakeExport(world))
    assert time.monotonic() - start < 5
    assert report.updated == ["a", "c"]
    assert report.failed == {"b": "join for version 1: RuntimeError: HTTP 500"}
    assert world.names("pause") == world.names("resume") == ["a", "c"]


def test_if_no_engine_refuses_and_the_group_does_not_form_engines_without_an_answer_drop_out(world):
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b", join="hangs")]
    buckets = FakeExport(world)
    report = publish(publisher(), 1, engines, buckets)
    assert report.updated == []
    assert report.failed.keys() == {"a", "b"}
    assert "pause" not in [event[1] for event in world.log]
    assert buckets.exhausted


@pytest.mark.parametrize("step", ["end", "resume"])
def test_an_engine_that_is_lost_after_the_weights_were_sent_does_not_count_as_updated(world, step):
    engines = [FakeEngine(world, "a", **{step: ConnectionError("gone")}), FakeEngine(world, "b")]
    report = publish(publisher(), 3, engines, FakeExport(world))
    assert report.updated == ["b"]
    assert report.failed == {"a": f"{step} for version 3: ConnectionError: gone"}
    assert world.names("resume") == (["b"] if step == "end" else ["a", "b"])


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (ValueError("bad shape"), "ValueError: bad shape"),
        (ConnectionResetError("gone"), "ConnectionResetError: gone"),
        ("hangs", "no answer; a weight bucket was not received in 0.3 s"),
    ],
    ids=["refuses", "is gone", "hangs"],
)
def test_one_engine_is_to_blame_for_a_broken_broadcast_and_the_others_may_get_everything_again(
    world, trouble, reason
):
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b", receive=trouble), FakeEngine(world, "c")]
    buckets = FakeExport(world)
    publishing = publisher()
    report = publish(publishing, 1, engines, buckets)
    assert report.failed == {"b": f"send for version 1: {reason}"}
    assert report.interrupted.keys() == {"a", "c"}
    assert report.updated == []
    assert world.names("resume") == []
    assert world.names("end") == ["a", "c"]  # so that the next update can begin
    assert len(world.did("send")) <= 1
    assert report.bytes_sent == 0
    assert buckets.exhausted
    again = publish(publishing, 1, [engines[0], engines[2]], FakeExport(world))
    both = report.merged(again)
    assert both.updated == ["a", "c"]
    assert both.failed.keys() == {"b"}
    assert both.stall_s == pytest.approx(report.stall_s + again.stall_s)


def test_an_engine_that_refuses_because_another_is_gone_is_not_to_blame(world):
    """gloo reports a dead engine to the other engines, perhaps before the sender notices."""
    refusal = RuntimeError("Failed to receive weights: connection closed by peer")
    engines = [
        FakeEngine(world, "a", receive=refusal),
        FakeEngine(world, "b", receive="hangs"),
        FakeEngine(world, "c", receive=refusal),
    ]
    report = publish(publisher(), 1, engines, FakeExport(world))
    assert report.failed.keys() == {"b"}
    assert report.interrupted.keys() == {"a", "c"}


def test_a_broadcast_that_fails_at_the_sender_alone_is_no_engines_fault(world):
    world.broadcast_fails = True
    publishing = publisher()
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b")]
    report = publish(publishing, 1, engines, FakeExport(world))
    assert (report.updated, report.failed) == ([], {})
    assert report.interrupted["a"] == "send for version 1: RuntimeError: connection closed by peer"
    again = publish(publishing, 1, engines, FakeExport(world))
    assert report.merged(again).failed.keys() == {"a", "b"}  # there is no third attempt


def test_after_a_broken_transfer_the_next_publication_makes_a_new_group(world):
    publishing = publisher()
    broken = [FakeEngine(world, "a", receive=RuntimeError("x"))]
    assert publish(publishing, 1, broken, FakeExport(world)).updated == []
    assert publish(publishing, 1, [FakeEngine(world, "a", address="new")], FakeExport(world)).updated == ["a"]
    assert [event[2] for event in world.did("join")] == ["slipstream-weights-1", "slipstream-weights-2"]
    assert world.names("leave") == []


def test_the_group_stays_while_its_members_do_in_any_order(world):
    publishing = publisher()
    engines = [FakeEngine(world, "a"), FakeEngine(world, "b")]
    for version, order in enumerate((engines, engines[::-1], engines), start=1):
        assert sorted(publish(publishing, version, order, FakeExport(world)).updated) == ["a", "b"]
    assert len(world.did("join")) == 2
    assert world.did("close") == []


def test_a_change_of_members_makes_a_new_group_and_members_leave_the_old_one(world):
    publishing = publisher()
    a, b = FakeEngine(world, "a"), FakeEngine(world, "b")
    publish(publishing, 1, [a], FakeExport(world))
    publish(publishing, 2, [a, b], FakeExport(world))
    assert world.did("leave") == [("a", "leave", "slipstream-weights-1")]
    assert world.did("close") == [("sender", "close", "slipstream-weights-1")]
    assert [event[:3] for event in world.did("join")[1:]] == [
        ("a", "join", "slipstream-weights-2"),
        ("b", "join", "slipstream-weights-2"),
    ]


def test_an_engine_that_restarted_under_its_name_joins_again(world):
    publishing = publisher()
    publish(publishing, 1, [FakeEngine(world, "a", address="a:1")], FakeExport(world))
    report = publish(publishing, 1, [FakeEngine(world, "a", address="a:2")], FakeExport(world))
    assert report.updated == ["a"]
    assert len(world.did("join")) == 2
    assert world.names("leave") == []


def test_an_engine_that_missed_a_publication_leaves_its_old_group_when_it_is_back(world):
    publishing = publisher()
    a, b = FakeEngine(world, "a"), FakeEngine(world, "b", address="b:1")
    b_again = FakeEngine(world, "b", address="b:2")
    publish(publishing, 1, [a, b], FakeExport(world))
    publish(publishing, 1, [b_again], FakeExport(world))
    publish(publishing, 2, [a, b_again], FakeExport(world))
    assert sorted(world.did("leave")) == [
        ("a", "leave", "slipstream-weights-1"),
        ("b", "leave", "slipstream-weights-2"),
    ]


def test_an_engine_that_does_not_leave_an_old_group_still_joins_the_new_one(world):
    publishing = publisher()
    a, b = FakeEngine(world, "a", leave=RuntimeError("no such group")), FakeEngine(world, "b", leave="hangs")
    publish(publishing, 1, [a, b], FakeExport(world))
    report = publish(publishing, 2, [a, b, FakeEngine(world, "c")], FakeExport(world))
    assert report.updated == ["a", "b", "c"]


@pytest.mark.parametrize("step", ["join", "pause", "begin"])
def test_the_buckets_are_exhausted_when_no_engine_is_left(world, step):
    buckets = FakeExport(world)
    report = publish(publisher(), 1, [FakeEngine(world, "a", **{step: RuntimeError("x")})], buckets)
    assert report.updated == []
    assert world.did("send") == []
    assert buckets.exhausted


def test_without_engines_the_buckets_are_exhausted_and_nothing_else_happens(world):
    buckets = FakeExport(world)
    report = publish(publisher(), 1, [], buckets)
    assert (report.updated, report.failed, report.bytes_sent) == ([], {}, 0)
    assert {event[1] for event in world.log} == {"gather"}
    assert buckets.exhausted


def test_the_stall_is_the_time_from_the_first_pause_to_the_last_resume(world):
    engine = FakeEngine(world, "a", join=0.1, pause=0.05, receive=0.02, resume=0.05)
    report = publish(publisher(), 1, [engine], FakeExport(world, n=2))
    assert 0.14 <= report.stall_s < report.total_s - 0.09


def test_a_bucket_that_cannot_be_gathered_fails_the_publication_with_its_own_error(world):
    engine = FakeEngine(world, "a", receive=0.1)
    with pytest.raises(RuntimeError, match="a trainer rank is gone"):
        publish(publisher(), 1, [engine], FakeExport(world, fails_at=1))


def test_a_cancelled_publication_exhausts_the_buckets_although_one_is_being_gathered(world):
    buckets = FakeExport(world, n=4, seconds=0.1)

    async def cancelled() -> None:
        task = asyncio.ensure_future(publisher().publish(1, [FakeEngine(world, "a")], buckets))
        while len(world.did("gather")) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert buckets.exhausted


def test_every_combination_of_one_failure_leaves_each_engine_updated_interrupted_or_failed(world):
    steps = ["join", "pause", "begin", "receive", "end", "resume"]
    for step, position in itertools.product(steps, range(3)):
        engines = [
            FakeEngine(world, n, **({step: RuntimeError("x")} if i == position else {}))
            for i, n in enumerate("abc")
        ]
        buckets = FakeExport(world, n=2)
        report = publish(publisher(), 1, engines, buckets)
        assert buckets.exhausted
        assert sorted([*report.updated, *report.failed, *report.interrupted]) == ["a", "b", "c"]
        assert list(report.failed) == ["abc"[position]]
        assert len(report.interrupted) == (2 if step == "receive" else 0)
