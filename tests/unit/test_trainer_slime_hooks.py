"""slime's hooks on the ranks of the real trainer: those that do what the default does change nothing."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.integration.test_megatron_parity import config_for
from tests.models import make_checkpoint
from tests.ranks import Job, run_jobs, run_ranks

HOOKS = "tests.unit.slime_rank_hooks"
VOCAB, STEPS = 101, 2


@dataclass(frozen=True)
class Case:
    hooks: dict[str, str] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)

    def config(self, model: Path) -> RunConfig:
        base = config_for(
            model, self.parallel, minibatches=2, optimizer={"lr": 1e-3, "eps": 1e-3}, **self.actor
        )
        recipe = base.model_dump()
        recipe["rollout"]["hooks"] = {name: f"{HOOKS}.{each}" for name, each in self.hooks.items()} or None
        return RunConfig.model_validate(recipe)


BONUS = {"entropy_bonus": 0.1}
PLAIN = {"use_decoupled_loss": False}
SEQUENCE = {"averaging": "sequence"}
TWO_STAGES = {"pipeline": 2}
CASES = {
    "default": Case(),
    "capped weights": Case({"custom_tis_function": "capped_weights"}),
    "default, sequence": Case(actor=SEQUENCE),
    "mean of units": Case({"custom_pg_loss_reducer_function": "mean_of_units"}),
    "mean of units, sequence": Case({"custom_pg_loss_reducer_function": "mean_of_units"}, SEQUENCE),
    "policy loss": Case({"custom_loss_function": "policy_loss"}),
    "policy loss, sequence": Case({"custom_loss_function": "policy_loss"}, SEQUENCE),
    "advantages": Case({"custom_advantage_function": "advantages_of_rewards"}),
    "plain": Case(actor=PLAIN),
    "weights of one": Case({"custom_tis_function": "weights_of_one"}),
    "overwritten": Case({"custom_tis_function": "everything_overwritten"}),
    "dropped": Case({"custom_tis_function": "second_tokens_dropped"}),
    "taken away": Case({"rollout_data_postprocess": "loss_taken_away"}, PLAIN),
    "halved": Case({"rollout_data_postprocess": "halved_advantages"}),
    "megatron": Case(
        {
            "custom_megatron_init": "begin",
            "custom_megatron_before_log_prob_hook": "before_log_prob",
            "custom_megatron_before_train_step_hook": "before_train_step",
        },
        {"kl": {"where": "loss", "coefficient": 0.1}},
    ),
    "provider": Case({"custom_megatron_init": "begin_with_arguments", "custom_model_provider": "provider"}),
    "default, two stages": Case(parallel=TWO_STAGES),
    "hooks, two stages": Case(
        {
            "custom_tis_function": "capped_weights",
            "custom_pg_loss_reducer_function": "mean_of_units",
            "custom_advantage_function": "advantages_of_rewards",
        },
        parallel=TWO_STAGES,
    ),
    "entropy bonus": Case(actor=BONUS),
    "policy loss, entropy bonus": Case({"custom_loss_function": "policy_loss"}, BONUS),
    "default, tensor 2": Case(parallel={"tensor": 2}),
    "policy loss, tensor 2": Case({"custom_loss_function": "policy_loss"}, parallel={"tensor": 2}),
    "default, data 2": Case(parallel={"data": 2}),
    "capped weights, data 2": Case({"custom_tis_function": "capped_weights"}, parallel={"data": 2}),
}
SAME = {
    "capped weights": "default",
    "mean of units": "default",
    "mean of units, sequence": "default, sequence",
    "policy loss": "default",
    "policy loss, sequence": "default, sequence",
    "advantages": "default",
    "weights of one": "plain",
    "overwritten": "plain",
    "taken away": "dropped",
    "provider": "default",
    "hooks, two stages": "default, two stages",
    "policy loss, tensor 2": "default, tensor 2",
    "capped weights, data 2": "default, data 2",
}
"""Runs with hooks, and the runs whose losses they repeat."""

WRONG = {
    "too_short": ("custom_tis_function", "gives the loss of shape"),
    "not_a_number": ("custom_tis_function", "not finite, though all of its inputs are"),
    "masks_of_another_length": ("custom_tis_function", "gives the masks[0] of shape"),
    "only_the_loss": ("custom_tis_function", "returns a Tensor, expected (loss, masks, metrics)"),
    "raising": ("custom_tis_function", "has raised KeyError: 'tis_level'"),
    "numbers_instead_of_a_function": (
        "custom_pg_loss_reducer_function",
        "returns a float, expected a function",
    ),
    "other_tokens": ("rollout_data_postprocess", 'changes rollout_data["tokens"]'),
    "better_log_probs": ("rollout_data_postprocess", 'changes rollout_data["rollout_log_probs"]'),
    "no_advantages": ("custom_advantage_function", 'sets no rollout_data["advantages"]'),
    "advantages_of_one_sample": ("custom_advantage_function", "of 1 samples, expected those of"),
    "infinite_advantages": ("custom_advantage_function", "not finite"),
    "loss_of_every_sample": ("custom_loss_function", "gives the loss of shape"),
    "no_model": ("custom_model_provider", "returns a Linear, expected Megatron's GPTModel"),
}


def trajectory(seed: int, version: int) -> Trajectory:
    """Two turns with a tool's tokens between them; one in five carries no loss at all."""
    rng = np.random.default_rng((seed, version))
    lengths = rng.integers([2, 1, 1, 1], [6, 12, 5, 12])
    is_sampled_T = np.repeat([False, True, False, True], lengths)
    n = len(is_sampled_T)
    return Trajectory(
        rng.integers(0, VOCAB, n),
        is_sampled_T & (seed % 5 != 4),
        np.where(is_sampled_T, -4.6 + rng.normal(0, 0.6, n), 0).astype(np.float32),
        np.where(is_sampled_T, version, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        reward=float(seed % 3 == 0),
    )


def batch(version: int, n: int = 10) -> TrainBatch:
    return TrainBatch(version, tuple(trajectory(i, version) for i in range(n)), np.arange(n) // 2)


def train(rank: RankSpec, config: RunConfig) -> tuple[list[dict[str, float]], list[str]]:
    """Return the metrics of each step, on the reporting rank, and the calls of Megatron's hooks."""
    from slipstream.backend.trainer.rank import TrainerRank

    trainer = TrainerRank(config, rank)
    metrics = [trainer.train(batch(step)) for step in range(STEPS)]
    hooks = sys.modules.get(HOOKS)
    calls = [] if hooks is None else [each for each in hooks.CALLS if isinstance(each, str)]
    return [each for each in metrics if each is not None], calls


def error_of(rank: RankSpec, config: RunConfig) -> str:
    try:
        train(rank, config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    model = make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=4)
    cases = {name: (train, case.config(model)) for name, case in CASES.items()}
    wrong = {name: (error_of, Case({setting: name}).config(model)) for name, (setting, _) in WRONG.items()}
    jobs = {
        name: Job(config.actor.parallel.world_size, function, (config,))
        for name, (function, config) in (cases | wrong).items()
    }
    return run_jobs(jobs)


def metrics_of(outcomes, name: str) -> list[dict[str, float]]:
    return next(metrics for metrics, _ in outcomes[name] if metrics)


@pytest.mark.parametrize("name", SAME)
def test_a_default_that_is_named_as_a_hook_changes_no_loss(outcomes, name):
    hooked, default = metrics_of(outcomes, name), metrics_of(outcomes, SAME[name])
    assert len(hooked) == len(default) == STEPS
    for actual, expected in zip(hooked, default, strict=True):
        assert abs(expected["train/loss"]) > 1e-3
        assert actual["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
        assert actual["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


def test_weights_and_masks_of_a_hook_take_effect(outcomes):
    default, plain, dropped = (metrics_of(outcomes, name) for name in ("default", "plain", "dropped"))
    assert abs(default[0]["train/loss"] - plain[0]["train/loss"]) > 1e-4
    assert abs(dropped[0]["train/grad_norm"] - plain[0]["train/grad_norm"]) > 1e-4
    assert 0.3 < dropped[0]["train/masked_hook_fraction"] < 0.6


def test_changed_advantages_are_read_back(outcomes):
    halved, default = metrics_of(outcomes, "halved"), metrics_of(outcomes, "default")
    assert halved[0]["train/grad_norm"] == pytest.approx(default[0]["train/grad_norm"] / 2, rel=1e-4)


def test_metrics_of_hooks_are_means_of_the_batch(outcomes):
    [first, _], [default, _] = metrics_of(outcomes, "capped weights"), metrics_of(outcomes, "default")
    assert first["hook/tis"] == pytest.approx(default["train/importance_weight_mean"], rel=1e-5)
    capped = default["train/importance_weight_capped_fraction"]
    assert first["hook/tis_clipfrac"] == pytest.approx(capped, abs=1e-6)
    loss = metrics_of(outcomes, "policy loss, sequence")[0]
    assert loss["hook/pg_loss"] == pytest.approx(loss["train/loss"], rel=1e-5)


def test_a_loss_from_logits_may_have_an_entropy_bonus(outcomes):
    hooked, default = (
        metrics_of(outcomes, "policy loss, entropy bonus"),
        metrics_of(outcomes, "entropy bonus"),
    )
    assert hooked[0]["train/grad_norm"] == pytest.approx(default[0]["train/grad_norm"], rel=1e-4)
    assert hooked[0]["hook/entropy"] == pytest.approx(default[0]["train/entropy"], rel=1e-5)


def test_hooks_of_megatron_are_called_in_order(outcomes):
    [(_, calls)] = outcomes["megatron"]
    step = ["log_prob ", "log_prob ref_"]
    assert calls == ["init", *step, "train 0 0", "train 0 1", *step, "train 1 0", "train 1 1"]


@pytest.mark.parametrize("name", WRONG)
def test_what_a_hook_does_wrong_is_said_by_its_name(outcomes, name):
    setting, problem = WRONG[name]
    [error] = outcomes[name]
    assert error.startswith(f"HookError: rollout.hooks.{setting} ({HOOKS}.{name}) "), error
    assert problem in error


def imported(rank: RankSpec, config: RunConfig) -> list[str]:
    train(rank, config)
    return [name for name in sys.modules if name.startswith("slipstream.backend.trainer.slime")]


def test_nothing_of_hooks_is_imported_without_them(tmp_path):
    config = Case().config(make_checkpoint(tmp_path))
    assert run_ranks(1, imported, config) == [[]]
