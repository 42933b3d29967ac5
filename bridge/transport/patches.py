"""Encode the changes of a bucket of weights from one version to the next in few bytes.

Most bfloat16 weights do not change between two versions, because a step is smaller than half their last bit;
the others move by a bit or two. A patch therefore holds the gaps between the positions that change, and the
increase of the bits at each position, read as an integer:

    chunk    CHUNK elements
    gaps     one byte each; 255 means: add 255 to the next byte
    steps    modulo 2^bits, zigzag (0, -1, 1, -2 ... as 0, 1, 2, 3 ...); all low bytes, then all next bytes

Both are compressed by zlib at its fastest level. The arithmetic is exact: the result has the bits of the new
version, NaN and negative zeros included, and a checksum verifies it.
"""

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

ByteArray: TypeAlias = NDArray[np.uint8]
"""[bytes of a bucket]"""
Elements: TypeAlias = NDArray[np.unsignedinteger]
"""[elements of a bucket], the bits of each as an integer"""

CHUNK = 1 << 22
"""Elements that are encoded at a time, which bounds the memory needed besides the bucket."""

WORTHWHILE = 0.9
"""A patch larger than this share of the bucket is replaced by the bucket itself."""

ESCAPE = 255
LEVEL = 1
ROW = 1024

_pool = ThreadPoolExecutor(thread_name_prefix="delta")


class PatchError(ValueError):
    """The data is not a patch, or it does not lead to the bytes that it was made for."""


class Chunk(msgspec.Struct, array_like=True):
    changed: int
    gaps: bytes
    steps: bytes


class Patch(msgspec.Struct, array_like=True):
    """The changes that turn one bucket into another."""

    itemsize: int
    size: int
    """Bytes of the bucket."""
    checksum: bytes
    """Checksum of the result."""
    chunks: list[Chunk] | None
    """None: ``whole`` is the result."""
    whole: bytes = b""


def encoded(patch: Patch) -> bytes:
    return msgspec.msgpack.encode(patch)


def decoded(data: bytes) -> Patch:
    """Raises PatchError."""
    try:
        return msgspec.msgpack.decode(data, type=Patch)
    except msgspec.MsgspecError as error:
        raise PatchError(f"not a patch: {error}") from error


def checksum(data: ByteArray) -> bytes:
    """Return 16 bytes: sums of 64-bit words by their place in rows of 8 KiB, then SHA-256.

    It runs at the speed of memory. It detects accidental damage (flipped bits, blocks that are missing or at
    a wrong place in the row) and is no protection against tampering.
    """
    body = len(data) // (8 * ROW) * (8 * ROW)
    sums = data[:body].view(np.uint64).reshape(-1, ROW).sum(axis=0, dtype=np.uint64)
    digest = hashlib.sha256(sums.tobytes())
    digest.update(data[body:].tobytes())
    digest.update(len(data).to_bytes(8, "little"))
    return digest.digest()[:16]


def whole(new: ByteArray, itemsize: int) -> Patch:
    """Return a patch that needs no base."""
    return Patch(itemsize, len(new), checksum(new), None, new.tobytes())


def difference(base: ByteArray, new: ByteArray, itemsize: int) -> Patch:
    """Return the patch from ``base`` to ``new``, which consist of elements of ``itemsize`` bytes."""
    base_chunks, new_chunks = (_cut(data.view(f"u{itemsize}")) for data in (base, new))
    chunks = list(_pool.map(_difference, base_chunks, new_chunks))
    if sum(len(chunk.gaps) + len(chunk.steps) for chunk in chunks) > WORTHWHILE * len(new):
        return whole(new, itemsize)
    return Patch(itemsize, len(new), checksum(new), chunks)


def apply(patch: Patch, target: ByteArray) -> None:
    """Change ``target`` in place. After a PatchError its content is undefined."""
    if patch.size != len(target) or patch.itemsize not in (1, 2, 4, 8) or patch.size % patch.itemsize:
        raise PatchError(
            f"a patch for {patch.size} bytes of {patch.itemsize}-byte elements, the bucket has {len(target)}"
        )
    if patch.chunks is None:
        if len(patch.whole) != len(target):
            raise PatchError(f"{len(patch.whole)} bytes arrived, the bucket has {len(target)}")
        target[:] = np.frombuffer(patch.whole, np.uint8)
    else:
        places = _cut(target.view(f"u{patch.itemsize}"))
        if len(patch.chunks) != len(places):
            raise PatchError(f"{len(patch.chunks)} chunks arrived, the bucket has {len(places)}")
        list(_pool.map(_apply, patch.chunks, places))
    if checksum(target) != patch.checksum:
        raise PatchError("the result has another checksum")


def _cut(elements: Elements) -> list[Elements]:
    return [elements[start : start + CHUNK] for start in range(0, len(elements), CHUNK)]


def _difference(base: Elements, new: Elements) -> Chunk:
    positions = np.flatnonzero(base != new)
    steps = new[positions] - base[positions]
    signed = steps.view(f"i{steps.itemsize}")
    zigzag = (steps << 1) ^ (signed >> (8 * steps.itemsize - 1)).view(steps.dtype)
    planes = zigzag.view(np.uint8).reshape(-1, steps.itemsize).T
    return Chunk(
        len(positions), zlib.compress(_gaps(positions), LEVEL), zlib.compress(planes.tobytes(), LEVEL)
    )


def _apply(chunk: Chunk, place: Elements) -> None:
    itemsize = place.itemsize
    if not 0 <= chunk.changed <= len(place):
        raise PatchError(f"{chunk.changed} changes in {len(place)} elements")
    planes = _inflated(chunk.steps, chunk.changed * itemsize)
    positions = _positions(_inflated(chunk.gaps, chunk.changed + len(place) // ESCAPE))
    if (
        len(positions) != chunk.changed
        or len(planes) != chunk.changed * itemsize
        or (len(positions) and positions[-1] >= len(place))
    ):
        raise PatchError(f"{chunk.changed} changes were announced, {len(positions)} arrived")
    zigzag = np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(place.dtype)[:, 0]
    unit = place.dtype.type(1)
    place[positions] += (zigzag >> unit) ^ (~(zigzag & unit) + unit)


def _gaps(positions: NDArray[np.int64]) -> bytes:
    """Encode ascending positions as the bytes of the gaps before them."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes, last = np.divmod(gaps, ESCAPE)
    encoded_gaps = np.full(int(escapes.sum()) + len(gaps), ESCAPE, np.uint8)
    encoded_gaps[np.cumsum(escapes + 1) - 1] = last
    return encoded_gaps.tobytes()


def _positions(gaps: ByteArray) -> NDArray[np.int64]:
    """Reverse ``_gaps``."""
    ends = gaps != ESCAPE
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))


def _inflated(data: bytes, limit: int) -> ByteArray:
    """Decompress at most ``limit`` bytes: a patch must not claim more memory than the bucket has."""
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, max(limit, 1))
    except zlib.error as error:
        raise PatchError(f"not compressed data: {error}") from error
    if not inflater.eof:
        raise PatchError(f"more than the {limit} bytes that the bucket permits")
    return np.frombuffer(content, np.uint8)
