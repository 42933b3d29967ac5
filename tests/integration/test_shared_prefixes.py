"""Prefixes that are computed once change nothing: log-probs and gradients are those of plain packing."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from slipstream.backend.batch.prefixes import MASK_PAIRS
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.integration.test_megatron_parity import config_for
from tests.integration.test_trainer_checkpoint import trainer_of
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

VOCAB, TOLERANCE = 101, 1e-6
GRADIENT_TOLERANCE = 1e-5
"""Share of the largest entry of a parameter: float32 products are summed in another order."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3", {}, {}),
    "llama": ("llama", {}, {}),
    "experts": ("qwen3_moe", {}, {}),
    "window": ("gemma3_text", {}, {}),
    "window and sinks": ("gpt_oss", {}, {}),
    "blocks of queries": ("gpt_oss", {}, {"recompute": "full"}),
    "latent": ("deepseek_v3", {}, {}),
    "recomputation": ("qwen3", {}, {"recompute": "full"}),
    "selective recomputation": ("qwen3", {}, {"recompute": "selective"}),
    "adapters": ("qwen3", {}, {"lora": {"rank": 4, "alpha": 8}}),
    "tensor 2": ("qwen3", {"tensor": 2}, {}),
    "tensor 2 + sequence": ("qwen3", {"tensor": 2, "sequence": True}, {}),
    "pipeline 2": ("qwen3", {"pipeline": 2}, {}),
    "virtual pipeline 2": ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "data 2": ("qwen3", {"data": 2}, {}),
    "expert 2": ("qwen3_moe", {"data": 2, "expert": 2}, {}),
    "unusual trees": ("qwen3", {}, {"microbatch_tokens": 2000}),
    "a tree on one of two ranks": ("qwen3_moe", {"data": 2}, {"microbatch_tokens": 250}),
}
"""Family, layout, and further settings of the actor."""
KEPT = (
    "qwen3",
    "window and sinks",
    "blocks of queries",
    "recomputation",
    "tensor 2 + sequence",
    "pipeline 2",
    "expert 2",
    "unusual trees",
)


def batch_of(seed: int = 0) -> TrainBatch:
    """Groups whose samples share prompts, and in part completions with loss; branches of branches."""
    rng = np.random.default_rng(seed)
    trajectories, group_N = [], []
    for group in range(4):
        prompt = int(rng.integers(20, 40))
        stems = [rng.integers(0, VOCAB, prompt)]
        for sample in range(4):
            stem = stems[int(rng.integers(len(stems)))]
            text = np.concatenate([stem, rng.integers(0, VOCAB, int(rng.integers(1, 20)))])
            stems.append(text)
            sampled = np.arange(len(text)) >= prompt
            logp_T = np.where(sampled, -4.6 + rng.normal(0, 0.3, len(text)), 0).astype(np.float32)
            version_T = np.where(sampled, 0, UNSAMPLED).astype(np.int32)
            reward = float(rng.random() < 0.5) + sample / 10
            trajectories.append(Trajectory(text, sampled, logp_T, version_T, Finish.STOP, reward=reward))
            group_N.append(group)
    # One sample is the beginning of another, and two are alike.
    trajectories[1] = trajectories[0]
    return TrainBatch(0, tuple(trajectories), np.array(group_N))


def sampled(text: np.ndarray, prompt: int, group: int, rng: np.random.Generator, version: int = 0):
    """A trajectory whose tokens after the prompt carry loss, and the number of its group."""
    mask = np.arange(len(text)) >= prompt
    logp_T = np.where(mask, -4.6 + rng.normal(0, 0.3, len(text)), 0).astype(np.float32)
    version_T = np.where(mask, version, UNSAMPLED).astype(np.int32)
    return Trajectory(text, mask, logp_T, version_T, Finish.STOP, reward=float(rng.random())), group


def unusual(seed: int = 1) -> TrainBatch:
    """Trees that are wide, deep or hardly there, and trajectories that have the ids alone in common."""
    rng = np.random.default_rng(seed)

    def drawn(n: int) -> np.ndarray:
        return rng.integers(0, VOCAB, n)

    trunk, same, agent = drawn(60), drawn(30), drawn(8)
    made = [sampled(np.concatenate([trunk, drawn(n % 9)]), 60, 0, rng) for n in range(150)]
    made += [sampled(trunk[: 7 * n + 1], 1, 1, rng) for n in range(8)]
    made += [sampled(same, prompt, 2, rng, version) for prompt, version in ((4, 0), (20, 1), (4, 1), (30, 0))]
    made += [sampled(drawn(1), 1, 3, rng) for _ in range(4)]
    for turn in range(1, 110):
        kept = agent[:8] if turn % 50 == 0 else agent
        agent = np.concatenate([kept, drawn(3)])
        made.append(sampled(agent, len(agent) - 2, 4, rng))
    order = rng.permutation(len(made))
    return TrainBatch(1, tuple(made[i][0] for i in order), np.array([made[i][1] for i in order]))


def lopsided(seed: int = 2) -> TrainBatch:
    """Samples of one prompt, and as much work in trajectories that have nothing in common."""
    rng = np.random.default_rng(seed)
    stem, *others = rng.integers(0, VOCAB, (4, 60))
    for first, text in enumerate((stem, *others)):
        text[0] = first
    made = [sampled(np.concatenate([stem, rng.integers(0, VOCAB, 10)]), 60, 0, rng) for _ in range(8)]
    made += [sampled(text, 40, 1 + number, rng) for number, text in enumerate(others)]
    return TrainBatch(0, tuple(part for part, _ in made), np.array([group for _, group in made]))


BATCHES = {"unusual trees": unusual, "a tree on one of two ranks": lopsided}
"""By case; all others have ``batch_of``."""


def one_step(trainer: Any, config: RunConfig, share: str, batch: TrainBatch):
    """Tokens computed here, log-probs by trajectory, and the gradient of a step that is not taken."""
    trainer._config = config.model_copy(
        update={"actor": config.actor.model_copy(update={"share_prefixes": share})}
    )
    [microbatches], metrics = trainer.microbatches(batch)
    found: dict[int, np.ndarray] = {}
    for micro, logp_M in zip(microbatches, trainer._policy.log_probs(microbatches, 0.8), strict=True):
        for place in micro.pack:
            if logp_M is not None:
                found[place] = logp_M.numpy()[micro.trajectory_M == place]
    trained = trainer.train(batch)
    gradients = {
        f"{number} {name}": parameter.main_grad.numpy().copy()
        for number, part in enumerate(trainer._policy.parts)
        for name, parameter in part.module.named_parameters()
        if parameter.requires_grad
    }
    taken = sum(int(micro.taken_N.sum()) for micro in microbatches)
    return metrics, found, gradients, trained, taken


def both_ways(rank: RankSpec, config: RunConfig, pairs: int, batch: TrainBatch):
    """``pairs``: of a query and a key that have a mask at one time."""
    from slipstream.backend.megatron import local_layers

    with trainer_of(rank, config) as trainer, patch.object(local_layers, "MASK_PAIRS", pairs):
        trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
        return [one_step(trainer, config, share, batch) for share in ("auto", "off")]


@pytest.fixture(scope="module")
def found(tmp_path_factory, request) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("models")
    jobs = {}
    for case in chosen(request, "case"):
        family, parallel, actor = CASES[case]
        path = folder / family
        if not path.exists():
            make_checkpoint(path, family)
        config = config_for(path, parallel, **{"share_prefixes": "auto", "microbatch_tokens": 200, **actor})
        pairs = 300 if case == "blocks of queries" else MASK_PAIRS
        jobs[case] = Job(
            config.actor.parallel.world_size, both_ways, (config, pairs, BATCHES.get(case, batch_of)())
        )
    return run_jobs(jobs)


@pytest.mark.parametrize("case", shortened(CASES, KEPT))
def test_shared_prefixes_train_as_repeated_ones(found, case: str):
    by_place: list[dict[int, np.ndarray]] = [{}, {}]
    for (shared, logps, gradients, trained, _), (plain, alone, expected, trained_alone, _) in found[case]:
        assert shared["packing/saved_tokens"] > 0.3 and shared["packing/saved_flops"] > 0.1
        assert shared["train/tflop"] < 0.9 * plain["train/tflop"] and "packing/saved_tokens" not in plain
        by_place[0] |= logps
        by_place[1] |= alone
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(gradients[name], gradient, atol=TOLERANCE, rtol=0, err_msg=name)
            scale = float(np.abs(gradient).max()) or 1.0
            np.testing.assert_allclose(
                gradients[name], gradient, atol=GRADIENT_TOLERANCE * scale, rtol=0, err_msg=name
            )
        if trained is not None:
            assert trained["train/loss"] == pytest.approx(trained_alone["train/loss"], abs=TOLERANCE)
    assert by_place[0].keys() == by_place[1].keys()
    assert len(by_place[0]) == len(BATCHES.get(case, batch_of)().trajectories)
    if case == "a tree on one of two ranks":
        assert sorted(taken > 0 for (*_, taken), _ in found[case]) == [False, True]
    for place, logp in by_place[1].items():
        np.testing.assert_allclose(by_place[0][place], logp, atol=TOLERANCE, rtol=TOLERANCE)
