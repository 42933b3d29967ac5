"""Writes a sharded state dict to disk while training goes on.

    begin()    collective: who writes what; this rank's share is copied to host memory    training waits
               a thread writes and syncs this rank's file                                 training goes on
    finish()   collective: has every rank succeeded; rank 0 writes the index              training waits

The files are those of Megatron's ``dist_checkpointing``, which reads them. Megatron's own writer is not used:
it forks or spawns processes. Forking a process that holds NCCL groups and threads is not safe, and a spawned
process, or the shared memory that feeds it, outlives a trainer that is killed. The thread and its copy end
with their process, and ``torch.save`` releases the GIL while it writes a tensor.
"""

import io
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.megatron.groups import groups
from slipstream.bridge.group.pinned import PinnedPool
from slipstream.rollout.system.disk import describe

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

ALIGNMENT = 64
"""The tensors of a snapshot begin at a multiple of this many bytes."""

NameT = TypeVar("NameT")


class HostCopies(Generic[NameT]):
    """Copies of tensors, one after another in one block of host memory. ``close`` gives the block back."""

    def __init__(self, tensors: Mapping[NameT, torch.Tensor], pool: PinnedPool) -> None:
        ends = list(accumulate((_aligned(tensor.nbytes) for tensor in tensors.values()), initial=0))
        self.starts = dict(zip(tensors, ends, strict=False))
        """The byte of ``content`` at which each tensor begins."""
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        device = next(iter(devices), torch.device("cpu"))
        self._pool, self._memory = pool, pool.take(max(ends[-1], 1), device)
        self.content = self._memory[: ends[-1]]
        """uint8 [bytes]: all of the tensors."""
        self.tensors = {
            name: _copied(tensor, self._memory, self.starts[name]) for name, tensor in tensors.items()
        }
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def close(self) -> None:
        self.tensors.clear()
        self._pool.give_back(self._memory)


class BackgroundSave:
    """One checkpoint that is being written."""

    def __init__(
        self,
        writer: "_Writer",
        metadata: Metadata | None,
        common: bytes | None,
        folder: Path,
        around: AbstractContextManager[None],
    ) -> None:
        self._writer = writer
        self._around = around
        self._metadata = metadata
        """None except on rank 0."""
        self._folder = folder
        self._results: list[WriteResult] = []
        self._error: Exception | None = None
        # A daemon: the end of the process must not wait for a disk.
        self._thread = threading.Thread(
            target=self._write, args=(common,), name=f"checkpoint {folder.name}", daemon=True
        )
        self._thread.start()

    @classmethod
    def begin(
        cls,
        state: dict[str, object],
        folder: Path,
        pool: PinnedPool | None,
        around: AbstractContextManager[None] | None = None,
    ) -> "BackgroundSave":
        """Take a snapshot of ``state``, which is used up, and start to write it into ``folder``. Collective.

        ``pool``: has the host memory of snapshots, of which one is as large as the next; None if ``state`` is
        a copy already. ``around``: the thread writes inside of it.

        Raises CheckpointError on all ranks unless ``folder`` is a writable folder on each of them.
        """
        usable = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
        agree(None if usable else CheckpointError(f"{folder} is not a folder that this rank can write into"))
        sharded, common = cast("tuple[dict[str, object], object]", save_preprocess(state))
        _share_among_replicas(sharded)
        by_key, *_ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        writer = _Writer(folder, pool)
        (_, metadata, _), *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(by_key),
            # Of its own writer Megatron uses only what torch's has as well.
            cast("FileSystemWriterAsync", writer),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )
        # Serialized now: Adam's number of updates in it advances with training.
        common_bytes = _serialized(common) if dist.get_rank() == 0 else None
        return cls(writer, metadata, common_bytes, folder, around or nullcontext())

    @property
    def done(self) -> bool:
        """True once this rank's writing has ended, successfully or not."""
        return not self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        """Wait for the writing and make the checkpoint readable. Collective.

        Raises CheckpointError on all ranks, with the errors of all ranks.
        """
        self._thread.join(timeout_s)
        late = CheckpointError(f"writing into {self._folder} has not ended in {timeout_s:.0f} s")
        agree(self._error if self.done else late)
        first = dist.get_rank() == 0
        results: list[list[WriteResult]] = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(self._results, results if first else None)
        error = None
        if first:
            assert self._metadata is not None
            try:
                self._writer.finish(self._metadata, results)
                save_config(CheckpointingConfig("torch_dist"), str(self._folder))
                _sync(self._folder / CONFIG_FNAME)
            except OSError as raised:
                error = raised
        agree(error)

    def _write(self, common: bytes | None) -> None:
        try:
            with self._around:
                self._results = self._writer.write_snapshot()
            if common is not None:
                (self._folder / COMMON_STATE_FNAME).write_bytes(common)
                _sync(self._folder / COMMON_STATE_FNAME)
        except Exception as error:  # any kind: an exception in a thread is lost; finish() raises it
            self._error = error


class _Snapshot:
    """Stands for the planner; gives the writer copies in host memory instead of the tensors themselves."""

    def __init__(self, plan: SavePlan, planner: SavePlanner, pool: PinnedPool | None) -> None:
        # Byte items are serialized already.
        self._data = {item.index: planner.resolve_data(item) for item in plan.items}
        self._copies: HostCopies[MetadataIndex] | None = None
        if pool is not None:
            tensors = {
                index: data.detach() for index, data in self._data.items() if isinstance(data, torch.Tensor)
            }
            self._copies = HostCopies(tensors, pool)
            self._data |= self._copies.tensors

    def close(self) -> None:
        self._data.clear()
        if self._copies is not None:
            self._copies.close()

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._data[item.index]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _copied(tensor: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    """Copy a tensor into ``memory``. Its storage is as small: the writer saves whole storages."""
    if not tensor.numel():
        return tensor.cpu()
    place = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return place.view(tensor.shape).copy_(tensor, non_blocking=True)


class _Writer(FileSystemWriter):
    """torch's writer of one file per rank in two steps: the plan and a snapshot now, the file later."""

    def __init__(self, folder: Path, pool: PinnedPool | None) -> None:
        # One thread: with more, torch starts helpers whose errors are lost. No copies ahead: all are made.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self._pool = pool
        self._snapshot: tuple[SavePlan, _Snapshot] | RuntimeError | MemoryError

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        try:
            self._snapshot = plan, _Snapshot(plan, planner, self._pool)
        except (RuntimeError, MemoryError) as error:  # no host memory: finish() raises it on all ranks
            self._snapshot = error

    def write_snapshot(self) -> list[WriteResult]:
        snapshot = self._snapshot
        del self._snapshot  # it is as large as the share; nothing else holds it when this returns
        if isinstance(snapshot, Exception):
            raise snapshot
        plan, copies = snapshot
        try:
            return self.write_data(plan, cast("SavePlanner", copies)).wait()
        finally:
            copies.close()


def _serialized(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _share_among_replicas(sharded: dict[str, object]) -> None:
    """Assign each data-parallel rank a part of the tensors that all of them hold. Collective."""
    group = groups.get_data_parallel_group(with_context_parallel=True)
    shares = determine_main_replica_uniform_distribution(sharded, group)
    distribute_main_replicas_with_precomputed_distribution(sharded, group, shares)


def agree(error: Exception | None) -> None:
    """Raise CheckpointError on every rank if there is an error on any. Collective."""
    explanations: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(explanations, None if error is None else _explain(error))
    if failed := [f"rank {rank}: {text}" for rank, text in enumerate(explanations) if text]:
        raise CheckpointError("; ".join(failed)) from error


def _explain(error: BaseException) -> str:
    """Return the error's text; an error of torch's zip writer is explained by the OSError that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return describe(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
