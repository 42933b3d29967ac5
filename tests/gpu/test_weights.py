"""Weights from the trainer's GPU into engines: CUDA IPC, pinned memory, and a group whose member dies."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from slipstream.bridge.engine.memory_reader import located
from slipstream.bridge.engine.orders import TAKE
from slipstream.bridge.group.memory import (
    CannotOpen,
    DeviceMemory,
    HostMemory,
    MappedMemory,
    cuda_runtime,
    read_device,
)
from slipstream.bridge.group.peers import Peers
from slipstream.bridge.group.pinned import PinnedPool
from slipstream.bridge.group.store import join_store, serve_store
from tests.gpu.test_engines import PROBES, SIZES, checkpoint, engine, on_the_first_gpu
from tests.integration.test_megatron_parity import config_for
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

__all__ = ["SIZES", "checkpoint"]

PATIENCE_S = 120
NBYTES = 1 << 28
GPU = torch.device("cuda", 0)


@contextmanager
def other_process(work: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, int]]:
    mine, other = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=work, args=(other, *arguments))
    process.start()
    other.close()
    try:
        yield mine, process.pid
    finally:
        mine.close()
        process.kill()
        process.join()


def answer(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE_S), "no answer of the other process"
    return pipe.recv()


def pattern(device: torch.device) -> torch.Tensor:
    return torch.arange(NBYTES // 4, dtype=torch.int32, device=device).view(torch.uint8)


def read(pipe: Connection, number: int) -> None:
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    while (handle := pipe.recv()) is not None:
        target = torch.empty(NBYTES, dtype=torch.uint8, device=device)
        read_device(handle, target)
        pipe.send(bool(torch.equal(target, pattern(device))))


@pytest.mark.parametrize(
    "number", [0, pytest.param(1, marks=pytest.mark.gpu(2))], ids=["same GPU", "another GPU"]
)
def test_another_process_reads_the_memory_of_a_gpu_and_its_death_keeps_none(number):
    torch.cuda.init()
    with other_process(read, number) as (pipe, pid):
        for _ in range(3):
            offered = DeviceMemory(NBYTES, GPU)
            offered.fill(pattern(GPU))
            pipe.send(offered.handle)
            assert answer(pipe) is True
            offered.close()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(GPU)
        os.kill(pid, signal.SIGKILL)
    assert torch.cuda.mem_get_info(GPU)[0] >= free


def test_a_handle_whose_memory_is_gone_is_refused_and_the_gpu_works_on():
    with other_process(offer_and_end) as (pipe, _):
        handle = answer(pipe)
    with pytest.raises(CannotOpen):
        read_device(handle, torch.empty(10, dtype=torch.uint8, device=GPU))
    assert located(GPU, handle).refused is not None
    assert torch.ones(3, device=GPU).sum().item() == 3


def offer_and_end(pipe: Connection) -> None:
    torch.cuda.init()
    pipe.send(DeviceMemory(NBYTES, GPU).handle)


def test_host_memory_is_pinned_on_both_sides_and_by_the_pool():
    torch.cuda.init()
    offered = HostMemory(NBYTES, pinned=True)
    opened = MappedMemory(offered.handle, pinned=True)
    assert offered.tensor.is_pinned() and opened.tensor.is_pinned()
    offered.tensor.copy_(pattern(GPU))
    assert torch.equal(opened.tensor.to(GPU), pattern(GPU))
    opened.close()
    offered.close()
    pool = PinnedPool()
    copied = pool.copy(pattern(GPU))
    assert copied.is_pinned()
    assert torch.equal(copied, pattern(torch.device("cpu")))
    assert pool.kept_bytes == NBYTES
    cuda_runtime()


def die_in_a_transfer(pipe: Connection, port: int) -> None:
    torch.cuda.set_device(1)
    store = join_store("127.0.0.1", port, 1, PATIENCE_S, wait=False)
    device = torch.device("cuda", 1)
    Peers(store, "e", 1, 2, backend="nccl", device=device, timeout_s=PATIENCE_S)
    pipe.send("joined")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.gpu(2)
def test_a_member_that_dies_in_a_transfer_ends_the_transfer_and_not_this_process():
    store = serve_store("127.0.0.1", 0, 1, PATIENCE_S, wait=False)
    with other_process(die_in_a_transfer, store.port) as (pipe, _):
        peers = Peers(store, "e", 0, 2, backend="nccl", device=GPU, timeout_s=20)
        assert answer(pipe) == "joined"
        with pytest.raises(RuntimeError):
            peers.send([(1, torch.ones(NBYTES, device=GPU))])
        peers.leave()
    assert torch.ones(3, device=GPU).sum().item() == 3


@pytest.mark.gpu(1, "sglang")
def test_an_engine_on_the_trainers_gpu_reads_its_weights_from_there(tmp_path: Path, checkpoint: Path):
    config = config_for(
        checkpoint,
        {},
        dtype="bfloat16",
        optimizer={"lr": 1e-2},
        weights={"transport": {"type": "tensor", "bucket_mb": 8}},
    )
    loader = {"custom_weight_loader": [TAKE]}
    with engine(checkpoint, tmp_path / "engine.log", args=loader) as server:
        before = server.probe(PROBES)
        [report] = run_ranks(1, on_the_first_gpu, config, [server.address], tmp_path / "exported")
        assert (report.updated, report.ways) == (["engine"], {"cuda_ipc": 1})
        updated = server.probe(PROBES)
    assert updated != before
    with engine(tmp_path / "exported", tmp_path / "fresh.log") as fresh:
        assert fresh.probe(PROBES) == updated
