"""Checksums of files, and writes that survive a power cut."""

import os
import zlib
from pathlib import Path

CHUNK = 2**24
"""Bytes per read."""


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def synced_checksum(path: Path) -> int:
    """Wait until a file is on disk, and return its CRC-32."""
    _sync(path, os.O_RDONLY)
    return checksum(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk: without this a power cut may undo a rename."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
