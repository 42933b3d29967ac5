"""A rank's micro-batches keep to the token budget as they are computed, their padding included."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.trainer.minibatches import microbatches_of
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.models import make_checkpoint
from tests.tries import tries

BUDGET = 100


@pytest.fixture(scope="module")
def geometry(tmp_path_factory) -> Geometry:
    return model_spec(make_checkpoint(tmp_path_factory.mktemp("model"))).geometry


def trajectory(n: int) -> Trajectory:
    sampled = np.arange(n) >= 1
    return Trajectory(
        np.zeros(n, np.int64),
        sampled,
        np.zeros(n, np.float32),
        np.where(sampled, 0, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=1.0,
    )


def config_of(parallel: dict) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "actor": {"parallel": parallel, "microbatch_tokens": BUDGET},
            "rollout": {
                "max_head_offpolicyness": 0,
                "batch_size": 1,
                "n_samples_per_prompt": 1,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 2},
        {"context": 4},
        {"tensor": 8, "sequence": True},
        {"tensor": 2, "sequence": True, "context": 3, "data": 2},
    ],
    ids=str,
)
@tries(13)
@given(lengths=st.lists(st.integers(2, 130), min_size=2, max_size=40))
def test_no_micro_batch_is_over_the_budget_unless_a_single_trajectory_is(geometry, parallel, lengths):
    config = config_of(parallel)
    batch = TrainBatch(0, tuple(map(trajectory, lengths)), np.arange(len(lengths)))
    layout, seen = config.actor.parallel, []
    for rank in range(layout.data):
        [microbatches], metrics = microbatches_of(config.actor, geometry, batch, 0, 0, rank=rank)
        for micro in microbatches:
            owners = np.unique(micro.trajectory_M)
            assert len(micro.tokens_T) % layout.length_multiple == 0
            assert len(micro.tokens_T) <= BUDGET or len(owners) == 1
            seen += owners.tolist()
        assert metrics["packing/fill"] > 0
    assert sorted(seen) == list(range(len(lengths)))
