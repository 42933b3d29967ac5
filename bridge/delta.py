"""What changes in a bucket of weights from one version to the next, in few bytes.

Between two versions most bfloat16 weights stay what they are, since a step is smaller than half their last
bit, and those that change move by a bit or two. So a patch holds the gaps between the positions that change,
and by how much the bits at each, read as an integer, grow:

    chunk    CHUNK elements
    gaps     one byte each; 255 means 255 and the next byte besides
    steps    modulo 2^bits, zigzag (0, -1, 1, -2 ... as 0, 1, 2, 3 ...); all low bytes, then all next ones

Both are then compressed by zlib, as fast as it goes. The arithmetic is exact: the result has the bits of the
new version, NaN and negative zeros included, and its checksum says so.
"""

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

CHUNK = 1 << 22
"""Elements that are encoded at a time, so that little memory is needed besides the bucket."""

WORTHWHILE = 0.9
"""A patch that is larger than this part of the bucket is not sent: the bucket itself is."""

ESCAPE = 255
LEVEL = 1
ROW = 1024

_pool = ThreadPoolExecutor(thread_name_prefix="delta")


class PatchError(ValueError):
    """A patch that is none, or does not lead to the bytes that it was made for."""


class Chunk(msgspec.Struct, array_like=True):
    changed: int
    gaps: bytes
    steps: bytes


class Patch(msgspec.Struct, array_like=True):
    """How a bucket becomes another one."""

    itemsize: int
    size: int
    """Bytes of the bucket."""
    checksum: bytes
    """Of the result."""
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


def checksum(data: np.ndarray) -> bytes:
    """Of uint8 [n]: sums of 64-bit words by their place in rows of 8 KiB, then SHA-256.

    As fast as memory is read. It finds what goes wrong by accident (flipped bits, blocks that are missing or
    out of their place in the row), and is no defence against intent.
    """
    body = len(data) // (8 * ROW) * (8 * ROW)
    sums = data[:body].view(np.uint64).reshape(-1, ROW).sum(axis=0, dtype=np.uint64)
    found = hashlib.sha256(sums.tobytes())
    found.update(data[body:].tobytes())
    found.update(len(data).to_bytes(8, "little"))
    return found.digest()[:16]


def whole(new: np.ndarray, itemsize: int) -> Patch:
    """The patch that needs no base."""
    return Patch(itemsize, len(new), checksum(new), None, new.tobytes())


def difference(base: np.ndarray, new: np.ndarray, itemsize: int) -> Patch:
    """From ``base`` to ``new``, both uint8 [n] of elements of ``itemsize`` bytes."""
    b, n = base.view(f"u{itemsize}"), new.view(f"u{itemsize}")
    chunks = list(_pool.map(_difference, _cut(b), _cut(n)))
    if sum(len(chunk.gaps) + len(chunk.steps) for chunk in chunks) > WORTHWHILE * len(new):
        return whole(new, itemsize)
    return Patch(itemsize, len(new), checksum(new), chunks)


def apply(patch: Patch, target: np.ndarray) -> None:
    """Change ``target``, uint8 [n], in place. Raises PatchError; ``target`` may be anything then."""
    if patch.size != len(target) or patch.itemsize not in (1, 2, 4, 8) or patch.size % patch.itemsize:
        raise PatchError(
            f"a patch for {patch.size} bytes of {patch.itemsize}-byte elements, the bucket has {len(target)}"
        )
    if patch.chunks is None:
        if len(patch.whole) != len(target):
            raise PatchError(f"{len(patch.whole)} bytes came, the bucket has {len(target)}")
        target[:] = np.frombuffer(patch.whole, np.uint8)
    else:
        places = _cut(target.view(f"u{patch.itemsize}"))
        if len(patch.chunks) != len(places):
            raise PatchError(f"{len(patch.chunks)} chunks came, the bucket has {len(places)}")
        list(_pool.map(_apply, patch.chunks, places))
    if checksum(target) != patch.checksum:
        raise PatchError("the result has another checksum")


def _cut(elements: np.ndarray) -> list[np.ndarray]:
    return [elements[start : start + CHUNK] for start in range(0, len(elements), CHUNK)]


def _difference(base: np.ndarray, new: np.ndarray) -> Chunk:
    at = np.flatnonzero(base != new)
    steps = new[at] - base[at]
    signed = steps.view(f"i{steps.itemsize}")
    zigzag = (steps << 1) ^ (signed >> (8 * steps.itemsize - 1)).view(steps.dtype)
    planes = zigzag.view(np.uint8).reshape(-1, steps.itemsize).T
    return Chunk(len(at), zlib.compress(_gaps(at), LEVEL), zlib.compress(planes.tobytes(), LEVEL))


def _apply(chunk: Chunk, place: np.ndarray) -> None:
    itemsize = place.itemsize
    if not 0 <= chunk.changed <= len(place):
        raise PatchError(f"{chunk.changed} changes in {len(place)} elements")
    planes = _inflated(chunk.steps, chunk.changed * itemsize)
    at = _positions(_inflated(chunk.gaps, chunk.changed + len(place) // ESCAPE))
    if (
        len(at) != chunk.changed
        or len(planes) != chunk.changed * itemsize
        or (len(at) and at[-1] >= len(place))
    ):
        raise PatchError(f"{chunk.changed} changes were announced, {len(at)} came")
    zigzag = np.ascontiguousarray(planes.reshape(itemsize, -1).T).view(place.dtype)[:, 0]
    one = place.dtype.type(1)
    place[at] += (zigzag >> one) ^ (~(zigzag & one) + one)


def _gaps(at: np.ndarray) -> bytes:
    """Positions, ascending, as the bytes of the gaps before them."""
    gaps = np.diff(at, prepend=-1) - 1
    escapes, last = np.divmod(gaps, ESCAPE)
    found = np.full(int(escapes.sum()) + len(gaps), ESCAPE, np.uint8)
    found[np.cumsum(escapes + 1) - 1] = last
    return found.tobytes()


def _positions(gaps: np.ndarray) -> np.ndarray:
    """The reverse of ``_gaps``."""
    ends = gaps != ESCAPE
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))


def _inflated(data: bytes, most: int) -> np.ndarray:
    """At most ``most`` bytes: a patch must not be able to ask for more memory than the bucket has."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data, max(most, 1))
    except zlib.error as error:
        raise PatchError(f"not compressed data: {error}") from error
    if not inflater.eof:
        raise PatchError(f"more than the {most} bytes that can be")
    return np.frombuffer(found, np.uint8)
