"""The buffer of a micro-batch, and the padded batches that plain attention makes of a pack."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.megatron.device_batch import ALIGNMENT, fill, slots_of, unpacking_of
from tests.tries import tries

DTYPES = ("int64", "int32", "float32", "float64", "bool", "uint8")


@tries(20)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=2).map(tuple)), max_size=8
    )
)
def test_arrays_come_out_of_one_buffer_as_they_went_in(kinds):
    rng = np.random.default_rng(0)
    arrays = {
        str(number): rng.integers(0, 2, shape).astype(dtype) for number, (dtype, shape) in enumerate(kinds)
    }
    slots, size = slots_of(arrays)
    buffer = np.full(size, 255, np.uint8)
    fill(buffer, slots, arrays)
    for name, array in arrays.items():
        slot = slots[name]
        assert slot.start % ALIGNMENT == 0
        out = buffer[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)
        assert out.dtype == array.dtype and np.array_equal(out, array)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [3, 0, 7, 64, 1], [2] * 20, [100, 1, 99]])
def test_padded_batches_hold_every_token_once_and_give_it_back(lengths):
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    nothing = np.zeros(len(lengths), np.int64)
    unpacking = unpacking_of(cu_seqlens, nothing, np.empty((0, 3), np.int64))
    assert sum(rows * width for rows, width in unpacking.shapes) == len(unpacking.gather)
    assert np.array_equal(unpacking.gather[unpacking.restore_T], np.arange(cu_seqlens[-1]))
    segment_T = np.repeat(np.arange(len(lengths)), lengths)
    first = 0
    for rows, width in unpacking.shapes:
        for row in unpacking.gather[first : first + rows * width].reshape(rows, width):
            assert len(set(segment_T[row])) == 1  # one segment, in order, its last token repeated
            length = lengths[segment_T[row[0]]]
            start = cu_seqlens[segment_T[row[0]]]
            assert row.tolist() == [start + min(i, length - 1) for i in range(width)]
            assert width < 2 * length or width == 1
        first += rows * width
