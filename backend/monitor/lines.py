"""Files of one record a line, which a killed run may leave with half a line at the end."""

import os
from pathlib import Path


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
