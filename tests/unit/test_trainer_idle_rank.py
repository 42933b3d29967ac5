"""A data-parallel rank that idles in a micro-batch of a step takes part in it and adds nothing."""

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.configs.schema import RunConfig
from slipstream.rollout.trajectory import UNSAMPLED, Finish, Trajectory
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
