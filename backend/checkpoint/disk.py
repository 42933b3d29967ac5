"""Checksums of files."""

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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checksum(path)
