"""Files that are whole at any instant, also after a power cut."""

import os
from pathlib import Path


def write_durably(path: Path, content: str | bytes, *, draft: str = "tmp", mode: int = 0o666) -> None:
    """Replace the file at ``path``. At any instant a reader finds the old file or the new one.

    The content is written into a hidden file beside it, which ends in ``draft``, and renamed when it is on
    disk. Writers that may meet need different ``draft``s. ``mode``: largest permissions of the file. Raises
    OSError; the old file is intact then.
    """
    beside = path.with_name(f".{path.name}.{draft}")
    beside.unlink(missing_ok=True)  # a file that is left there may have other permissions
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk: without this a power cut may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
