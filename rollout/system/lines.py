"""Files of one record a line, which a killed run may leave with half a line at the end."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast


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
