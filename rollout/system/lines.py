"""Files of one record a line, which a killed run may leave with half a line at the end."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from slipstream.rollout.system.disk import describe

MOST_WAITING = 64 << 20
"""Bytes of lines that wait in memory for a disk that takes none. Further lines are left out."""


class LineFile:
    """Appends lines to a file, each of them whole. Single thread.

    A disk that is full or fails ends nothing: the lines wait in memory, and the next ``flush`` tries again. A
    killed run may leave its last line unfinished; opening the file again removes that line.
    """

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        """``note``: hears when the file cannot be written, and when it can be again. Raises OSError."""
        drop_unfinished_line(path)
        self._path, self._note = path, note
        self._descriptor: int | None = self._opened()
        self._waiting = bytearray()
        self.left_out = 0
        """Number of lines that found no room since the disk fails. The owner may add to it."""
        self._fails = False

    def add(self, line: bytes) -> None:
        """Append a line, without its end, in memory."""
        if len(self._waiting) + len(line) < MOST_WAITING:
            self._waiting += line + b"\n"
        else:
            self.left_out += 1

    def flush(self) -> bool:
        """Write the lines that wait. Return False if the disk does not take them. Raises nothing."""
        try:
            if self._descriptor is None:
                self._descriptor = self._opened()
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            self._close()  # a file that has gone stale stays so until it is opened again
            if not self._fails:
                self._note(
                    f"{self._path.name} waits in memory, and the run goes on without it: {describe(error)}"
                )
            self._fails = True
            return False
        if self._fails:
            self._note(f"{self._path.name} is written again; {self.left_out} lines are missing in it")
        self._fails, self.left_out = False, 0
        return True

    def close(self) -> None:
        """Write the lines that wait, if the disk takes them, and close the file."""
        self.flush()
        self._close()

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def drop_unfinished_line(path: Path) -> None:
    """Cut off the last line of a file unless it is whole. Does nothing if there is no file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; the unfinished line of a running writer is skipped.

    Raises OSError.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                yield cast("dict[str, Any]", values)
