"""Memory of a trainer that engines read: which way is chosen, what is checked, and what is left behind."""

import contextlib
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import msgspec
import pytest
import torch

from slipstream.bridge.engine.memory_reader import KEPT, MemoryReader, located
from slipstream.bridge.engine.orders import DevicePlace, Load, Meeting, Tensor
from slipstream.bridge.group import memory
from slipstream.bridge.group.handles import HANDLE_BYTES, DeviceHandle, HostHandle
from slipstream.bridge.group.memory import CannotOpen, DeviceMemory, HostMemory, MappedMemory
from slipstream.bridge.transport.ways import UnsuitedTransport, way_to

PATIENCE_S = 120
MEETING = Meeting("127.0.0.1", 1, 1.0)
CPU = torch.device("cpu")
ON_CPU, ON_0, ON_1 = DevicePlace("n", None), DevicePlace("n", "GPU-0"), DevicePlace("n", "GPU-1")
REFUSING = DevicePlace("n", "GPU-1", refused="no peer access")


@pytest.mark.parametrize(
    ("sender", "reader", "offers_gpu", "way"),
    [
        (ON_CPU, ON_CPU, False, "shared"),
        (ON_CPU, ON_0, False, "shared"),
        (ON_0, ON_CPU, True, "shared"),
        (ON_0, ON_0, True, "cuda_ipc"),
        (ON_0, ON_1, True, "cuda_ipc"),
        (ON_0, REFUSING, True, "pinned"),
        (ON_0, ON_0, False, "pinned"),
        (ON_0, ON_1, False, "pinned"),
    ],
)
def test_a_rank_reads_the_gpu_if_it_can_and_else_memory_of_the_host(sender, reader, offers_gpu, way):
    assert way_to(reader, sender, offers_gpu=offers_gpu) == way


@pytest.mark.parametrize("gpu", [None, "GPU-0"])
def test_there_is_no_way_to_another_node(gpu):
    with pytest.raises(UnsuitedTransport, match=r"shares no memory.*Set weights\.transport to 'shards'"):
        way_to(DevicePlace("m", gpu), DevicePlace("n", gpu), offers_gpu=gpu is not None)


# ---- orders


def load(handle, *tensors: Tensor) -> Load:
    return Load(MEETING, "e/0", 1, handle, tensors)


A = Tensor("a", (2, 3), "float32")
HOST = HostHandle(os.getpid(), 5, "ab12", 4096)


@pytest.mark.parametrize(
    ("order", "violations"),
    [
        (load(HOST), ["it has no tensors"]),
        (load(HOST, A, A), ["'a' comes twice"]),
        (load(HOST, Tensor("", (1,), "float32")), ["a tensor without a name"]),
        (load(HOST, Tensor("b", (2, -3), "float32")), ["b has the shape (2, -3)"]),
        (load(HOST, Tensor("b", (2, 0), "float32")), ["b has the shape (2, 0)"]),
        (load(HOST, Tensor("b", (2,), "load")), ["b is load, one of float32, bfloat16"]),
        (load(HOST, Tensor("b", (1025,), "float32")), ["4100 bytes", "4096 bytes of memory"]),
        (load(msgspec.structs.replace(HOST, token="../x"), A), ["no memory of a process"]),
        (load(msgspec.structs.replace(HOST, pid=-1), A), ["no memory of a process"]),
        (load(DeviceHandle(b"short", 99), A), [f"a handle of 5 bytes, {HANDLE_BYTES} expected"]),
        (
            load(DeviceHandle(b"", 99), A, A, Tensor("b", (-1,), "x")),
            ["a handle of 0 bytes", "'a' comes twice", "b has the shape", "b is x"],
        ),
    ],
)
def test_a_wrong_order_is_refused_with_all_its_faults_before_anything_is_opened(
    order, violations, monkeypatch
):
    monkeypatch.setattr(
        "slipstream.bridge.engine.memory_reader.MappedMemory", lambda *_, **__: pytest.fail("opened")
    )
    monkeypatch.setattr(
        "slipstream.bridge.engine.memory_reader.read_device", lambda *_: pytest.fail("opened")
    )
    with pytest.raises(ValueError, match="a bucket of the trainer is refused") as refused:
        MemoryReader().load(torch.nn.Linear(1, 1), order)
    assert all(violation in str(refused.value) for violation in violations)


def test_memory_of_a_gpu_is_refused_on_a_cpu():
    with pytest.raises(CannotOpen, match="offered to an engine on cpu"):
        MemoryReader().load(torch.nn.Linear(1, 1), load(DeviceHandle(bytes(HANDLE_BYTES), 99), A))


# ---- memory of the host


@contextlib.contextmanager
def other_process(work: Callable[[Connection], None]) -> Iterator[tuple[Connection, int]]:
    """Run ``work`` in a forked process with one end of a pipe; yields the other end and its PID."""
    mine, other = get_context("fork").Pipe()
    process = get_context("fork").Process(target=work, args=(other,))
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


def named_memory(pid: int, handle: HostHandle | None = None) -> list[str]:
    """Shared memory of a process that has a name, by which it outlives the process."""
    marks = [f"torch_{pid}_"] + ([] if handle is None else [handle.token])
    return [name for name in os.listdir("/dev/shm") if any(mark in name for mark in marks)]


def offer(pipe: Connection) -> None:
    torch.set_num_threads(1)
    offered = HostMemory(8192, pinned=False)
    offered.tensor.copy_(torch.arange(8192, dtype=torch.int64).to(torch.uint8))
    pipe.send(offered.handle)
    while pipe.recv() == "fill":
        offered.tensor.fill_(7)
        pipe.send("filled")


def test_what_one_process_fills_another_reads_without_a_copy():
    with other_process(offer) as (pipe, _):
        opened = MappedMemory(answer(pipe), pinned=False)
        assert torch.equal(opened.tensor, torch.arange(8192).to(torch.uint8))
        pipe.send("fill")
        assert answer(pipe) == "filled"
        assert opened.tensor.unique().tolist() == [7]


def test_who_has_opened_memory_can_read_it_after_its_owner_was_killed_and_nothing_is_left():
    with other_process(offer) as (pipe, pid):
        handle = answer(pipe)
        opened = MappedMemory(handle, pinned=False)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert torch.equal(opened.tensor, torch.arange(8192).to(torch.uint8))
        with pytest.raises(CannotOpen, match="No such file"):
            MappedMemory(handle, pinned=False)
    assert not named_memory(pid, handle)


def test_a_number_that_belongs_to_other_memory_by_now_is_refused():
    first = HostMemory(4096, pinned=False)
    first.close()
    second = HostMemory(4096, pinned=False)
    stale = msgspec.structs.replace(second.handle, token=first.handle.token)
    with pytest.raises(CannotOpen, match="expected: the trainer that offered it has ended"):
        MappedMemory(stale, pinned=False)
    second.close()
    with pytest.raises(CannotOpen):
        MappedMemory(second.handle, pinned=False)


def test_a_file_of_another_size_or_one_that_may_shrink_is_refused():
    offered = HostMemory(4096, pinned=False)
    with pytest.raises(CannotOpen, match="has 4096 bytes, 8192 expected"):
        MappedMemory(msgspec.structs.replace(offered.handle, nbytes=8192), pinned=False)
    with pytest.raises(PermissionError):
        os.ftruncate(offered.handle.descriptor, 10)
    offered.close()
    loose = os.memfd_create("slipstream-ab", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    with pytest.raises(CannotOpen, match="may still change its size"):
        MappedMemory(HostHandle(os.getpid(), loose, "ab", 4096), pinned=False)
    os.close(loose)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)


def test_a_bucket_is_loaded_from_memory_that_stays_open_and_old_memory_is_closed():
    model, reader = Model(), MemoryReader()
    offered = [HostMemory(4096, pinned=False) for _ in range(KEPT + 1)]
    for number, each in enumerate(offered):
        each.tensor[:24].view(torch.float32).fill_(number + 1)
        reader.load(model, load(each.handle, A))
        assert model.a.unique().tolist() == [number + 1]
    assert len(reader._mapped) == KEPT
    for each in offered:
        each.close()
    reader.load(model, load(offered[-1].handle, A))  # it is open still
    with pytest.raises(CannotOpen):
        reader.load(model, load(offered[0].handle, A))
    reader.close()
    with pytest.raises(CannotOpen):
        reader.load(model, load(offered[-1].handle, A))


def test_processes_of_one_machine_share_a_node():
    with other_process(lambda pipe: pipe.send(located(CPU))) as (pipe, _):
        assert answer(pipe) == located(CPU)


# ---- memory of a GPU, with a stand-in for the calls of CUDA


class StandIn:
    """The calls of ``CudaRuntime`` on a machine without a GPU: memory is a file that all processes map.

    As with CUDA, memory lives on while somebody has it open, and every open has to be closed.
    """

    def __init__(self, folder) -> None:
        self._folder = folder
        self.held: dict[int, mmap.mmap] = {}
        self.paths: dict[int, str] = {}
        self.room = 1 << 20

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.room:
            raise RuntimeError("cudaMalloc failed with CUDA error 2")
        path = self._folder / f"{len(os.listdir(self._folder)):064d}"
        path.write_bytes(bytes(nbytes))
        return self.open(path.name.encode())

    def handle_of(self, address: int) -> bytes:
        return self.paths[address].encode()

    def open(self, handle: bytes) -> int:
        path = self._folder / handle.decode()
        if not path.exists():
            raise RuntimeError("cudaIpcOpenMemHandle failed with CUDA error 400")
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self.held[address], self.paths[address] = mapping, path.name
        return address

    def close(self, address: int) -> None:
        del self.held[address]

    def free(self, address: int) -> None:
        (self._folder / self.paths[address]).unlink()
        self.close(address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        import ctypes

        ctypes.memmove(target, source, nbytes)


@pytest.fixture
def cuda(tmp_path, monkeypatch) -> StandIn:
    stand_in = StandIn(tmp_path)
    monkeypatch.setattr(memory, "cuda_runtime", lambda: stand_in)
    return stand_in


def test_memory_of_a_gpu_is_open_only_while_it_is_read(cuda):
    offered = DeviceMemory(4096, CPU)
    offered.fill(torch.full((1000,), 3, dtype=torch.uint8))
    held = len(cuda.held)
    target = torch.zeros(1000, dtype=torch.uint8)
    memory.read_device(offered.handle, target)
    assert target.unique().tolist() == [3]
    assert len(cuda.held) == held
    with pytest.raises(CannotOpen, match="5000 bytes are read of memory of 4096 bytes"):
        memory.read_device(offered.handle, torch.zeros(5000, dtype=torch.uint8))
    offered.close()
    assert not cuda.held
    with pytest.raises(CannotOpen, match=r"memory of the trainer's GPU: .* CUDA error 400"):
        memory.read_device(offered.handle, target)
    assert not cuda.held


def test_a_read_that_fails_closes_what_it_has_opened(cuda, monkeypatch):
    offered = DeviceMemory(4096, CPU)
    held = len(cuda.held)

    def broken(*_):
        raise RuntimeError("cudaMemcpy failed with CUDA error 719")

    monkeypatch.setattr(cuda, "copy", broken)
    with pytest.raises(RuntimeError, match="719"):
        memory.read_device(offered.handle, torch.zeros(10, dtype=torch.uint8))
    assert len(cuda.held) == held


def test_memory_that_has_no_handle_is_given_back(cuda, monkeypatch):
    def none(_):
        raise RuntimeError("cudaIpcGetMemHandle failed with CUDA error 801")

    monkeypatch.setattr(cuda, "handle_of", none)
    with pytest.raises(RuntimeError, match="801"):
        DeviceMemory(4096, CPU)
    assert not cuda.held


@pytest.mark.parametrize("refuses", [False, True])
def test_host_memory_that_cannot_be_pinned_is_used_all_the_same(cuda, monkeypatch, refuses, caplog):
    calls = []

    def register(address: int, nbytes: int) -> None:
        calls.append(("pin", nbytes))
        if refuses:
            raise RuntimeError("cudaHostRegister failed with CUDA error 1")

    monkeypatch.setattr(cuda, "register", register, raising=False)
    monkeypatch.setattr(cuda, "unregister", lambda _: calls.append(("unpin",)), raising=False)
    offered = HostMemory(4096, pinned=True)
    MappedMemory(offered.handle, pinned=True).close()
    offered.close()
    pinned = [("pin", 4096)]
    assert calls == (pinned * 2 if refuses else [*pinned, *pinned, ("unpin",), ("unpin",)])
    assert ("copies are slow" in caplog.text) == refuses
