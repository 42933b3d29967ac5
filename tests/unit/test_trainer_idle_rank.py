"""A data-parallel rank that idles in a micro-batch of a step takes part in it and adds nothing."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.models import make_checkpoint
from tests.ranks import run_ranks


def trajectory(seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    sampled = np.arange(12) >= 4
    return Trajectory(
        rng.integers(0, 101, 12),
        sampled,
        np.where(sampled, -rng.exponential(2.0, 12), 0).astype(np.float32),
        np.where(sampled, 0, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=float(seed % 2),
    )


def gradients(rank, config: RunConfig, budgets: list[int]):
    """Gradients and metrics of the same step at each budget, without taking it."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
    batch = TrainBatch(0, tuple(map(trajectory, range(3))), np.zeros(3, np.int64))
    results = []
    for budget in budgets:
        actor = config.actor.model_copy(update={"microbatch_tokens": budget})
        trainer._config = config.model_copy(update={"actor": actor})
        [microbatches], _ = trainer.microbatches(batch)
        sizes = [len(micro.index_M) for micro in microbatches]
        metrics = trainer.train(batch)
        parameters = trainer._policy.parts[0].module.named_parameters()
        grads = {name: p.main_grad.clone().numpy() for name, p in parameters}
        results.append((sizes, grads, metrics))
    return results


def test_an_idle_micro_batch_changes_neither_gradients_nor_metrics(tmp_path):
    config = RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1, "step_timeout_s": 60},
            "model": {"path": str(make_checkpoint(tmp_path)), "dtype": "float32"},
            "data": {"path": "unused.jsonl"},
            "actor": {"parallel": {"data": 2}, "optimizer": {"clip_grad": 0.0}},
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 3,
                "n_samples_per_prompt": 3,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )
    ranks = run_ranks(2, gradients, config, [12, 100])
    assert sorted(n for results in ranks for n in results[0][0]) == [0, 8, 8, 8]
    assert sorted(n for results in ranks for n in results[1][0]) == [8, 16]
    for (_, idle, _), (_, busy, _) in ranks:
        assert any(np.abs(grad).max() > 1e-3 for grad in busy.values())
        for name, grad in busy.items():
            np.testing.assert_allclose(idle[name], grad, rtol=1e-4, atol=1e-6, err_msg=name)
    idle, busy = (ranks[0][i][2] for i in (0, 1))
    assert idle.keys() == busy.keys()
    # 36 tokens in 4 micro-batches of 12 and in 2 of 100; a rank has two thirds of the work either way.
    fills, imbalances = (
        [m.pop(name) for m in (idle, busy)] for name in ("packing/fill", "packing/imbalance")
    )
    assert fills == [36 / 48, 36 / 200]
    assert imbalances == pytest.approx([4 / 3, 4 / 3])
    np.testing.assert_allclose(list(idle.values()), list(busy.values()), rtol=1e-4, atol=1e-6)


def live_gradients(rank, config: RunConfig):
    """Gradients and metrics of a step on one live trajectory, without taking it."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
    trajectory_ = replace(trajectory(0), turn_rewards=((8, 1.0), (12, -1.0)))
    batch = TrainBatch(0, (trajectory_,), np.array([-1]), turn_advantages={0: (0.5, -2.0)})
    metrics = trainer.train(batch)
    parameters = trainer._policy.parts[0].module.named_parameters()
    return {name: p.main_grad.clone().numpy() for name, p in parameters}, metrics


def test_a_batch_of_one_live_trajectory_trains_two_ranks_as_it_trains_one(tmp_path):
    """Users may have said so little that a rank has nothing to do, and that there is only one mini-batch."""

    def config(ranks: int) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": {"name": "test", "steps": 1, "step_timeout_s": 60},
                "model": {"path": str(make_checkpoint(tmp_path / str(ranks))), "dtype": "float32"},
                "data": {"path": "unused.jsonl"},
                "actor": {
                    "minibatches": 2,
                    "parallel": {"data": ranks},
                    "optimizer": {"clip_grad": 0.0},
                },
                "rollout": {
                    "max_head_offpolicyness": 4,
                    "batch_size": 4,
                    "n_samples_per_prompt": 2,
                    "reward": "slipstream.rollout.reward.FinalAnswer",
                },
                "live": {"share": 1.0},
            }
        )

    [(alone, expected)] = run_ranks(1, live_gradients, config(1))
    two = run_ranks(2, live_gradients, config(2))
    assert any(np.abs(grad).max() > 1e-3 for grad in alone.values())
    for grads, _ in two:
        for name, grad in alone.items():
            np.testing.assert_allclose(grads[name], grad, rtol=1e-4, atol=1e-6, err_msg=name)
    metrics = two[0][1]
    assert metrics.keys() == expected.keys()
    for name in ("train/loss", "train/tokens"):
        assert metrics[name] == pytest.approx(expected[name])
    assert all(np.isfinite(value) for value in metrics.values())
