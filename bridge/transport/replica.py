"""A replica of the weights beside an engine, kept current by patches: the far end of the delta transport.

    begin    declare which tensors are in which file; files keep their content, or get the weights that the
             engine has started with
    patch    bring one file to the next version, in place
    commit   declare that all files hold that version, so that the engine may load them
    check    look, before they are loaded, whether they still do

The files are safetensors, so the engine loads them like any checkpoint. Their folder is in memory (/dev/shm)
and belongs to one server; it goes when the server goes.

``rollout`` does not import the bridge: the code that starts an engine passes it the import path of ``mount``.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from slipstream.bridge.hf.files import HFCheckpoint
from slipstream.bridge.hf.index import (
    INDEX,
    ITEMSIZE,
    SAFETENSORS_NAMES,
    HfCheckpointError,
    StoredTensor,
    stored_tensors,
)
from slipstream.bridge.transport import patches

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

ROUTE = "/slipstream/replica"

ALIGNMENT = 64
"""The tensors of a file begin at a multiple of this many bytes."""


class ReplicaFile(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of one bucket, back to back."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """Torch's name."""

    def header(self) -> bytes:
        """Return the bytes before the tensors in a safetensors file."""
        sizes = [prod(shape) * ITEMSIZE[self.dtype] for shape in self.shapes]
        ranges = pairwise(accumulate(sizes, initial=0))
        tensors = {
            name: {"dtype": SAFETENSORS_NAMES[self.dtype], "shape": shape, "data_offsets": range_}
            for name, shape, range_ in zip(self.names, self.shapes, ranges, strict=True)
        }
        text = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(map(prod, self.shapes)) * ITEMSIZE[self.dtype]


class StartingWeights:
    """The HF checkpoint from which the engines of a run start. Its index is read when it is first needed.

    Trainer and engine each read it from their own node. A patch may then start from what no one has sent.
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._stored: dict[str, StoredTensor] | None = None

    def copy_into(self, target: patches.ByteArray, file: ReplicaFile) -> None:
        """Write the tensors of ``file`` into ``target``, in its dtype.

        A tensor that the checkpoint lacks, or has in another shape, becomes zeros. Raises HfCheckpointError.
        """
        if self._stored is None:
            self._stored = stored_tensors(self._model)
        dtype, end = getattr(torch, file.dtype), 0
        with HFCheckpoint(self._stored) as checkpoint:
            for name, shape in zip(file.names, file.shapes, strict=True):
                start, end = end, end + prod(shape) * ITEMSIZE[file.dtype]
                stored = self._stored.get(name)
                if stored is None or stored.shape != shape:
                    target[start:end] = 0
                else:
                    weights = checkpoint.tensor(name).to(dtype).reshape(-1)
                    target[start:end] = weights.view(torch.uint8).numpy()


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """The tensors that the files are to hold, and the state from which the patches start."""

    files: tuple[ReplicaFile, ...]
    afresh: bool
    """Patches start from the weights that the engine has started with, not from what the files hold."""


class Replica:
    """The files of one version; of no version while they change."""

    def __init__(self, folder: Path, initial: StartingWeights) -> None:
        """``initial``: what the engine has started with."""
        self.folder = folder
        self._initial = initial
        self._marker = folder / "version"
        self._places: list[tuple[Path, int]] = []
        """Path of each file, and the bytes before its tensors."""
        self._checksums: list[bytes | None] = []
        """Checksum of the content of each file; None before its patch has come."""
        # A caller that has given up waiting for a call may have sent the next one.
        self._lock = threading.Lock()

    def version(self) -> int | None:
        with self._lock:
            return int(self._marker.read_text()) if self._marker.exists() else None

    def begin(self, opening: Opening) -> None:
        """Raises OSError, with folder and setting, if there is not enough room."""
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._marker.unlink(missing_ok=True)
            files = opening.files
            names = [f"model-{number:05d}.safetensors" for number in range(1, len(files) + 1)]
            for old in self.folder.glob("*.safetensors"):
                if old.name not in names:
                    old.unlink()
            self._checksums = [None] * len(files)
            self._places = [self._create(name, file) for name, file in zip(names, files, strict=True)]
            weight_map = {
                tensor: name for name, file in zip(names, files, strict=True) for tensor in file.names
            }
            (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            if opening.afresh:
                self._start_afresh(files)

    def _start_afresh(self, files: Sequence[ReplicaFile]) -> None:
        try:
            for number, file in enumerate(files):
                self._initial.copy_into(self._mapped(number), file)
        except (HfCheckpointError, OSError) as error:  # patches will not match, and whole files come instead
            log.warning("the replica begins without the initial weights: %s", error)

    def _create(self, name: str, file: ReplicaFile) -> tuple[Path, int]:
        path, header = self.folder / name, file.header()
        with path.open("a+b") as opened:
            opened.seek(0)
            if opened.read(len(header)) != header:
                opened.truncate(0)
                opened.write(header)
                opened.flush()
            opened.truncate(len(header) + file.size)
            # Room that is missing when a memory-mapped file is written to kills the process. Reserve it now.
            try:
                os.posix_fallocate(opened.fileno(), 0, len(header) + file.size)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror} for a copy of the weights in {self.folder.parent} "
                    "(weights.transport.memory); make room there, or name another folder",
                ) from error
        return path, len(header)

    def patch(self, number: int, patch: patches.Patch) -> None:
        """Patch file ``number``, counted from 0. After a PatchError its content is undefined."""
        with self._lock:
            if not 0 <= number < len(self._places):
                raise patches.PatchError(
                    f"file {number} was not announced; there are {len(self._places)} files"
                )
            self._checksums[number] = None
            patches.apply(patch, self._mapped(number))
            self._checksums[number] = patch.checksum

    def commit(self, version: int) -> None:
        """Raises PatchError, unless all files hold what their patches have led to."""
        with self._lock:
            self._compare()
            self._marker.write_text(str(version))

    def check(self, version: int) -> None:
        """Raises PatchError, unless the files still hold ``version`` as it was committed."""
        with self._lock:
            held = self._marker.read_text() if self._marker.exists() else "none"
            if held != str(version):
                raise patches.PatchError(f"version {version} is to be loaded, and the replica holds {held}")
            self._compare()

    def _compare(self) -> None:
        for number, expected in enumerate(self._checksums):
            if expected is None:
                raise patches.PatchError(f"no patch has come for file {number} of {len(self._checksums)}")
            if patches.checksum(self._mapped(number)) != expected:
                raise patches.PatchError(f"{self._places[number][0]} was changed since its patch")

    def _mapped(self, number: int) -> patches.ByteArray:
        path, offset = self._places[number]
        return np.memmap(path, np.uint8, "r+", offset=offset)


def mount(app: "FastAPI", folder: str, model: str) -> None:
    """Add to a server the routes that ``slipstream.rollout.engine.client`` calls for its replica.

    ``model``: the checkpoint from which the server starts.
    """
    from fastapi import Request
    from fastapi.responses import JSONResponse

    replica = Replica(Path(folder), StartingWeights(Path(model)))

    async def respond(work: Callable[[], int | None]) -> JSONResponse:
        try:
            version = await asyncio.to_thread(work)
        except (patches.PatchError, msgspec.MsgspecError, OSError) as error:
            return JSONResponse({"message": f"{type(error).__name__}: {error}"}, 409)
        return JSONResponse({"folder": str(replica.folder), "version": version})

    @app.get(ROUTE)
    async def version() -> JSONResponse:
        return await respond(replica.version)

    @app.post(f"{ROUTE}/begin")
    async def begin(request: Request) -> JSONResponse:
        body = await request.body()
        return await respond(lambda: replica.begin(msgspec.msgpack.decode(body, type=Opening)))

    @app.post(f"{ROUTE}/patch/{{number}}")
    async def patch(number: int, request: Request) -> JSONResponse:
        body = await request.body()
        return await respond(lambda: replica.patch(number, patches.decoded(body)))

    @app.post(f"{ROUTE}/commit/{{number}}")
    async def commit(number: int) -> JSONResponse:
        return await respond(lambda: replica.commit(number))

    @app.post(f"{ROUTE}/check/{{number}}")
    async def check(number: int) -> JSONResponse:
        return await respond(lambda: replica.check(number))
