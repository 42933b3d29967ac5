"""A copy of the weights beside an engine, kept up to date by patches: the far end of the delta transport.

    begin    which tensors are in which file; files that are so already keep what they hold
    patch    one file becomes that of the next version, in place
    commit   all files are of that version, and the engine may load them

The files are safetensors, so that the engine loads them as it does any checkpoint. Their folder is memory
(/dev/shm) and belongs to one server, with which it goes.

``mount`` is named by its import path where engines are started: ``rollout`` does not know the bridge.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from slipstream.bridge import delta
from slipstream.bridge.hf_index import INDEX, ITEMSIZE, SPELLINGS

if TYPE_CHECKING:
    from fastapi import FastAPI

ROUTE = "/slipstream/replica"

ALIGNMENT = 64
"""Bytes: where the tensors of a file begin."""


class File(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of one bucket, back to back."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """As torch spells it."""

    def header(self) -> bytes:
        """What comes before the tensors in a safetensors file."""
        sizes = [prod(shape) * ITEMSIZE[self.dtype] for shape in self.shapes]
        places = pairwise(accumulate(sizes, initial=0))
        tensors = {
            name: {"dtype": SPELLINGS[self.dtype], "shape": shape, "data_offsets": place}
            for name, shape, place in zip(self.names, self.shapes, places, strict=True)
        }
        text = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        return sum(map(prod, self.shapes)) * ITEMSIZE[self.dtype]


class Replica:
    """The files of one version, or of none while they change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marker = folder / "version"
        self._places: list[tuple[Path, int]] = []
        """Of each file: its path, and the bytes before its tensors."""
        # A caller that has given up a call may have begun the next one.
        self._lock = threading.Lock()

    def version(self) -> int | None:
        with self._lock:
            return int(self._marker.read_text()) if self._marker.exists() else None

    def begin(self, files: list[File]) -> None:
        """Raises OSError where there is no room."""
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._marker.unlink(missing_ok=True)
            names = [f"model-{number:05d}.safetensors" for number in range(1, len(files) + 1)]
            for old in self.folder.glob("*.safetensors"):
                if old.name not in names:
                    old.unlink()
            self._places = [self._file(name, file) for name, file in zip(names, files, strict=True)]
            weight_map = {
                tensor: name for name, file in zip(names, files, strict=True) for tensor in file.names
            }
            (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def _file(self, name: str, file: File) -> tuple[Path, int]:
        path, header = self.folder / name, file.header()
        with path.open("a+b") as opened:
            opened.seek(0)
            if opened.read(len(header)) != header:
                opened.truncate(0)
                opened.write(header)
                opened.flush()
            opened.truncate(len(header) + file.size)
            # Room that turns out to be missing later, when the mapped file is written to, ends the process.
            os.posix_fallocate(opened.fileno(), 0, len(header) + file.size)
        return path, len(header)

    def patch(self, number: int, patch: delta.Patch) -> None:
        """File ``number``, from 0. Raises PatchError; the file may hold anything then."""
        with self._lock:
            if not 0 <= number < len(self._places):
                raise delta.PatchError(f"file {number} was never announced, {len(self._places)} were")
            path, offset = self._places[number]
            mapped = np.memmap(path, np.uint8, "r+", offset=offset)
            delta.apply(patch, mapped)

    def commit(self, version: int) -> None:
        with self._lock:
            self._marker.write_text(str(version))


def mount(app: "FastAPI", folder: str) -> None:
    """Give a server the routes that ``slipstream.rollout.engine.client`` asks for its replica."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    replica = Replica(Path(folder))

    async def answer(work: Callable[..., Any], *args: Any) -> JSONResponse:
        try:
            found = await asyncio.to_thread(work, *args)
        except (delta.PatchError, msgspec.MsgspecError, OSError) as error:
            return JSONResponse({"message": f"{type(error).__name__}: {error}"}, 409)
        return JSONResponse({"folder": str(replica.folder), "version": found})

    @app.get(ROUTE)
    async def version() -> JSONResponse:
        return await answer(replica.version)

    @app.post(f"{ROUTE}/begin")
    async def begin(request: Request) -> JSONResponse:
        body = await request.body()
        return await answer(lambda: replica.begin(msgspec.msgpack.decode(body, type=list[File])))

    @app.post(f"{ROUTE}/patch/{{number}}")
    async def patch(number: int, request: Request) -> JSONResponse:
        body = await request.body()
        return await answer(lambda: replica.patch(number, delta.decoded(body)))

    @app.post(f"{ROUTE}/commit/{{number}}")
    async def commit(number: int) -> JSONResponse:
        return await answer(replica.commit, number)
