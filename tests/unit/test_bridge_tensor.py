"""Whole tensors through memory of the trainer, between processes: what arrives, and what failures cost."""

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from slipstream.bridge.engine.memory_reader import located
from slipstream.bridge.engine.orders import DevicePlace, Load, Locate, RankAnswer, answer_key
from slipstream.bridge.engine.take import ORDER, decoded_order
from slipstream.bridge.group import memory
from slipstream.bridge.group.handles import DeviceHandle
from slipstream.bridge.group.memory import MappedMemory
from slipstream.bridge.group.store import put
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.transport.tensor import TensorTransport
from tests.ports import held_port
from tests.ranks import run_ranks
from tests.shard_engine import ShardEngine
from tests.unit.test_bridge_memory import StandIn, named_memory

SHAPES = {"a.norm": (6,), "a.weight": (8, 3), "b.weight": (40, 5), "c.weight": (4, 4)}
BUCKETS = (("a.norm", "a.weight"), ("b.weight",), ("c.weight",))
CPU = torch.device("cpu")
PATIENCE_S = 120
PATIENT = Timeouts(PATIENCE_S, PATIENCE_S)


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def buckets_of(version: int) -> Iterator[FlatBucket]:
    """As the export does, make the bucket after the next in the same memory."""
    tensors, spaces = tensors_of(version), (torch.empty(300), torch.empty(300))
    for number, names in enumerate(BUCKETS):
        content = torch.cat([tensors[name].flatten() for name in names])
        flat = spaces[number % 2][: len(content)].copy_(content)
        yield FlatBucket(names, tuple(SHAPES[name] for name in names), flat, number == len(BUCKETS) - 1)


def assert_holds(engine: ShardEngine, version: int) -> None:
    for name, tensor in tensors_of(version).items():
        parts = [torch.from_numpy(rank[name]) for rank in engine.weights()]
        whole = torch.cat(parts) if tensor.dim() > 1 else parts[0]
        assert torch.equal(whole.to(torch.float32), tensor), name


def started(*engines: ShardEngine) -> tuple[ShardEngine, ...]:
    for engine in engines:
        engine.wait()
    return engines


def publish(publisher: Publisher, version: int, engines, buckets=None):
    return asyncio.run(publisher.publish(version, engines, buckets or buckets_of(version)))


def memory_of(pid: int) -> set[str]:
    """Names of the trainer's memory that a process has mapped or open."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split("memfd:")[1] for line in lines if "memfd:slipstream" in line}


def versions_arrive(rank) -> None:
    one, two = started(ShardEngine("one", SHAPES, 1, held_port()), ShardEngine("two", SHAPES, 2, held_port()))
    transport = TensorTransport(CPU)
    publisher = Publisher(transport, interrupt="retract", timeouts=PATIENT)
    try:
        for version in (1, 2, 3):
            report = publish(publisher, version, [one, two])
            assert (report.failed, report.updated) == ({}, ["one", "two"])
            assert report.bytes_sent == sum(tensor.nbytes for tensor in tensors_of(1).values())
            assert report.ways == {"shared": 3}
            assert ("locate" in report.parts_s) == (version == 1)
            for engine in (one, two):
                assert_holds(engine, version)
                assert engine.version == version
        assert len(transport._hosts) == 2
        for process in (*one.processes, *two.processes):
            assert len(memory_of(process.pid)) <= 2
        assert not named_memory(os.getpid())
    finally:
        one.close()
        two.close()


def test_every_version_arrives_bit_for_bit_in_engines_of_one_and_two_ranks():
    run_ranks(1, versions_arrive)


def one_fails(rank, trouble: str, ranks: int, timeouts: Timeouts) -> str:
    well, doomed = started(
        ShardEngine("well", SHAPES, 1, held_port()),
        ShardEngine("doomed", SHAPES, ranks, held_port(), trouble),
    )
    transport = TensorTransport(CPU)
    publisher = Publisher(transport, interrupt="retract", timeouts=timeouts)
    try:
        first = publish(publisher, 1, [well, doomed])
        assert first.updated == ["well"]
        assert_holds(well, 1)
        assert (well.version, doomed.version) == (1, 0), "a version that did not arrive is never stamped"
        second = publish(publisher, 2, [well])
        assert (second.updated, second.failed) == (["well"], {})
        assert_holds(well, 2)
        return first.failed["doomed"]
    finally:
        well.close()
        doomed.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [("dies", "send for version 1: ConnectionResetError"), ("refuses", "the loader does not know these")],
)
def test_an_engine_that_fails_in_a_bucket_costs_itself_alone(trouble, reason, ranks):
    [failure] = run_ranks(1, one_fails, trouble, ranks, PATIENT)
    assert reason in failure


def test_an_engine_that_stands_still_is_given_up_and_its_memory_never_filled_again():
    [failure] = run_ranks(1, memory_is_retired)
    assert failure.startswith("send for version 1: no answer in 12 s, since ")


def memory_is_retired(rank) -> str:
    well, doomed = started(
        ShardEngine("well", SHAPES, 1, held_port()), ShardEngine("doomed", SHAPES, 1, held_port(), "stops")
    )
    transport = TensorTransport(CPU)
    publisher = Publisher(transport, interrupt="retract", timeouts=Timeouts(12, 12))
    filled: list[int] = []
    fill = transport._fill_host

    def noted(flat):
        host = fill(flat)
        filled.append(id(host))
        kept.append(host)
        return host

    kept, transport._fill_host = [], noted
    try:
        first = publish(publisher, 1, [well, doomed])
        retired = filled[1]  # the bucket for which it has not answered
        assert publish(publisher, 2, [well]).updated == ["well"]
        assert retired not in filled[2:]
        assert_holds(well, 2)
        return first.failed["doomed"]
    finally:
        well.close()
        doomed.close()


def send_and_stop(engine: ShardEngine, sent) -> None:
    """Send one bucket of a version, and stay in the middle of it."""
    taken = threading.Event()
    take = engine.take

    async def noted(handles, *, load_format, version):
        await take(handles, load_format=load_format, version=version)
        if b"load" in pickle.loads(handles[0])[0][1].numpy().tobytes():
            taken.set()

    engine.take = noted

    def buckets():
        source = buckets_of(1)
        yield next(source)
        assert taken.wait(PATIENCE_S)
        sent.set()
        signal.pause()

    publish(Publisher(TensorTransport(CPU), interrupt="retract", timeouts=PATIENT), 1, [engine], buckets())


def sender_is_killed(rank) -> None:
    [engine] = started(ShardEngine("one", SHAPES, 1, held_port()))
    [pid] = [process.pid for process in engine.processes]
    context = get_context("fork")
    sent = context.Event()
    sender = context.Process(target=send_and_stop, args=(engine, sent))
    sender.start()
    try:
        assert sent.wait(PATIENCE_S)
        left = memory_of(pid)
        assert left
        sender.kill()
        sender.join()
        publisher = Publisher(TensorTransport(CPU), interrupt="retract", timeouts=PATIENT)
        assert publish(publisher, 2, [engine]).updated == ["one"]
        assert_holds(engine, 2)
        assert engine.version == 2
        assert not memory_of(pid) & left, "the memory of the killed sender is free"
        assert not named_memory(sender.pid)
    finally:
        sender.kill()
        engine.close()


def test_an_engine_goes_on_with_the_next_sender_after_one_was_killed_in_the_middle_of_a_version():
    run_ranks(1, sender_is_killed)


# ---- GPUs, with a stand-in for the calls of CUDA


class Reader:
    """An engine in this process, whose ranks say that they are on these GPUs."""

    def __init__(self, name: str, transport: TensorTransport, places: list[DevicePlace]) -> None:
        self.name = self.address = name
        self.ranks = len(places)
        self._transport, self._places = transport, places
        self.read: list[tuple[str, torch.Tensor]] = []
        self.versions: list[int] = []

    async def take(self, handles, *, load_format, version) -> None:
        for rank, handle in enumerate(handles):
            order = decoded_order(dict(pickle.loads(handle))[ORDER])
            if isinstance(order, Locate):
                answer = RankAnswer(place=self._places[rank])
            else:
                self.read.append(self._content(order))
                answer = RankAnswer()
            put(self._transport._store, answer_key(order, rank), answer)

    def _content(self, order: Load) -> tuple[str, torch.Tensor]:
        if not isinstance(order.memory, DeviceHandle):
            return "host", MappedMemory(order.memory, pinned=False).tensor[: order.size()].clone()
        content = torch.empty(order.size(), dtype=torch.uint8)
        memory.read_device(order.memory, content)
        return "gpu", content

    async def rename_version(self, version: int) -> None:
        self.versions.append(version)

    async def respond(self) -> None: ...
    async def pause(self, mode) -> None: ...
    async def resume(self) -> None: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...


@pytest.fixture
def cuda(tmp_path, monkeypatch) -> StandIn:
    stand_in = StandIn(tmp_path)
    monkeypatch.setattr(memory, "cuda_runtime", lambda: stand_in)
    return stand_in


def on_gpu(transport: TensorTransport, monkeypatch) -> DevicePlace:
    """Let the transport be one on a GPU; its buckets are on the CPU."""
    here = DevicePlace(located(CPU).node, "GPU-0")
    monkeypatch.setattr(transport, "_here", here)
    monkeypatch.setattr(transport, "_refused", False)
    return here


def test_ranks_read_the_gpu_that_they_can_open_and_the_others_memory_of_the_host(cuda, monkeypatch, caplog):
    caplog.set_level("INFO")
    transport = TensorTransport(CPU)
    here = on_gpu(transport, monkeypatch)
    other = DevicePlace(here.node, "GPU-1", refused="no peer access")
    engine = Reader("a", transport, [here, other])
    publisher = Publisher(transport, interrupt="retract", timeouts=PATIENT)
    for version in (1, 2):
        engine.read.clear()
        report = publish(publisher, version, [engine])
        assert (report.failed, report.ways) == ({}, {"cuda_ipc": 1, "pinned": 1})
        assert [way for way, _ in engine.read] == ["gpu", "host"] * len(BUCKETS)
        expected = [bucket.flat.clone() for bucket in buckets_of(version)]
        for number, flat in enumerate(expected):
            for _, content in engine.read[2 * number : 2 * number + 2]:
                assert torch.equal(content.view(torch.float32), flat)
        assert not cuda.held, "a trainer that rests keeps no memory of the GPU"
    assert engine.versions == [1, 2]
    said = [record.message for record in caplog.records if record.name.endswith("transport.tensor")]
    assert len(said) == 2, "each rank's way is said once"
    assert "rank 0 on the trainer's GPU" in said[0]
    assert "no peer access" in said[1]


def test_a_gpu_without_room_for_a_bucket_sends_through_memory_of_the_host(cuda, monkeypatch, caplog):
    transport = TensorTransport(CPU)
    here = on_gpu(transport, monkeypatch)
    cuda.room = 200  # the first bucket has 120 bytes, the second one 800
    engine = Reader("a", transport, [here])
    report = publish(Publisher(transport, interrupt="retract", timeouts=PATIENT), 1, [engine])
    assert report.updated == ["a"]
    assert [way for way, _ in engine.read] == ["gpu", "host", "host"]
    assert "the engines read host memory instead of the trainer's GPU" in caplog.text
    assert not cuda.held


def test_an_engine_on_another_node_ends_the_transport_and_says_what_to_set():
    transport = TensorTransport(CPU)
    engine = Reader("far", transport, [DevicePlace("another node", None)])
    report = publish(Publisher(transport, interrupt="retract", timeouts=PATIENT), 1, [engine])
    assert report.updated == []
    assert report.unsuited is not None
    assert report.unsuited.startswith("far, rank 0: it shares no memory with the trainer")
