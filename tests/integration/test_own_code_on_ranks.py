"""Code of a user's on real ranks: PPO by import path trains bit for bit what ours does, in each layout."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.system.plugins import PluginFailed
from tests.exported import buckets_of
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs

VOCAB, STEPS = 101, 2
OURS = {"objective": {"type": "ppo"}}
OWN = {"objective": {"type": "plugin", "path": "examples.objective.clipped.Clipped"}}
SHAPED = {
    **OWN,
    "transforms": [
        {"path": "examples.transform.shaping.BoundRewards", "args": {"low": 0.5}},
        {"path": "examples.transform.shaping.DropRepeated", "args": {"at_least": 4}},
    ],
    "metrics": ["examples.metrics.diversity.Diversity"],
    "advantage": [{"type": "reward"}, {"type": "plugin", "path": "examples.advantage.brevity.Brevity"}],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor 2 + sequence": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
}


class OfItsOwnRank:
    """A transform that is not the same on all ranks."""

    def transform(self, batch):
        import torch.distributed as dist

        return batch.rewarded([float(dist.get_rank())] * len(batch.trajectories))


@dataclass
class Trained:
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    error: str = ""


def train(rank: RankSpec, config: RunConfig) -> Trained:
    trained = Trained()
    with trainer_of(rank, config) as trainer:
        try:
            for step in range(STEPS):
                metrics = trainer.train(make_batch(VOCAB, seed=100 + step, version=step))
                trained.metrics += [] if metrics is None else [metrics]
        except PluginFailed as error:
            trained.error = str(error)
            return trained
        for bucket in buckets_of(trainer):
            if bucket is not None:
                trained.weights |= {n: tensor.float().numpy().copy() for n, tensor in bucket.tensors()}
    return trained


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, list[Trained]]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")

    def job(layout: str, actor: dict[str, Any]) -> Job:
        settings = {"minibatches": 2, "optimizer": {"lr": 1e-3}, **actor}
        config = config_for(model, LAYOUTS[layout], **settings)
        return Job(config.actor.parallel.world_size, train, (config,))

    jobs = {f"{layout}, ours": job(layout, OURS) for layout in LAYOUTS}
    jobs |= {f"{layout}, own": job(layout, OWN) for layout in LAYOUTS}
    jobs["shaped"] = job("data 2", SHAPED)
    jobs["of its own rank"] = job("data 2", {**OWN, "transforms": [f"{__name__}.OfItsOwnRank"]})
    return run_jobs(jobs)


def result(ranks: list[Trained]) -> Trained:
    [metrics] = [rank.metrics for rank in ranks if rank.metrics]
    return Trained(metrics, ranks[0].weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_objective_by_import_path_trains_bit_for_bit_what_ours_does(trained, layout):
    ours, own = (result(trained[f"{layout}, {kind}"]) for kind in ("ours", "own"))
    assert own.metrics == ours.metrics
    assert own.weights.keys() == ours.weights.keys() != set()
    for name, value in ours.weights.items():
        np.testing.assert_array_equal(own.weights[name], value, err_msg=name)


def test_terms_transforms_and_metrics_of_all_ranks_are_of_one_batch(trained):
    for metrics in result(trained["shaped"]).metrics:
        assert metrics["batch/distinct_fraction"] == 1
        assert metrics["advantage/plugin_abs_mean"] > 0


def test_a_transform_that_differs_between_ranks_is_named_on_all_of_them(trained):
    errors = [rank.error for rank in trained["of its own rank"]]
    assert all("actor.transforms: ranks [1] have got another batch than rank 0" in error for error in errors)
    assert all("OfItsOwnRank" in error for error in errors)
