"""The files of a sandbox: how much there is of them."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from slipstream.rollout.sandbox import root
from slipstream.rollout.sandbox.enclosure import Enclosure
from slipstream.rollout.sandbox.interface import LimitName


class Disk:
    """Compares the files of a sandbox with their limits."""

    def __init__(self, enclosure: Enclosure, size: int, file_size: int) -> None:
        """``size``: bytes of all files together; ``file_size``: bytes of the largest."""
        self._enclosure = enclosure
        self._size = size
        self._file_size = file_size
        self._most_files = root.most_files(size)
        # A command that finds a full sandbox may make room.
        self._was_full = enclosure.has_namespaces and self._is_full()

    def exceeded(self, thorough: bool = False) -> LimitName | None:
        """Return the limit that files have reached. ``thorough``: look at each file."""
        if self._enclosure.has_namespaces:
            if self._is_full() and not self._was_full:
                return "disk"
            if not thorough:
                return None
        count, used, largest = 0, 0, 0
        for status in self._entries():
            count += 1
            used += status.st_blocks * 512
            largest = max(largest, status.st_size if stat.S_ISREG(status.st_mode) else 0)
        if count > self._most_files or used > self._size:
            return "disk"
        return "file_size" if thorough and largest >= self._file_size else None

    def _is_full(self) -> bool:
        status = os.statvfs(self._enclosure.folder)
        return status.f_bavail == 0 or status.f_favail == 0

    def _entries(self) -> Iterator[os.stat_result]:
        """Yield all files and folders of the sandbox; readable ones of the machine, shown there, are none."""
        todo = [self._enclosure.folder, self._enclosure.temporary]
        todo += [root.SHARED] if self._enclosure.has_namespaces else []
        devices = {os.stat(folder).st_dev for folder in todo}
        count = 0
        while todo and count <= self._most_files:
            with suppress(OSError):  # files come and go
                for entry in os.scandir(todo.pop()):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev not in devices:
                        continue
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    yield status
