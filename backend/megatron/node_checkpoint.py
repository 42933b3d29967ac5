"""Each rank's whole state on the disk of its node, with a copy on the next node.

    save:     copy on the host ──► own share on the node's disk ──► its copy to the next node
    restart:  own share, or else its copy from a rank that has it ──► own disk ──► into place

Unlike the files of ``checkpoint_writer``, a share holds all that its rank needs, tensors included that other
ranks hold as well: no rank reads another one's share, and the layout must be the same.
"""

import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.manifest import CHUNK
from slipstream.backend.checkpoint.node_folder import (
    NodeFolder,
    Share,
    next_nodes,
    node_folder,
    sources,
)
from slipstream.backend.megatron.checkpoint_writer import HostCopies, agree
from slipstream.configs.schema import RunConfig

T = TypeVar("T")


class NodeCheckpoints:
    """One rank's share of each checkpoint, and the copies that it keeps. All ranks make theirs together."""

    def __init__(self, folder: NodeFolder, *, timeout_s: float) -> None:
        """``timeout_s``: longest wait for a part of another rank's share."""
        self._folder = folder
        self._rank = dist.get_rank()
        # A group of its own: its messages go on in a thread while training uses the others.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._group = cast("dist.ProcessGroup", group)
        places = _gathered(folder.place)
        self._looks_for_copies = places.index(folder.place) == self._rank
        """One rank of each node reads the copies that are there."""
        targets = next_nodes(places)
        self._target = targets[self._rank]
        self._senders = [rank for rank, target in enumerate(targets) if target == self._rank]

    # ---- writing

    def forget(self) -> None:
        """Delete all shares on this node."""
        self._folder.keep(())

    @contextmanager
    def written(
        self, tokens: Mapping[int, str], copies: HostCopies[str] | None, problems: list[str]
    ) -> Generator[None]:
        """Write this rank's share, exchange copies with other nodes, run the block, and close ``copies``.

        On all ranks at once; may run in a thread. ``tokens``: of the versions to be kept, of which the newest
        is this one. ``copies``: the share; None if there was no memory for it. What fails is added to
        ``problems``, and nothing is raised.
        """
        version = max(tokens)
        token = tokens[version]
        try:
            self._folder.keep(tokens)
            share = None if copies is None else _share(version, token, self._rank, copies)
            if copies is not None and share is not None:
                try:
                    self._folder.write(share, _views(copies.content))
                except CheckpointError as error:
                    problems.append(str(error))
            try:
                self._exchange(version, share, copies)
            except (CheckpointError, RuntimeError) as error:  # gloo raises RuntimeError
                problems.append(f"a copy is missing: {error}")
            yield
        finally:
            if copies is not None:
                copies.close()

    def _exchange(self, version: int, share: Share | None, copies: HostCopies[str] | None) -> None:
        sent = []
        if self._target is not None:
            content = torch.empty(0, dtype=torch.uint8) if copies is None else copies.content
            sent = self._send(self._target, share, content, version)
        failed: list[str] = []
        for sender in self._senders:
            try:
                self._receive(sender, version)
            except CheckpointError as error:
                failed.append(str(error))
        for work in sent:
            work.wait()
        if failed:
            raise CheckpointError("; ".join(failed))

    def _send(self, to: int, share: Share | None, content: Tensor, tag: int) -> list[dist.Work]:
        """Begin to send a share, or that there is none. ``content``: uint8 [bytes]."""
        header = b"" if share is None else share.encoded()
        pieces = [torch.tensor([len(header)])]
        if header:
            pieces += [torch.frombuffer(bytearray(header), dtype=torch.uint8), *content.split(CHUNK)]
        works = [dist.isend(piece, to, group=self._group, tag=tag) for piece in pieces]
        return [work for work in works if work is not None]

    def _receive(self, sender: int, tag: int) -> None:
        """Write the share that ``sender`` sends. Raises CheckpointError, once all of it was received."""
        length = torch.empty(1, dtype=torch.int64)
        dist.recv(length, sender, group=self._group, tag=tag)
        if not length:
            raise CheckpointError(f"rank {sender} has no share to send")
        header = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(header, sender, group=self._group, tag=tag)
        share = Share.decoded(header.numpy().tobytes())
        chunks = self._received(sender, share.size, tag)
        try:
            self._folder.write(share, chunks)
        finally:
            for _ in chunks:  # the sender waits until all of it was taken
                pass

    def _received(self, sender: int, size: int, tag: int) -> Iterator[memoryview]:
        buffer = torch.empty(min(CHUNK, size), dtype=torch.uint8)
        for start in range(0, size, CHUNK):
            chunk = buffer[: size - start]
            dist.recv(chunk, sender, group=self._group, tag=tag)
            yield chunk.numpy().data

    # ---- reading

    def found(self, tokens: Mapping[int, str]) -> tuple[int | None, dict[str, Tensor], list[str]]:
        """Return the newest version of which every share is sound on some node, and this rank's tensors.

        Collective. None if there is no such version. ``tokens``: of the versions that may be used. The third
        item has a sentence for each version that was passed over. A rank whose own share is missing gets a
        copy from the rank that has one. Raises CheckpointError on all ranks if it cannot be written.
        """
        notes: list[str] = []
        for version in sorted(tokens, reverse=True):
            problem = self._folder.problem(version, self._rank, tokens[version])
            problems = _gathered(problem)
            missing = [rank for rank, each in enumerate(problems) if each]
            held = [] if problem else [self._rank]
            if self._looks_for_copies:
                held += [
                    rank for rank in missing if self._folder.problem(version, rank, tokens[version]) is None
                ]
            origins = sources(_gathered(held))
            if origins is not None:
                self._fetch(version, origins)
                return version, self._open(version), notes
            texts = "; ".join(f"rank {rank}: {problems[rank]}" for rank in missing)
            notes.append(f"version {version} on the disks of the trainer's nodes is passed over: {texts}")
        return None, {}, notes

    def _fetch(self, version: int, origins: Sequence[int]) -> None:
        """Bring each share to its rank. In one order on all ranks, so that no two wait for each other."""
        error = None
        for rank, origin in enumerate(origins):
            if origin != rank and self._rank == origin:
                content = _mapped(self._folder, version, rank)
                for work in self._send(rank, self._folder.share(version, rank), content, version):
                    work.wait()
            elif origin != rank and self._rank == rank:
                try:
                    self._receive(origin, version)
                except CheckpointError as raised:
                    error = raised
        agree(error)

    def _open(self, version: int) -> dict[str, Tensor]:
        share = self._folder.share(version, self._rank)
        assert share is not None
        content = _mapped(self._folder, version, self._rank)
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape, start) in share.tensors.items():
            kind = cast("torch.dtype", getattr(torch, dtype))
            part = content[start : start + prod(shape) * kind.itemsize]
            tensors[name] = part.view(kind).view(list(shape))
        return tensors


def node_checkpoints(config: RunConfig) -> NodeCheckpoints | None:
    """Return what keeps this rank's shares of a run; None: nothing does. Collective."""
    folder = node_folder(config)
    return folder and NodeCheckpoints(folder, timeout_s=config.checkpoint.timeout_s)


def _share(version: int, token: str, rank: int, copies: HostCopies[str]) -> Share:
    crc32 = 0
    for view in _views(copies.content):
        crc32 = zlib.crc32(view, crc32)
    tensors = {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), copies.starts[name])
        for name, tensor in copies.tensors.items()
    }
    return Share(version, token, rank, copies.content.numel(), crc32, tensors)


def _views(content: Tensor) -> Iterator[memoryview]:
    for chunk in content.split(CHUNK):
        yield chunk.numpy().data


def _mapped(folder: NodeFolder, version: int, rank: int) -> Tensor:
    """Return the bytes of a share: uint8 [bytes], read as they are used."""
    path = folder.data(version, rank)
    if not path.stat().st_size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c"))


def _gathered(value: T) -> list[T]:
    """Return what every rank gives, in rank order. Collective."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast("list[T]", values)
