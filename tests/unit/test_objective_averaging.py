"""Every kind of objective runs through the real trainer; averages are those of mini-batches on all ranks."""

import math
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.monitor.tags import TAGS
from slipstream.backend.trainer import rank as trainer_module
from slipstream.backend.trainer.prepared import Targets
from slipstream.backend.trainer.targets import find_targets
from slipstream.configs.schema import ActorConfig, RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.models import make_checkpoint
from tests.ranks import run_ranks

RESPONSES = (3, 9, 5, 1, 12)
GROUPS = np.array([0, 0, 0, 1, 1])
ADVANTAGES = np.array([1.0, -0.5, 0.3, -2.0, 0.7], np.float32)
BUDGETS = (17, 100)
AVERAGINGS = ("token", "sequence", "prompt", "constant")
LENGTH = 20
"""By which ``constant`` divides."""
NORMS = {
    "none": None,
    "both": {"eps": 1e-5},
    "mean": {"deviation": False},
    "deviation": {"mean": False, "eps": 0.5},
}

ACTORS = [
    {"objective": {"type": "gspo"}, "averaging": "sequence"},
    {"objective": {"type": "decayed_clip"}, "entropy_bonus": 0.1},
    {
        "objective": {"type": "cispo"},
        "correction": {"sequence": {"type": "kl", "max": 1.0}, "negative": {"errors": None}},
    },
    {"objective": {"type": "ppo"}, "recompute_logprobs": False, "interpolate_logprobs": True},
    {"objective": {"type": "dppo"}, "use_decoupled_loss": False, "recompute_logprobs": False},
    {"objective": {"type": "m2po"}, "use_decoupled_loss": False, "overlong": {"start": 4, "end": 8}},
    {
        "objective": {"type": "ppo"},
        "correction": {"token": {"type": "mask"}},
        "advantage": [{"type": "reward", "estimator": "reinforce_pp"}],
    },
]


def trajectory(seed: int, response: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    sampled = np.arange(4 + response) >= 4
    return Trajectory(
        rng.integers(0, 101, len(sampled)),
        sampled,
        np.where(sampled, -4.6 + rng.normal(0, 0.3, len(sampled)), 0).astype(np.float32),
        np.where(sampled, rng.integers(0, 2, len(sampled)), UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=float(seed % 2),
    )


TRAJECTORIES = tuple(trajectory(i, n) for i, n in enumerate(RESPONSES))


def given(advantage, actor, critic, batch, microbatches, *others):
    """In the place of ``find_targets``."""
    return [Targets(torch.from_numpy(advantage[micro.trajectory_M]), None) for micro in microbatches]


def noting(noted, actor, critic, batch, microbatches, *others):
    """In the place of ``find_targets``: notes the advantage of each token by trajectory, as it is."""
    targets = find_targets(actor, critic, batch, microbatches, *others)
    for micro, target in zip(microbatches, targets, strict=True):
        noted += zip(micro.trajectory_M.tolist(), target.advantage_M.tolist(), strict=True)
    return targets


def one_step(
    trainer,
    config: RunConfig,
    actor: ActorConfig,
    trajectories,
    group,
    advantage=None,
    *,
    targets=find_targets,
):
    """Gradients and metrics of a step that is not taken. ``targets``: takes the place of ``find_targets``."""
    trainer._config = config.model_copy(update={"actor": actor})
    trainer_module.find_targets = targets if advantage is None else partial(given, advantage)
    metrics = trainer.train(TrainBatch(1, tuple(trajectories), group))
    parameters = trainer._policy.parts[0].module.named_parameters()
    grads = {name: p.main_grad.clone().numpy() for name, p in parameters}
    return grads, metrics


def steps(rank, config: RunConfig):
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    trainer._trained.optimizer.step = lambda: (True, 0.0, 0)
    parallel = {"parallel": {"data": 2}, "optimizer": {"clip_grad": 0.0}}
    metrics = [
        one_step(trainer, config, ActorConfig.model_validate(parallel | actor), TRAJECTORIES, GROUPS)[1]
        for actor in ACTORS
    ]
    # Of one trajectory, twice: each rank needs one.
    alone = [
        one_step(trainer, config, config.actor, [single, single], np.zeros(2, np.int64), np.full(2, a))[0]
        for single, a in zip(TRAJECTORIES, ADVANTAGES, strict=True)
    ]
    together = {
        (averaging, budget): one_step(
            trainer,
            config,
            config.actor.model_copy(
                update={
                    "averaging": averaging,
                    "averaging_length": LENGTH if averaging == "constant" else None,
                    "microbatch_tokens": budget,
                }
            ),
            TRAJECTORIES,
            GROUPS,
            ADVANTAGES,
        )[0]
        for averaging in AVERAGINGS
        for budget in BUDGETS
    }
    advantages = {}
    for name, norm in NORMS.items():
        for budget in BUDGETS:
            terms = [{"type": "reward", "estimator": "dr_grpo"}]
            settings = {"advantage": terms, "advantage_norm": norm, "microbatch_tokens": budget}
            actor = ActorConfig.model_validate(parallel | settings)
            noted = advantages[name, budget] = []
            one_step(trainer, config, actor, TRAJECTORIES, GROUPS, targets=partial(noting, noted))
    return metrics, alone, together, advantages


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("model"))
    config = RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1, "step_timeout_s": 60},
            "model": {"path": str(checkpoint), "dtype": "float32"},
            "data": {"path": "unused.jsonl"},
            "actor": {"parallel": {"data": 2}, "optimizer": {"clip_grad": 0.0}},
            "rollout": {
                "max_head_offpolicyness": 4,
                "batch_size": 5,
                "n_samples_per_prompt": 1,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )
    return run_ranks(2, steps, config)


def weights_of(averaging: str) -> np.ndarray:
    """What the gradient of each trajectory alone, a mean over its tokens, counts in the average."""
    tokens = np.array(RESPONSES, np.float64)
    if averaging == "token":
        return tokens / tokens.sum()
    if averaging == "sequence":
        return np.full(len(tokens), 1 / len(tokens))
    if averaging == "constant":  # the gradient of a sum is that of the mean, times the number of tokens
        return tokens / LENGTH / len(tokens)
    return np.array([n / tokens[group == GROUPS].sum() / 2 for n, group in zip(tokens, GROUPS, strict=True)])


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_gradient_is_the_average_over_all_micro_batches_and_ranks(two_ranks, averaging, budget):
    for _, alone, together, _ in two_ranks:
        for name, grad in together[averaging, budget].items():
            expected = sum(
                w * single[name].astype(np.float64)
                for w, single in zip(weights_of(averaging), alone, strict=True)
            )
            np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=2e-6, err_msg=name)
        assert max(np.abs(grad).max() for grad in together[averaging, budget].values()) > 1e-3


def test_every_kind_of_objective_trains_and_reports_only_metrics_that_are_documented(two_ranks):
    [metrics] = [reported for reported, *_ in two_ranks if reported[0]]
    for actor, reported in zip(ACTORS, metrics, strict=True):
        assert all(math.isfinite(value) for value in reported.values()), (actor, reported)
        assert set(reported) <= set(TAGS)
    by_type = {actor["objective"]["type"]: reported for actor, reported in zip(ACTORS, metrics, strict=True)}
    assert {"train/masked_sequence_fraction", "train/masked_negative_fraction"} <= set(by_type["cispo"])
    assert "mismatch/tokens" not in by_type["dppo"]
    assert by_type["dppo"]["train/importance_weight_mean"] > 0
    assert "train/importance_weight_capped_fraction" not in by_type["m2po"]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_advantages_are_normalized_over_the_tokens_of_all_ranks(two_ranks, name, budget):
    rewards = np.array([seed % 2 for seed in range(len(RESPONSES))], np.float64)
    centred = np.array(
        [reward - rewards[group == GROUPS].mean() for reward, group in zip(rewards, GROUPS, strict=True)]
    )
    every = np.repeat(centred, RESPONSES)
    norm = {"mean": True, "deviation": True, "eps": 1e-5, **NORMS[name]} if NORMS[name] is not None else {}
    shift = every.mean() if norm.get("mean") else 0.0
    scale = (
        np.sqrt(((every - every.mean()) ** 2).sum() / len(every)) + norm["eps"]
        if norm.get("deviation")
        else 1.0
    )
    noted = [advantages[name, budget] for *_, advantages in two_ranks]
    assert all(noted)  # both ranks have a part of the batch
    actual = np.array(sorted(chain.from_iterable(noted)))
    places = np.repeat(np.arange(len(RESPONSES)), RESPONSES)
    assert actual[:, 0].tolist() == places.tolist()
    np.testing.assert_allclose(actual[:, 1], (centred[places] - shift) / scale, rtol=1e-6, atol=1e-7)
