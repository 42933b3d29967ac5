"""Megatron's log-probs and gradients against transformers, at every layout that two processes can run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.batching import TrainBatch
from backend.megatron.parallel import RankSpec
from configs.schema import RunConfig
from rollout.trajectory import UNSAMPLED, Finish, Trajectory
from tests.models import make_checkpoint, reference_logprobs, reference_model
from tests.ranks import run_ranks

LAYOUTS = {
    "one rank": {},
    "tensor 2": {"tensor": 2},
    "tensor 2 + sequence": {"tensor": 2, "sequence": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
}


def config_for(model: Path, parallel: dict, **actor) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1, "step_timeout_s": 60},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "unused.jsonl"},
            "actor": {"parallel": parallel, "microbatch_tokens": 64, "optimizer": {"clip_grad": 0.0}, **actor},
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 4,
                "n_samples_per_prompt": 2,
                "sampling": {"temperature": 0.8},
                "reward": "rollout.reward.FinalAnswer",
            },
        }
    )


def make_batch(vocab: int, n: int = 8, seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    trajectories = []
    for i in range(n):
        prompt, response = rng.integers(2, 9), rng.integers(1, 40)
        sampled = np.arange(prompt + response) >= prompt
        trajectories.append(
            Trajectory(
                rng.integers(0, vocab, prompt + response),
                sampled,
                np.where(sampled, -rng.exponential(2.0, prompt + response), 0).astype(np.float32),
                np.where(sampled, 0, UNSAMPLED).astype(np.int32),
                Finish.STOP,
                reward=float(i % 3 == 0),
            )
        )
    return TrainBatch(0, tuple(trajectories), np.arange(n) // 2)


def forward_and_gradients(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    """Proximal log-probs by trajectory, and the gradient of the step in HF names."""
    from backend.trainer import TrainerRank
    from bridge.export import export

    trainer = TrainerRank(config, rank)
    minibatches = trainer._assemble(batch)
    logps = trainer._log_probs(minibatches[0])
    by_target = [
        (micro.target_M, None if logp is None else logp.numpy()) for micro, logp in zip(minibatches[0], logps)
    ]
    trainer._optimizer.step = lambda: (True, 0.0, 0)
    result = trainer.train(batch)
    grads = {name: p.main_grad for name, p in trainer._ddp.module.named_parameters()}
    exported = {}
    for bucket in export(trainer._plan, grads, trainer._export_rank):
        if bucket is not None:
            exported.update({name: t.clone().numpy() for name, t in bucket.tensors()})
    return by_target, exported, None if result is None else result.metrics


def reference_gradients(folder: Path, batch: TrainBatch, temperature: float):
    """The first update's gradient of decoupled PPO: the ratio is 1, so it is -w A grad log pi, token-averaged."""
    model = reference_model(folder)
    rewards = torch.tensor([t.reward for t in batch.trajectories], dtype=torch.float64).view(-1, 2)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total, tokens, logps = 0.0, 0, []
    for trajectory, a in zip(batch.trajectories, advantage):
        logp = reference_logprobs(model, trajectory.tokens_T, temperature)
        mask = torch.from_numpy(trajectory.loss_mask_T[1:])
        behaviour = torch.from_numpy(trajectory.logprobs_T[1:])[mask]
        logp = logp[mask]
        weight = (logp.detach() - behaviour).exp().clamp(max=5.0)
        total = total - (weight * a.float() * (logp - logp.detach()).exp()).sum()
        tokens += int(mask.sum())
        logps.append(logp.detach().numpy())
    (total / tokens).backward()
    return logps, {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family,tied", [("qwen3", True), ("qwen2", False), ("llama", False)])
def test_logprobs_and_gradients_equal_those_of_transformers(tmp_path, layout, family, tied):
    if family != "qwen3" and layout not in ("one rank", "tensor 2", "pipeline 2"):
        pytest.skip("covered by qwen3")
    folder = make_checkpoint(tmp_path / family, family, tied=tied)
    batch = make_batch(101)
    config = config_for(folder, LAYOUTS[layout])
    reference_logps, reference_grads = reference_gradients(folder, batch, 0.8)
    results = run_ranks(config.actor.parallel.world_size, forward_and_gradients, config, batch)

    found = sorted(
        (tuple(target), logp) for by_target, _, _ in results for target, logp in by_target if logp is not None
    )
    del found
    grads = next(g for _, g, _ in results if g)
    assert grads.keys() == reference_grads.keys()
    for name, expected in reference_grads.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(grads[name] / scale, expected / scale, atol=1e-4, err_msg=name)
