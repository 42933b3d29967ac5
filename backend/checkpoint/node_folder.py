"""Shares of checkpoints on the disk of one node: those of its own ranks, and copies of other nodes' ranks.

    v00000008/rank-00003.bin     all tensors of rank 3, one after another
    v00000008/rank-00003.json    written once the file above was read back and is right: the share counts

A share has all that its rank needs in the same layout. Restarts within a job use shares; another job never
does. The methods block on the disk.
"""

import json
import os
import shutil
import socket
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.manifest import CHUNK
from slipstream.configs.schema import RunConfig
from slipstream.rollout.system.disk import describe
from slipstream.rollout.system.durable import write_durably


@dataclass(frozen=True)
class Share:
    """The part of a checkpoint that one rank has written."""

    version: int
    token: str
    """Tells checkpoints of one version number apart: ``record_digest``."""
    rank: int
    size: int
    """Bytes."""
    crc32: int
    tensors: Mapping[str, tuple[str, Sequence[int], int]]
    """By name: dtype, shape, and the byte at which the tensor begins."""

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, encoded: bytes) -> "Share":
        """Raises ValueError, KeyError or TypeError if it is something else."""
        return cls(**json.loads(encoded))


class NodeFolder:
    """The shares of one run on this node, in ``path``, which is made in a folder that is there already. All
    ranks of the node use it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> str:
        """A text that is the same for two ranks if they see the same folder."""
        return f"{socket.gethostname()}:{self.path}"

    def data(self, version: int, rank: int) -> Path:
        """Return the file that has the tensors of a share."""
        return self._of(version) / f"rank-{rank:05d}.bin"

    def write(self, share: Share, chunks: Iterable[memoryview]) -> None:
        """Write a share, whose bytes are ``chunks``, read it back from the disk, and let it count.

        Raises CheckpointError. All shares that were there are unchanged then.
        """
        path = self.data(share.version, share.rank)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            if not self.path.parent.is_dir():  # making it would fill the disk that is mounted above it
                raise CheckpointError(f"{self.path.parent} is no folder on {socket.gethostname()}: make it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if problem := _problem(draft, share):
                raise CheckpointError(f"{path} was written and {problem}")
            draft.replace(path)
            write_durably(path.with_suffix(".json"), share.encoded())
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)  # the disk may be full
            raise CheckpointError(f"cannot write {path}: {describe(error)}") from error

    def share(self, version: int, rank: int) -> Share | None:
        """Return a share that was written to its end; None if there is none."""
        try:
            return Share.decoded(self.data(version, rank).with_suffix(".json").read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def problem(self, version: int, rank: int, token: str) -> str | None:
        """Return why a share cannot be used, every byte of it read; None if it can be."""
        share = self.share(version, rank)
        if share is None:
            return f"its share is not in {self._of(version)}"
        if (share.version, share.rank, share.token) != (version, rank, token):
            return f"its share in {self._of(version)} is that of another checkpoint"
        path = self.data(version, rank)
        try:
            problem = _problem(path, share)
        except OSError as error:
            return f"{path} cannot be read: {describe(error)}"
        return problem and f"{path} {problem}"

    def keep(self, versions: Collection[int]) -> None:
        """Delete the shares of all other versions, as far as the disk permits. Any rank may delete them."""
        with suppress(OSError):
            kept = {self._of(version) for version in versions}
            for folder in self.path.iterdir():
                if folder not in kept:
                    shutil.rmtree(folder, ignore_errors=True)
            if not kept:
                self.path.rmdir()

    def _of(self, version: int) -> Path:
        return self.path / f"v{version:08d}"


def node_folder(config: RunConfig) -> NodeFolder | None:
    """Return where this node keeps shares of the run's checkpoints; None: it keeps none."""
    local = config.checkpoint.local_dir
    if local is None:
        return None
    run = config.run.folder.absolute()
    # Runs in other folders may have the same name.
    return NodeFolder(local / f"{run.name}-{zlib.crc32(bytes(run)):08x}")


def next_nodes(places: Sequence[str]) -> list[int | None]:
    """Return for each rank the rank on the next node that keeps a copy of its share.

    ``places``: the node of each rank. None for every rank if all are on one node.

    >>> next_nodes(["a", "a", "b", "b", "c"])
    [2, 3, 4, 4, 0]
    """
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    nodes = list(ranks)
    if len(nodes) == 1:
        return [None] * len(places)
    following = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    return [
        (others := ranks[following[place]])[ranks[place].index(rank) % len(others)]
        for rank, place in enumerate(places)
    ]


def sources(held: Sequence[Collection[int]]) -> list[int] | None:
    """Return for each rank a rank that has its share on its disk, itself if possible.

    ``held``: for each rank the ranks whose sound shares it has found. None if a share is nowhere.
    """
    found: list[int] = []
    for rank in range(len(held)):
        holders = [holder for holder, ranks in enumerate(held) if rank in ranks]
        if not holders:
            return None
        found.append(rank if rank in holders else holders[0])
    return found


def _problem(path: Path, share: Share) -> str | None:
    """Return what is wrong with the bytes of a share, read from the disk."""
    size, crc32 = 0, 0
    with path.open("rb") as file:
        _drop_from_memory(file)
        while chunk := file.read(CHUNK):
            size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
    if size != share.size:
        return f"has {size} bytes instead of {share.size}"
    return None if crc32 == share.crc32 else "has a wrong checksum"


def _drop_from_memory(file: BinaryIO) -> None:
    """Let the next read come from the disk, so that it finds what the disk has lost."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
