"""Write each version as a checkpoint to a directory that the sender and the engines share.

This serves engines that no process group can reach. The sender writes while the engines generate; in the
pause every engine reads the checkpoint.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.files import write_hf
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication

KEPT = 2
"""Versions that stay on disk: an engine that was given up may notice it late and still read the older one."""


class DiskTransport:
    """Keeps one directory per version. A directory is complete once it has its final name."""

    def __init__(self, folder: Path, source: Path, written: Callable[[Path], object] | None = None) -> None:
        """``source``: the checkpoint whose config and tokenizer belong to the weights. ``written``: called in
        a thread with the directory of each version that is complete, before any engine reads it.
        """
        self._folder = folder
        self._source = source
        self._written = written

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.report.timed("write"):
            size = await buckets.hand_over(lambda buckets: self._write(buckets, publication.version))
        publication.report.bytes_sent += size
        if self._written is not None:
            await asyncio.to_thread(self._written, self._folder_of(publication.version))

    async def update(self, publication: Publication, buckets: BucketStream, *, flush_cache: bool) -> None:
        folder, version = self._folder_of(publication.version), publication.version
        await publication.each(
            "load",
            lambda engine: engine.load_files(folder, flush_cache=flush_cache, version=version),
            moves_weights=True,
        )

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"version-{version:08d}"

    def _write(self, buckets: Iterator[FlatBucket | None], version: int) -> int:
        obsolete = sorted(self._folder.glob("version-*"))[: -(KEPT - 1) or None]
        size = write_hf(buckets, self._source, self._folder_of(version))
        for folder in obsolete:
            if folder != self._folder_of(version):
                shutil.rmtree(folder, ignore_errors=True)
        return size
