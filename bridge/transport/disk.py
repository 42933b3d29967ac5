"""Write each version as a checkpoint to a directory that the sender and the engines share.

This serves engines that no process group can reach. The sender writes while the engines generate; in the
pause every engine reads the checkpoint. There is room for one version at a time: the last one goes before the
next one is written, when every engine has read it.
"""

import asyncio
import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from slipstream.bridge.group.pinned import PinnedPool
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.hf.kept import NOTHING_KEPT, Kept
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import NoRoom, Publication

FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTransport:
    """Keeps one directory per version. A directory is complete once it has its final name."""

    def __init__(
        self,
        folder: Path,
        source: Path,
        written: Callable[[Path], object] | None = None,
        *,
        dtype: torch.dtype | None = None,
        quantization: Mapping[str, object] | None = None,
        kept: Kept = NOTHING_KEPT,
    ) -> None:
        """``folder``: of the versions of this run alone. ``source``: the checkpoint whose config and
        tokenizer belong to the weights. ``written``: called in a thread with the directory of each version
        that is complete, before any engine reads it. ``dtype``, ``quantization`` and ``kept``: as
        in ``write_hf``.
        """
        self._folder = folder
        self._source = source
        self._kept = kept
        self._written = written
        self._dtype = dtype
        self._quantization = quantization
        self._pool = PinnedPool()

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.report.timed("write"):
            size = await buckets.hand_over(lambda buckets: self._write(buckets, publication.version))
        publication.report.bytes_sent += size
        if self._written is not None:
            await asyncio.to_thread(self._written, self._folder_of(publication.version))

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        folder, version = self._folder_of(publication.version), publication.version
        await publication.each(
            "load",
            lambda engine: engine.load_files(folder, version=version),
            moves_weights=True,
        )

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"version-{version:08d}"

    def _write(self, buckets: Iterator[FlatBucket | None], version: int) -> int:
        self._remove()
        try:
            return write_hf(
                self._on_host(buckets),
                self._source,
                self._folder_of(version),
                dtype=self._dtype,
                quantization=self._quantization,
                kept=self._kept,
            )
        except (OSError, SafetensorError) as error:
            if not _is_full(error):
                raise
            self._remove()
            free = f"{shutil.disk_usage(self._folder).free / 2**30:.2f} GiB are free"
            raise NoRoom(
                f"make room in {self._folder} (weights.transport.path), where {free}: {error}"
            ) from error

    def _on_host(self, buckets: Iterator[FlatBucket | None]) -> Iterator[FlatBucket | None]:
        for bucket in buckets:
            if bucket is None:
                yield None
                continue
            copied = self._pool.copy(bucket.flat)
            try:
                yield replace(bucket, flat=copied)
            finally:
                self._pool.give_back(copied)

    def _remove(self) -> None:
        """Remove every version, whole or begun."""
        for folder in (
            *self._folder.glob("version-????????"),
            *self._folder.glob(".version-????????.partial"),
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _is_full(error: OSError | SafetensorError) -> bool:
    # safetensors passes an error of the system on as text.
    return any(
        error.errno == code if isinstance(error, OSError) else f"(os error {code})" in str(error)
        for code in FULL
    )
