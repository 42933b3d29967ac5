"""Patches: for any two versions, applying a patch gives the bits of the new one, or an error."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bridge.transport import patches
from tests.tries import tries

SIZES = st.integers(0, 3000)


@st.composite
def versions(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Two versions of a bucket that differ in any part and in any way."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    n = draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, n * itemsize, dtype=np.uint8)
    new = base.copy()
    changes = rng.random(len(new)) < draw(st.sampled_from([0, 0.001, 0.05, 1]))
    new[changes] = rng.integers(0, 256, int(changes.sum()), dtype=np.uint8)
    return base, new, itemsize


@given(versions(), st.sampled_from([1, 7, 256, patches.CHUNK]))
@tries(40)
def test_a_patch_gives_every_bit_of_the_new_version(case, chunk):
    base, new, itemsize = case
    whole_chunk, patches.CHUNK = patches.CHUNK, chunk
    try:
        for patch in (patches.difference(base, new, itemsize), patches.whole(new, itemsize)):
            target = base.copy()
            patches.apply(patches.decoded(patches.encoded(patch)), target)
            assert target.tobytes() == new.tobytes()
    finally:
        patches.CHUNK = whole_chunk


def bfloat16_step(n: int = 200_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights before and after a small optimizer step, as bfloat16 bits in uint8."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, n).astype(np.float32)

    def rounded(values: np.ndarray) -> np.ndarray:
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)

    moved = weights + np.float32(1e-6) * np.sign(rng.normal(size=n)).astype(np.float32)
    return rounded(weights), rounded(moved)


def test_a_step_of_the_usual_size_changes_few_bytes():
    base, new = bfloat16_step()
    assert 0 < np.mean(base.view(np.uint16) != new.view(np.uint16)) < 0.1
    assert len(patches.encoded(patches.difference(base, new, 2))) < 0.05 * len(new)


def test_a_bucket_that_does_not_shrink_is_sent_whole():
    rng = np.random.default_rng(0)
    base, new = rng.integers(0, 256, (2, 4096), dtype=np.uint8)
    patch = patches.difference(base, new, 4)
    assert patch.chunks is None
    assert patch.whole == new.tobytes()


def test_a_patch_on_another_base_is_refused_by_its_checksum():
    base, new = bfloat16_step()
    other = base.copy()
    other[1234] ^= 1
    with pytest.raises(patches.PatchError, match="checksum"):
        patches.apply(patches.difference(base, new, 2), other)


@pytest.mark.parametrize("position", [0, 5000, 8191, 8192, 99_999])
def test_the_checksum_finds_any_flipped_bit_and_misplaced_word(position):
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    flipped, swapped = data.copy(), data.copy()
    flipped[position] ^= 8
    swapped[8:16], swapped[16:24] = data[16:24], data[8:16]
    assert len({patches.checksum(each) for each in (data, flipped, swapped, data[:-1])}) == 4


def malformed_patches() -> dict[str, patches.Patch]:
    """Malformed patches for a bucket of 100 two-byte elements."""
    base, new = np.zeros(200, np.uint8), np.zeros(200, np.uint8)
    new[10] = 1
    good = patches.difference(base, new, 2)
    assert good.chunks
    [chunk] = good.chunks
    bomb = patches.zlib.compress(bytes(10**6), 1)

    def changed(**fields) -> patches.Patch:
        return msgspec.structs.replace(good, chunks=[msgspec.structs.replace(chunk, **fields)])

    return {
        "of another size": msgspec.structs.replace(good, size=300),
        "of no itemsize": msgspec.structs.replace(good, itemsize=3),
        "with too few chunks": msgspec.structs.replace(good, chunks=[]),
        "with a part of the bucket": msgspec.structs.replace(good, chunks=None, whole=bytes(100)),
        "with more changes than elements": changed(changed=101),
        "with fewer changes than it says": changed(changed=2),
        "with negative changes": changed(changed=-1),
        "that is no compressed data": changed(gaps=b"x"),
        "that is cut off": changed(steps=chunk.steps[:-3]),
        "that inflates without end": changed(gaps=bomb),
        "that inflates its steps without end": changed(steps=bomb),
        "that reaches behind the end": changed(gaps=patches.zlib.compress(bytes([100]))),
    }


@pytest.mark.parametrize("name", malformed_patches())
def test_a_malformed_patch_is_an_error(name):
    with pytest.raises(patches.PatchError):
        patches.apply(malformed_patches()[name], np.zeros(200, np.uint8))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"a": 1})])
def test_bytes_that_are_not_a_patch_are_an_error(data):
    with pytest.raises(patches.PatchError, match="not a patch"):
        patches.decoded(data)
