"""The size of Ray's object store: enough for the largest batch, and no more than the machine has."""

import pickle

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.cluster.object_store import (
    BYTES_PER_TOKEN,
    MINIMUM,
    batch_bytes,
    free_memory,
    free_shared_memory,
    object_store,
    too_small,
)
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span, TrajectoryBuilder

GIB = 2**30


def batch_of(trajectories: int, turns: int, turn: int) -> TrainBatch:
    """A batch whose trajectories have ``turns`` judged turns of ``turn`` tokens, of two versions each."""
    built = []
    for number in range(trajectories):
        builder = TrajectoryBuilder([100_000 + number])
        for _ in range(turns):
            ids = tuple(range(100_000, 100_000 + turn))
            spans = (Span(10**6, 0, turn // 2), Span(10**6 + 1, turn // 2, turn))
            builder.add_completion(Completion(ids, (-0.1,) * turn, spans, Finish.STOP))
            builder.reward_turn(0.5)
        built.append(builder.build())
    return TrainBatch(10**6, tuple(built), np.arange(trajectories))


def sent_bytes(batch: TrainBatch) -> int:
    """What Ray writes for it: pickled, with the arrays beside."""
    arrays: list[pickle.PickleBuffer] = []
    text = pickle.dumps(batch, protocol=5, buffer_callback=arrays.append)
    return len(text) + sum(array.raw().nbytes for array in arrays)


@pytest.mark.parametrize(("trajectories", "turns", "turn"), [(64, 1, 20), (16, 1, 4000), (8, 20, 100)])
def test_a_batch_is_no_larger_than_its_bound_and_not_much_smaller(trajectories: int, turns: int, turn: int):
    bound = batch_bytes(trajectories, turns * turn + 1)
    sent = sent_bytes(batch_of(trajectories, turns, turn))
    assert sent <= bound
    if turn > 1000:
        assert sent > 0.9 * bound


def test_the_store_holds_two_of_the_largest_batches():
    batch = batch_bytes(512 * 8, 16_384)  # more than a GiB
    assert batch > GIB
    store = object_store(batch, shared_memory=256 * GIB, memory=512 * GIB)
    assert store.size > 2 * batch
    assert (store.in_shared_memory, store.note) == (True, None)


def test_a_small_recipe_takes_little():
    store = object_store(batch_bytes(16 * 8, 128), shared_memory=8 * GIB, memory=16 * GIB)
    assert store.size < 200 * 2**20
    assert store.note is None


def test_the_store_leaves_room_in_shared_memory_and_says_when_a_batch_may_not_fit():
    store = object_store(10 * GIB, shared_memory=4 * GIB, memory=512 * GIB)
    assert store.in_shared_memory
    assert store.size < 4 * GIB
    assert store.note is not None
    for part in ("10240 MiB", "4096 MiB of /dev/shm", "--shm-size"):
        assert part in store.note


def test_room_for_one_batch_is_no_reason_to_complain():
    assert object_store(2 * GIB, shared_memory=4 * GIB, memory=512 * GIB).note is None


def test_where_shared_memory_is_less_than_ray_accepts_the_store_is_a_file():
    store = object_store(GIB, shared_memory=64 * 2**20, memory=16 * GIB)  # Docker's default
    assert not store.in_shared_memory
    assert store.size >= MINIMUM
    assert "is in a file" in (store.note or "")


def test_memory_bounds_the_store_too():
    assert object_store(100 * GIB, shared_memory=256 * GIB, memory=10 * GIB).size <= 3 * GIB


def test_a_jobs_store_that_cannot_hold_a_batch_is_named_with_the_remedy():
    assert too_small(8 * GIB, GIB) is None
    assert "SLIPSTREAM_OBJECT_STORE" in (too_small(100_000_000, GIB) or "")


def test_this_machine_has_memory():
    assert free_memory() > 0
    assert free_shared_memory() > 0


def test_the_bytes_of_a_token_are_those_of_its_arrays():
    trajectory = batch_of(1, 1, 4).trajectories[0]
    arrays = (trajectory.tokens_T, trajectory.logprobs_T, trajectory.versions_T, trajectory.loss_mask_T)
    assert sum(array.itemsize for array in arrays) == BYTES_PER_TOKEN
