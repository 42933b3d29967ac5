"""Packing changes nothing: log-probs and gradients of one pack are those of its trajectories one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.integration.test_megatron_parity import config_for
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

VOCAB, TOLERANCE = 101, 1e-5

GRADIENT_TOLERANCE = 2e-5
"""Share of the largest entry. A pack adds the same float32 products in another order than its trajectories
alone, and some processors in yet another one: 1.01e-5 was seen in one entry of 7,680 of a delta net."""
FAMILIES = ("qwen3", "deepseek_v3", "qwen3_moe", "qwen3_next")
"""Grouped-query attention, latent attention with experts, experts, linear attention."""
RESPONSES = {
    "around powers of two": (1, 2, 3, 4, 6, 7, 8, 14, 15, 16, 30, 31, 32, 62, 63, 64),
    "all alike": (9,) * 12,
    "one of each": (5, 180),
    "single tokens": (1,) * 10,
    "random": tuple(np.random.default_rng(1).geometric(0.04, 24).tolist()),
}
KEPT = ("around powers of two", "one of each")
PACKED, ALONE = 10_000, 1
"""Token budgets of a micro-batch."""


def batch_of(responses: tuple[int, ...]) -> TrainBatch:
    rng = np.random.default_rng(len(responses))
    trajectories = []
    for i, response in enumerate(responses):
        sampled = np.arange(1 + i % 4 + response) > i % 4
        trajectories.append(
            Trajectory(
                rng.integers(0, VOCAB, len(sampled)),
                sampled,
                np.where(sampled, -4.6 + rng.normal(0, 0.3, len(sampled)), 0).astype(np.float32),
                np.where(sampled, 0, UNSAMPLED).astype(np.int32),
                Finish.STOP,
                reward=float(i % 2),
            )
        )
    return TrainBatch(0, tuple(trajectories), np.arange(len(responses)) // 2)


def one_step(trainer: Any, config: RunConfig, budget: int, batch: TrainBatch):
    """Number of micro-batches, log-probs by trajectory, and the gradient of a step that is not taken."""
    actor = config.actor.model_copy(update={"microbatch_tokens": budget})
    trainer._config = config.model_copy(update={"actor": actor})
    [microbatches], _ = trainer.microbatches(batch)
    logps = {}
    for micro, logp_M in zip(microbatches, trainer._policy.log_probs(microbatches, 1.0), strict=True):
        for start, end in zip(micro.cu_seqlens, micro.cu_seqlens[1:], strict=False):
            inside_M = (micro.index_M >= start) & (micro.index_M < end)
            logps[tuple(micro.tokens_T[start:end])] = logp_M.numpy()[inside_M]
    trainer.train(batch)
    parameters = trainer._policy.parts[0].module.named_parameters()
    gradients = {name: p.main_grad.numpy().copy() for name, p in parameters}
    return len(microbatches), logps, gradients


def both_ways(rank: RankSpec, config: RunConfig, names: list[str]):
    """Return by responses the step in one pack, and that of each trajectory alone."""
    steps = {}
    with trainer_of(rank, config) as trainer:
        trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
        for name in names:
            batch = batch_of(RESPONSES[name])
            steps[name] = [one_step(trainer, config, budget, batch) for budget in (PACKED, ALONE)]
    return steps


@pytest.fixture(scope="module")
def found(tmp_path_factory, request) -> dict:
    folder: Path = tmp_path_factory.mktemp("models")
    jobs = {}
    for family in FAMILIES:
        config = config_for(make_checkpoint(folder / family, family), {})
        jobs[family] = Job(1, both_ways, (config, chosen(request, "responses")))
    return {
        (family, name): ways for family, [by_name] in run_jobs(jobs).items() for name, ways in by_name.items()
    }


@pytest.mark.parametrize("responses", shortened(RESPONSES, KEPT))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_trains_as_its_trajectories_alone(found, family: str, responses: str):
    (packs, packed, gradients), (ones, alone, expected) = found[family, responses]
    assert (packs, ones) == (1, len(RESPONSES[responses]))
    assert packed.keys() == alone.keys() and len(alone) == ones
    for tokens, logp in alone.items():
        np.testing.assert_allclose(packed[tokens], logp, atol=TOLERANCE)
    for name, gradient in expected.items():
        scale = np.abs(gradient).max() or 1.0
        np.testing.assert_allclose(
            gradients[name] / scale, gradient / scale, atol=GRADIENT_TOLERANCE, err_msg=name
        )
