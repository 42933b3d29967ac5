"""The orders of the trainer's head to the ranks of an engine, and their answers.

Orders travel in requests to the server, answers and everything that is large through the head's store.
Imports no torch.
"""

from math import prod

import msgspec

from slipstream.bridge.group.handles import HANDLE_BYTES, DeviceHandle, Handle
from slipstream.bridge.hf.index import ITEMSIZE


class Meeting(msgspec.Struct, array_like=True, frozen=True):
    """The store in which the trainer's ranks and the engines' ranks meet."""

    address: str
    port: int
    timeout_s: float
    """Limit on any wait in the store."""


class Describe(msgspec.Struct, tag="describe", frozen=True):
    """Find out where the engine has the elements of the HF tensors, which are in the store under WANTED."""

    meeting: Meeting
    engine: str


class Join(msgspec.Struct, tag="join", frozen=True):
    """Join the process group of the engine and the trainer's ranks that send to it."""

    meeting: Meeting
    engine: str
    senders: tuple[int, ...]
    """Ranks of the trainer; they come first in the group."""
    ranks: int
    """Number of the engine's ranks."""
    backend: str
    """``nccl`` or ``gloo``."""
    timeout_s: float
    """Limit on a transfer in the group."""


class Receive(msgspec.Struct, tag="receive", frozen=True):
    """Receive one version into the parameters."""

    meeting: Meeting
    engine: str
    number: int
    """Number of the transfer, which no other transfer of this store has."""
    digests: bool
    """Read everything back from the parameters and compare its digests with the senders'."""


class Locate(msgspec.Struct, tag="locate", frozen=True):
    """Say where the rank computes, and try to open the memory of the trainer's GPU."""

    meeting: Meeting
    engine: str
    trial: DeviceHandle | None


class Tensor(msgspec.Struct, array_like=True, frozen=True):
    """An HF tensor that is going to be published."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Load(msgspec.Struct, tag="load", frozen=True):
    """Load whole HF tensors, which lie back to back in memory of the trainer."""

    meeting: Meeting
    engine: str
    number: int
    """Number of the bucket, which no other bucket of this store has."""
    memory: Handle
    tensors: tuple[Tensor, ...]

    def size(self) -> int:
        """Return the bytes of the tensors. Raises ValueError with all that is wrong with the order."""
        if wrong := [*self._wrong_memory(), *self._wrong_tensors()]:
            raise ValueError(f"a bucket of the trainer is refused: {'; '.join(wrong)}")
        size = sum(prod(each.shape) * ITEMSIZE[each.dtype] for each in self.tensors)
        if size > self.memory.nbytes:
            raise ValueError(
                f"a bucket of the trainer is refused: its tensors take {size} bytes, and "
                f"{self.memory.nbytes} bytes of memory are offered"
            )
        return size

    def _wrong_memory(self) -> list[str]:
        memory = self.memory
        if isinstance(memory, DeviceHandle):
            size = len(memory.ipc)
            return [f"a handle of {size} bytes, {HANDLE_BYTES} expected"] if size != HANDLE_BYTES else []
        valid = memory.pid > 0 and memory.descriptor >= 0 and memory.token.isalnum()
        return [] if valid else [f"no memory of a process: {memory}"]

    def _wrong_tensors(self) -> list[str]:
        names = [each.name for each in self.tensors]
        wrong = [
            f"{name!r} comes twice" for name in sorted({name for name in names if names.count(name) > 1})
        ]
        if not names:
            wrong.append("it has no tensors")
        for each in self.tensors:
            if not each.name:
                wrong.append("a tensor without a name")
            if not all(size > 0 for size in each.shape):
                wrong.append(f"{each.name} has the shape {each.shape}")
            if each.dtype not in ITEMSIZE:
                wrong.append(f"{each.name} is {each.dtype}, one of {', '.join(ITEMSIZE)} expected")
        return wrong


Order = Describe | Join | Receive | Locate | Load


class DevicePlace(msgspec.Struct, frozen=True):
    """Where a process computes."""

    node: str
    """The same for processes that see each other's memory: they have the kernel and its PIDs in common."""
    gpu: str | None
    """UUID; None: it computes on a CPU."""
    refused: str | None = None
    """Why memory of the trainer's GPU cannot be opened from here."""


class Described(msgspec.Struct, frozen=True):
    table: str
    """Digest of the rank's table, which is in the store under that name."""
    unfilled: list[str]
    """Parameters that no published tensor fills."""
    partly: list[str]
    """Parameters of which something else than padding is not filled."""


class RankAnswer(msgspec.Struct, frozen=True):
    """The result of one rank's part of a step, be it a rank of the trainer or of an engine."""

    error: str | None = None
    untraceable: str | None = None
    """Why the engine's loader cannot be followed."""
    described: Described | None = None
    place: DevicePlace | None = None
    serves: tuple[int, ...] = ()
    """Ranks of the engine to which a rank of the trainer sends anything."""
    sent_bytes: int = 0


class Target(msgspec.Struct, array_like=True, frozen=True):
    """The place of a part of a message in a parameter, in elements."""

    parameter: str
    offset: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]


class Incoming(msgspec.Struct, array_like=True, frozen=True):
    """A message as its receiver needs to know it."""

    targets: list[Target]
    numel: int
    direct: bool
    dtype: str
    """Torch's name of the type in which the elements travel. A parameter may be of a wider one."""


TAKE = "slipstream.bridge.engine.take.take"
"""Import path of the weight loader that engines must be started with (``--custom-weight-loader``)."""

WANTED = "wanted"
"""Key of the published tensors."""


def table_key(digest: str) -> str:
    return f"table/{digest}"


def list_key(engine: str, engine_rank: int, sender: int) -> str:
    """Return the key of the messages that a rank of the trainer sends to a rank of an engine."""
    return f"list/{engine}/{engine_rank}/{sender}"


def digests_key(engine: str, number: int, engine_rank: int, sender: int) -> str:
    """Return the key of the digests of a sender's messages in one transfer."""
    return f"digests/{engine}/{number}/{engine_rank}/{sender}"


def answer_key(order: Order, engine_rank: int) -> str:
    match order:
        case Describe(engine=engine):
            return f"described/{engine}/{engine_rank}"
        case Join(engine=engine):
            return f"joined/{engine}/{engine_rank}"
        case Receive(engine=engine, number=number):
            return f"received/{engine}/{number}/{engine_rank}"
        case Locate(engine=engine):
            return f"located/{engine}/{engine_rank}"
        case Load(engine=engine, number=number):
            return f"loaded/{engine}/{number}/{engine_rank}"
