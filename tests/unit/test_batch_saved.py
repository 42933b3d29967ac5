"""A saved batch is the batch that was saved, and a file that is none is refused with its name."""

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load

from slipstream.backend.batch.saved import BatchFileError, batch_path, read_batch, saved_batch
from slipstream.backend.batch.train_batch import EncodedBatch, TrainBatch
from slipstream.backend.driver.modes.halves import saved_batches, trainer_half
from slipstream.backend.driver.start.inputs import InputError
from slipstream.rollout.tokens.record import encode_trajectory
from tests.integration.test_megatron_parity import config_for, make_batch


def encoded(batch: TrainBatch) -> EncodedBatch:
    chunks = [encode_trajectory(trajectory) for trajectory in batch.trajectories]
    return EncodedBatch(
        batch.version,
        tuple(trajectory.header for trajectory in batch.trajectories),
        np.frombuffer(b"".join(chunks), np.uint8),
        tuple(map(len, chunks)),
        batch.group_N,
        lags={version: batch.version - version for version in range(batch.version + 1)},
        turn_advantages={0: (0.5, None)},
        given_rewards=(0.25,) * len(batch.trajectories),
        response_masks=tuple((1,) for _ in batch.trajectories),
    )


def save(folder: Path, step: int, batch: EncodedBatch) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = batch_path(folder, step)
    path.write_bytes(saved_batch(batch))
    return path


def test_every_field_of_a_batch_comes_back(tmp_path):
    batch = encoded(make_batch(101, n=6, version=3))
    read = read_batch(save(tmp_path, 1, batch))
    for name in ("version", "headers", "sizes", "lags", "turn_advantages", "given_rewards", "response_masks"):
        assert getattr(read, name) == getattr(batch, name), name
    assert np.array_equal(read.chunks, batch.chunks) and np.array_equal(read.group_N, batch.group_N)
    assert saved_batch(read) == saved_batch(batch)


def test_the_fields_of_a_file_stand_where_files_of_before_have_them(tmp_path):
    batch = encoded(make_batch(101, n=2, version=3))
    stored = msgspec.msgpack.decode(load(saved_batch(batch))["fields"].tobytes())
    assert (stored[:2], len(stored[2])) == (["slipstream-batch-1", 3], 2)
    lags = {version: 3 - version for version in range(4)}
    assert stored[3:] == [lags, {0: [0.5, None]}, [0.25, 0.25], [[1], [1]], 1.0, None]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"{}" + data,
        lambda data: data.replace(b"slipstream-batch-1", b"slipstream-batch-2"),
        lambda data: data.replace(b'"chunks"', b'"others"'),
    ],
    ids=["empty", "cut off", "no safetensors", "another format", "another tensor"],
)
def test_a_file_that_is_no_batch_is_refused_by_name(tmp_path, damage):
    path = save(tmp_path, 1, encoded(make_batch(101, n=2)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BatchFileError, match=re.escape(f"{path}: ")):
        read_batch(path)


def test_batches_are_found_in_the_run_folder_and_in_their_own_and_may_not_be_too_few(tmp_path):
    config = trainer_half(config_for(tmp_path, {}))
    assert config.run.name == "test-train-only"
    with pytest.raises(InputError, match=r"no step-\*\.safetensors found"):
        saved_batches(config, tmp_path)
    path = save(tmp_path / "run" / "batches", 1, encoded(make_batch(101, n=2)))
    assert saved_batches(config, tmp_path / "run") == saved_batches(config, path.parent) == [path]
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})
    with pytest.raises(InputError, match=r"1 batches found in .*, 2 expected for run.steps"):
        saved_batches(longer, tmp_path / "run")
