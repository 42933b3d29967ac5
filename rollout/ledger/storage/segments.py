"""The files of payload: bytes are appended, and are overwritten only to forget them.

    payload/00000007    header | marker, frames of one transaction | marker, frames of the next one | ...

A segment is on disk before the rows that point into it are committed. So no row points at missing bytes, and
bytes to which no row points after the last commit are of a transaction that was cut off. Each process begins
a segment of its own, and another one whenever a segment has its size. A segment that no group needs is
deleted.

A marker says which transaction wrote the bytes that follow. So the segments show when the database has lost
transactions that it had committed.
"""

import os
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from slipstream.rollout.ledger.storage.database import LedgerError, explained
from slipstream.rollout.system.durable import sync_folder

FOLDER = "payload"
"""Name of the folder of all segments in the run folder."""

SEGMENT_BYTES = 64 << 20
"""Size from which no more is written to a segment."""

BUFFERS = 512
"""Buffers per call of the operating system, which takes 1,024."""

OPEN_FILES = 64
"""Segments kept open for reading."""

_HEADER = struct.Struct("<8s16sQ")
_HEADER_SIZE = _HEADER.size + 4
_MAGIC = b"slipseg1"
_MARKER = struct.Struct("<4s3Q")
MARKER_SIZE = _MARKER.size + 4
_MARKER_MAGIC = b"slip"

Buffer = bytes | memoryview


def checked(chunk: Buffer, crc: int) -> bytes:
    """Return a chunk that is not on disk yet. Raises LedgerError when it does not have its checksum."""
    if zlib.crc32(chunk) != crc:
        raise LedgerError(f"a chunk of {len(chunk)} bytes was damaged on its way to the ledger")
    return bytes(chunk)


class Part:
    """The bytes that one transaction adds to one segment."""

    __slots__ = ("frames", "segment", "start", "starts", "stop")

    def __init__(self, segment: int, start: int) -> None:
        self.segment = segment
        self.start = start
        """Offset at which the part begins, with its marker; 0: it begins with the header of a new segment."""
        self.frames: list[Buffer] = []
        self.starts: list[int] = []
        """Offset of each frame."""
        self.stop = start + MARKER_SIZE + (0 if start else _HEADER_SIZE)

    def add(self, frame: Buffer) -> int:
        """Append a frame, and return its offset."""
        offset = self.stop
        # In this order: another thread may look for a frame meanwhile, and goes by the offsets.
        self.frames.append(frame)
        self.starts.append(offset)
        self.stop = offset + len(frame)
        return offset

    def find(self, offset: int, size: int) -> Buffer | None:
        """Return bytes at ``offset`` if they are in this part."""
        number = bisect_right(self.starts, offset) - 1
        if number < 0:
            return None
        frame, begin = self.frames[number], offset - self.starts[number]
        return frame[begin : begin + size] if begin + size <= len(frame) else None


class _Descriptor:
    """A file that stays open until its last reader has let it go."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Segments:
    """The segments of one run. Any thread may read; one thread writes and deletes."""

    def __init__(self, folder: Path, run: bytes) -> None:
        """``run``: UUID of the run, which every segment names."""
        self.folder = folder
        self._run = run
        self._descriptors: dict[int, _Descriptor] = {}
        """Files open for reading, least recently used first."""
        self._lock = threading.Lock()
        """Held while ``_descriptors`` changes, never while a file is read."""
        self._newest: tuple[int, int] | None = None
        """Segment that was written to last, and its descriptor."""

    def path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}"

    def on_disk(self) -> list[int]:
        """Return the numbers of all segments that have a file, in ascending order."""
        if not self.folder.exists():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    # ---- writing

    def write(self, part: Part, sequence: int, begun: int) -> None:
        """Write a part and wait until it is on disk. Raises OSError.

        ``sequence``: number of the transaction. ``begun``: largest number of a version begun before.
        """
        descriptor = self._descriptor_for(part)
        marker = _MARKER.pack(_MARKER_MAGIC, sum(map(len, part.frames)), sequence, begun)
        head = [marker + zlib.crc32(marker).to_bytes(4, "little")]
        if not part.start:
            header = _HEADER.pack(_MAGIC, self._run, part.segment)
            head.insert(0, header + zlib.crc32(header).to_bytes(4, "little"))
        _write(descriptor, [*head, *part.frames], part.start)
        os.fdatasync(descriptor)
        if not part.start:
            sync_folder(self.folder)

    def _descriptor_for(self, part: Part) -> int:
        if self._newest is not None:
            segment, descriptor = self._newest
            if segment == part.segment:
                return descriptor
            self._newest = None
            os.close(descriptor)
        if not part.start and not self.folder.exists():
            self.folder.mkdir()
            sync_folder(self.folder.parent)
        flags = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if not part.start else 0)
        descriptor = os.open(self.path(part.segment), flags, 0o644)
        self._newest = (part.segment, descriptor)
        return descriptor

    def erase(self, segment: int, offset: int, size: int) -> None:
        """Write zeros over bytes that nobody may read again, and wait for the disk. Raises OSError."""
        try:
            descriptor = os.open(self.path(segment), os.O_WRONLY)
        except FileNotFoundError:
            return  # it was deleted with all that was in it
        try:
            _write(descriptor, [bytes(size)], offset)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def delete(self, segment: int) -> None:
        """Delete a segment, if it is there. Raises OSError."""
        with self._lock:
            self._descriptors.pop(segment, None)
        self.path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        if self._newest is not None:
            os.close(self._newest[1])
            self._newest = None
        self._descriptors.clear()

    # ---- reading

    def read(self, segment: int, offset: int, size: int, crc: int) -> bytes:
        """Return one chunk. Raises LedgerError, which names the file and the damage."""
        data = self._pread(segment, offset, size)
        if len(data) == size and zlib.crc32(data) == crc:
            return data
        raise LedgerError(
            f"{self.path(segment)}: {self.problem(segment, offset, size)} (byte {offset}): go on with "
            "`slipstream train RECIPE --resume`, which generates again what is damaged"
        )

    def raw(self, segment: int, offset: int, size: int) -> bytes:
        """Return bytes as they are, damaged or not; zeros where there are none."""
        return self._pread(segment, offset, size).ljust(size, b"\0")

    def has(self, segment: int, offset: int, size: int, crc: int) -> bool:
        """True if a chunk is there and undamaged. Raises LedgerError when that cannot be seen."""
        data = self._pread(segment, offset, size)
        return len(data) == size and zlib.crc32(data) == crc

    def problem(self, segment: int, offset: int, size: int) -> str:
        """Return what is wrong with a segment in which a chunk is not there or damaged."""
        path = self.path(segment)
        try:
            available = path.stat().st_size
        except FileNotFoundError:
            return "the file is missing"
        if self._header(segment) is None:
            return "the file does not begin as this segment of this run does"
        if available < offset + size:
            return f"the file ends after {available} bytes, before all that was written to it"
        return "its bytes are damaged"

    def _pread(self, segment: int, offset: int, size: int) -> bytes:
        try:
            descriptor = self._opened(segment)
            return os.pread(descriptor.number, size, offset)
        except (FileNotFoundError, OverflowError, ValueError):  # no file has such an offset or size
            return b""
        except OSError as error:
            raise _unreadable(self.path(segment), error) from error

    def _opened(self, segment: int) -> _Descriptor:
        with self._lock:
            descriptor = self._descriptors.pop(segment, None) or _Descriptor(self.path(segment))
            self._descriptors[segment] = descriptor  # the last one is the one used last
            if len(self._descriptors) > OPEN_FILES:
                del self._descriptors[next(iter(self._descriptors))]
            return descriptor

    def _header(self, segment: int) -> bytes | None:
        """Return the header of a segment; None if it is not the header of this segment of this run."""
        data = self._pread(segment, 0, _HEADER_SIZE)
        header = _HEADER.pack(_MAGIC, self._run, segment)
        return data if data == header + zlib.crc32(header).to_bytes(4, "little") else None

    def markers(self, segment: int) -> list[tuple[int, int]]:
        """Return the transactions that have written to a segment: their numbers, and the versions begun."""
        markers: list[tuple[int, int]] = []
        offset = _HEADER_SIZE
        if self._header(segment) is None:
            return []
        while len(data := self._pread(segment, offset, MARKER_SIZE)) == MARKER_SIZE:
            magic, size, sequence, begun = _MARKER.unpack(data[:-4])
            if magic != _MARKER_MAGIC or zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
                break
            markers.append((sequence, begun))
            offset += MARKER_SIZE + size
        return markers


def _write(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    for first in range(0, len(buffers), BUFFERS):
        batch = buffers[first : first + BUFFERS]
        size = sum(map(len, batch))
        written = os.pwritev(descriptor, batch, offset)
        while written < size:
            written += os.pwrite(descriptor, b"".join(batch)[written:], offset + written)
        offset += size


def _unreadable(path: Path, error: OSError) -> LedgerError:
    if isinstance(error, PermissionError):
        return LedgerError(f"{path}: {error.strerror}: give the user of this run access to the file")
    return explained(path, error)
