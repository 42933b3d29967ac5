"""A checkpoint in a folder that sender and engines see, for engines that no process group can reach.

It is written while they generate; in the pause every engine reads it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from slipstream.bridge.export import FlatBucket
from slipstream.bridge.hf_files import write_hf
from slipstream.bridge.publication import Buckets, Publication

KEPT = 2
"""Versions that stay: one may still be read by an engine that is slow to notice that it was given up."""


class DiskTransport:
    """One folder for each version. It is complete when it has its name: it is renamed to it at the end."""

    def __init__(self, folder: Path, source: Path) -> None:
        """``source``: the checkpoint whose config and tokenizer belong to the weights."""
        self._folder = folder
        self._source = source

    async def prepare(self, publication: Publication, buckets: Buckets) -> None:
        with publication.report.timed("write"):
            size = await buckets.into(lambda buckets: self._write(buckets, publication.version))
        publication.report.bytes_sent += size

    async def update(self, publication: Publication, buckets: Buckets, *, flush_cache: bool) -> None:
        folder, version = self._of(publication.version), publication.version
        await publication.each(
            "load",
            lambda engine: engine.load_files(folder, flush_cache=flush_cache, version=version),
            moves_weights=True,
        )

    def _of(self, version: int) -> Path:
        return self._folder / f"version-{version:08d}"

    def _write(self, buckets: Iterator[FlatBucket | None], version: int) -> int:
        old = sorted(self._folder.glob("version-*"))[: -(KEPT - 1) or None]
        size = write_hf(buckets, self._source, self._of(version))
        for folder in old:
            if folder != self._of(version):
                shutil.rmtree(folder, ignore_errors=True)
        return size
