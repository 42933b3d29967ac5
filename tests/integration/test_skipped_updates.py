"""An update that is not finite is made by no rank, and weights that are not finite leave no rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slipstream.backend.batch.skipped import SkippedUpdate
from slipstream.backend.batch.train_batch import TrainBatch, demonstrated
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import ParallelConfig, RunConfig
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import own_weights, trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

VOCAB, MINIBATCHES = 101, 3
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    model: str = "dense"
    optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return ParallelConfig.model_validate(self.parallel).world_size

    def config(self, models: Path) -> RunConfig:
        optimizer = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, **self.optimizer}
        return config_for(
            models / self.model,
            self.parallel,
            dtype=self.dtype,
            minibatches=MINIBATCHES,
            optimizer=optimizer,
        )


OVERLAP = {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES = {
    "one rank": Case(),
    "one rank, bfloat16": Case(dtype="bfloat16"),
    "one rank, without clipping": Case(optimizer={"clip_grad": 0.0}),
    "tensor 2": Case({"tensor": 2}),
    "tensor 2, bfloat16": Case({"tensor": 2}, dtype="bfloat16"),
    "pipeline 2": Case({"pipeline": 2}, optimizer={"clip_grad": 0.0}),
    "data 2": Case({"data": 2}),
    "data 2, distributed, bfloat16": Case({"data": 2}, "bfloat16", optimizer={"distributed": True}),
    "data 2, overlapped": Case({"data": 2}, optimizer=OVERLAP),
    "expert 2": Case({"data": 2, "expert": 2}, model="experts"),
}


# ---- batches


def clean() -> TrainBatch:
    return make_batch(VOCAB, n=12)


def with_logprob(batch: TrainBatch, place: int, value: float) -> TrainBatch:
    """Return the batch with another behaviour log-prob of one token of a trajectory."""
    changed = batch.trajectories[place].logprobs_T.copy()
    changed[-1] = value
    return with_trajectory(batch, place, logprobs_T=changed)


def with_trajectory(batch: TrainBatch, place: int, **changes: Any) -> TrainBatch:
    trajectories = list(batch.trajectories)
    trajectories[place] = replace(trajectories[place], **changes)
    return replace(batch, trajectories=tuple(trajectories))


# ---- on a rank


def members(config: RunConfig, batch: TrainBatch) -> list[set[int]]:
    """Return the places of the trajectories of each mini-batch of the first step, on all ranks together."""
    from slipstream.backend.batch.packing import split_minibatches

    draw = np.random.default_rng((config.run.seed, 0))
    return [set(part.tolist()) for part in split_minibatches(batch.episode_N, MINIBATCHES, draw)]


@contextmanager
def leaving_out(trainer: Any, numbers: set[int]) -> Iterator[None]:
    """Make no update for the mini-batches ``numbers`` of a step."""
    from slipstream.backend.megatron.trained import Update

    update, calls = trainer._trained.update, iter(range(MINIBATCHES))

    def updating(*args: Any) -> Any:
        return Update([], NAN, False) if next(calls) in numbers else update(*args)

    with patch.object(trainer._trained, "update", updating):
        yield


@contextmanager
def spoiled_gradient(trained: Any, here: bool) -> Iterator[list[str]]:
    """Put a NaN into one gradient of the first update on this rank if ``here``. Yield the gradient's name."""
    config = trained.parts[0].config
    finalize, spoiled = config.finalize_model_grads_func, []

    def spoiling(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        if here and not spoiled:
            name, parameter = list(trained.parts[-1].module.named_parameters())[-1]
            parameter.main_grad.view(-1)[0] = NAN
            spoiled.append(name)

    with patch.object(config, "finalize_model_grads_func", spoiling):
        yield spoiled


def updates_made(trainer: Any) -> int:
    from slipstream.backend.megatron import optimizer_state

    return optimizer_state.updates(trainer._trained.optimizer)


def after_step(
    rank: RankSpec, config: RunConfig, batch: TrainBatch, left_out: set[int] | None = None
) -> dict[str, Any]:
    """Return what this rank has after one step, and its weights after another one on clean data."""
    with trainer_of(rank, config) as trainer:
        if left_out is None:
            metrics = trainer.train(batch)
        else:
            with leaving_out(trainer, left_out):
                metrics = trainer.train(batch)
        result = {
            "metrics": metrics,
            "weights": own_weights(trainer),
            "updates": updates_made(trainer),
            "skipped": trainer.skipped_updates(),
        }
        trainer.train(make_batch(VOCAB, n=12, seed=1, version=1))
        return result | {"later": own_weights(trainer), "updates later": updates_made(trainer)}


def after_spoiled_gradient(rank: RankSpec, config: RunConfig) -> dict[str, Any]:
    """Spoil a gradient on the last rank alone, after all gradients were summed."""
    with trainer_of(rank, config) as trainer:
        with spoiled_gradient(trainer._trained, rank.rank == rank.world_size - 1) as name:
            metrics = trainer.train(clean())
        return {
            "metrics": metrics,
            "weights": own_weights(trainer),
            "updates": updates_made(trainer),
            "skipped": trainer.skipped_updates(),
            "name": name,
        }


def on_one_rank_after_another(rank: RankSpec, work: list[tuple[int, Callable[..., Any], tuple]]) -> list[Any]:
    return [function(replace(rank, port=port), *args) for port, function, args in work]


def jobs(cases: dict[Any, tuple[int, Callable[..., Any], tuple]]) -> dict[Any, Job]:
    """Each case as a job whose trainer destroys its own groups."""
    return {
        key: Job(ranks, on_one_rank_after_another, ([(held_port(), function, args)],))
        for key, (ranks, function, args) in cases.items()
    }


def run_cases(cases: dict[Any, tuple[int, Callable[..., Any], tuple]]) -> dict[Any, list[Any]]:
    """Return what each rank of each case returns."""
    return {key: [result for [result] in by_rank] for key, by_rank in run_jobs(jobs(cases)).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "dense", num_hidden_layers=2)
    make_checkpoint(folder / "experts", "qwen3_moe", tied=False, num_hidden_layers=2, mlp_only_layers=[0])
    return folder


POISONED = {"first mini-batch": 0, "middle mini-batch": 1, "last mini-batch": 2}
PLACES = [(case, where) for case in CASES for where in POISONED]
KEPT = ("one rank", "tensor 2, bfloat16", "pipeline 2", "expert 2")
KEPT_PLACES = [(case, list(POISONED)[number % 3]) for number, case in enumerate(KEPT)]
REWARDED = ("one rank", "tensor 2, bfloat16", "data 2", "pipeline 2")
KEPT_REWARDED = ("one rank", "pipeline 2")


@pytest.fixture(scope="module")
def steps(models: Path, request) -> dict[Any, list[dict[str, Any]]]:
    """By (case, poisoned mini-batch, poisoned or left out): what each rank has."""
    cases = {}
    for name, where in chosen(request, "case", "where"):
        case, number = CASES[name], POISONED[where]
        config = case.config(models)
        place = min(members(config, clean())[number])
        poisoned = with_logprob(clean(), place, NAN)
        cases[name, where, "poisoned"] = (case.ranks, after_step, (config, poisoned))
        cases[name, where, "left out"] = (case.ranks, after_step, (config, clean(), {number}))
    return run_cases(cases)


def assert_equal_weights(ones: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    assert ones.keys() == others.keys()
    for name, weight in others.items():
        np.testing.assert_array_equal(ones[name], weight, err_msg=name)


def reported(by_rank: list[dict[str, Any]]) -> tuple[dict[str, float], list[SkippedUpdate]]:
    """Return the metrics and the skipped updates of the one rank that reports."""
    [(metrics, skipped)] = [(r["metrics"], r["skipped"]) for r in by_rank if r["metrics"] is not None]
    return metrics, skipped


@pytest.mark.parametrize(("case", "where"), shortened(PLACES, KEPT_PLACES))
def test_a_nan_log_prob_costs_only_the_update_of_its_mini_batch(case: str, where: str, steps):
    for poisoned, expected in zip(
        steps[case, where, "poisoned"], steps[case, where, "left out"], strict=True
    ):
        assert_equal_weights(poisoned["weights"], expected["weights"])
        assert_equal_weights(poisoned["later"], expected["later"])
        assert poisoned["updates"] == MINIBATCHES - 1
        assert poisoned["updates later"] == 2 * MINIBATCHES - 1


@pytest.mark.parametrize(("case", "where"), shortened(PLACES, KEPT_PLACES))
def test_a_skipped_update_is_counted_and_named_and_leaves_the_metrics_finite(
    case: str, where: str, models: Path, steps
):
    metrics, skipped = reported(steps[case, where, "poisoned"])
    expected, _ = reported(steps[case, where, "left out"])
    assert metrics["train/skipped_updates"] == 1
    assert metrics == pytest.approx(expected)
    assert all(map(np.isfinite, metrics.values()))
    number = POISONED[where]
    place = min(members(CASES[case].config(models), clean())[number])
    [update] = skipped
    assert (update.model, update.minibatch) == ("policy", number + 1)
    [trajectory] = update.trajectories
    assert (trajectory.place, trajectory.group) == (place, place // 2)
    assert {"behaviour log-prob", "loss"} <= set(trajectory.numbers)
    assert f"trajectory {place} of the batch (group {place // 2}): behaviour log-prob" in str(update)


# ---- rewards, and gradients of one rank


@pytest.fixture(scope="module")
def others(models: Path, request) -> dict[Any, list[dict[str, Any]]]:
    cases = {}
    for name in chosen(request, "spoiled"):
        case = CASES[name]
        config = case.config(models)
        cases[name, "gradient"] = (case.ranks, after_spoiled_gradient, (config,))
        cases[name, "first left out"] = (case.ranks, after_step, (config, clean(), {0}))
    for name in chosen(request, "rewarded"):
        config = CASES[name].config(models)
        numbers = {n for n, places in enumerate(members(config, clean())) if places & {4, 5}}
        batch = with_trajectory(clean(), 4, reward=INF)
        cases[name, "reward"] = (CASES[name].ranks, after_step, (config, batch))
        cases[name, "group left out"] = (CASES[name].ranks, after_step, (config, clean(), numbers))
    return run_cases(cases)


@pytest.mark.parametrize("rewarded", shortened(REWARDED, KEPT_REWARDED))
def test_an_infinite_reward_costs_the_updates_that_its_group_is_in(rewarded: str, models: Path, others):
    for poisoned, expected in zip(
        others[rewarded, "reward"], others[rewarded, "group left out"], strict=True
    ):
        assert_equal_weights(poisoned["weights"], expected["weights"])
    numbers = [
        n for n, places in enumerate(members(CASES[rewarded].config(models), clean())) if places & {4, 5}
    ]
    metrics, skipped = reported(others[rewarded, "reward"])
    assert metrics["train/skipped_updates"] == len(numbers)
    assert [update.minibatch - 1 for update in skipped] == numbers
    for update in skipped:
        numbers_of = {trajectory.place: trajectory.numbers for trajectory in update.trajectories}
        assert "reward" in numbers_of[4]  # the cause, in whichever mini-batch it is
        assert set(numbers_of) <= {4, 5}


@pytest.mark.parametrize("spoiled", shortened(CASES, KEPT))
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all(spoiled: str, others):
    for actual, expected in zip(others[spoiled, "gradient"], others[spoiled, "first left out"], strict=True):
        assert_equal_weights(actual["weights"], expected["weights"])
        assert actual["updates"] == MINIBATCHES - 1
    metrics, [update] = reported(others[spoiled, "gradient"])
    assert metrics["train/skipped_updates"] == 1
    assert update.trajectories == ()
    [name] = others[spoiled, "gradient"][-1]["name"]
    assert any(name in parameter for parameter in update.parameters), update.parameters
    assert name in str(update)


# ---- a step without a single update, a critic, a reward model


def all_poisoned(rank: RankSpec, config: RunConfig) -> dict[str, Any]:
    with trainer_of(rank, config) as trainer:
        before = own_weights(trainer)
        batch = clean()
        for place in range(len(batch.trajectories)):
            batch = with_logprob(batch, place, NAN)
        metrics = trainer.train(batch)
        return {
            "before": before,
            "after": own_weights(trainer),
            "metrics": metrics,
            "skipped": trainer.skipped_updates(),
            "step": trainer.step,
        }


def with_critic(rank: RankSpec, config: RunConfig) -> dict[str, Any]:
    """Spoil the first update of the critic on the last rank alone."""
    with trainer_of(rank, config) as trainer:
        critic = trainer._scorers.critic.trained

        def weights() -> dict[str, np.ndarray]:
            named = [item for part in critic.modules for item in part.named_parameters()]
            return {name: value.detach().float().numpy().copy() for name, value in named}

        before = weights()
        with spoiled_gradient(critic, rank.rank == rank.world_size - 1):
            metrics = trainer.train(make_batch(VOCAB, n=4))
        return {
            "before": before,
            "after": weights(),
            "metrics": metrics,
            "skipped": trainer.skipped_updates(),
        }


def reward_model(rank: RankSpec, config: RunConfig) -> dict[str, Any]:
    """Spoil the update of a reward model on the last rank alone."""

    from slipstream.backend.megatron.parallel import leave
    from slipstream.backend.trainer.reward_model import RewardModelRank

    trainer = RewardModelRank(config, rank)
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, VOCAB, 5).tolist(), rng.integers(0, VOCAB, 7).tolist()) for _ in range(8)]
    before = own_weights(trainer)
    with spoiled_gradient(trainer._trained, rank.rank == rank.world_size - 1):
        metrics = trainer.train(demonstrated(pairs, version=0))
    result = {
        "before": before,
        "after": own_weights(trainer),
        "metrics": metrics,
        "skipped": trainer.skipped_updates(),
    }
    leave()
    return result


@pytest.fixture(scope="module")
def further(models: Path) -> dict[str, list[dict[str, Any]]]:
    plain = Case({"data": 2}).config(models)
    critic = config_for(
        models / "dense",
        {"tensor": 2},
        advantage=[{"type": "reward", "estimator": "gae"}],
        optimizer={"lr": 1e-3},
    )
    critic = RunConfig.model_validate(critic.model_dump() | {"critic": {"optimizer": {"lr": 1e-2}}})
    reward = config_for(models / "dense", {"pipeline": 2}, optimizer={"lr": 1e-2})
    return run_cases(
        {
            "all": (2, all_poisoned, (plain,)),
            "critic": (2, with_critic, (critic,)),
            "reward model": (2, reward_model, (reward,)),
        }
    )


def test_a_step_without_an_update_keeps_the_weights_and_counts_as_a_step(further):
    for rank in further["all"]:
        assert_equal_weights(rank["after"], rank["before"])
        assert rank["step"] == 1
    metrics, skipped = reported(further["all"])
    assert metrics["train/skipped_updates"] == len(skipped) == MINIBATCHES
    assert "train/loss" not in metrics
    assert metrics["train/lr"] == 1e-3 and metrics["train/tokens"] > 0


def test_the_critic_skips_an_update_of_its_own(further):
    for rank in further["critic"]:
        assert_equal_weights(rank["after"], rank["before"])
    metrics, [update] = reported(further["critic"])
    assert (metrics["critic/skipped_updates"], metrics["train/skipped_updates"]) == (1, 0)
    assert update.model == "critic"
    assert "critic/loss" not in metrics and metrics["train/grad_norm"] > 0


def test_a_reward_model_skips_an_update(further):
    for rank in further["reward model"]:
        assert_equal_weights(rank["after"], rank["before"])
    metrics, [update] = reported(further["reward model"])
    assert metrics["train/skipped_updates"] == 1
    assert update.model == "reward model"


# ---- weights on their way out


def refused(call: Callable[..., Any], *args: Any) -> str:
    from slipstream.backend.megatron.finite import NotFinite

    with pytest.raises(NotFinite) as raised:
        call(*args)
    return str(raised.value)


def ways_out(rank: RankSpec, config: RunConfig, folder: Path) -> dict[str, str]:
    """Spoil a weight, then a number of Adam's state, on the last rank alone; return the errors here."""
    last = rank.rank == rank.world_size - 1
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    with trainer_of(rank, config) as trainer:
        trainer.train(clean())
        name, weight = list(trainer._trained.modules[-1].named_parameters())[-1]
        kept = weight.detach().clone()
        if last:
            weight.detach().view(-1)[3] = INF
        errors = {
            "name": name,
            "publish": refused(trainer.publish, 1, []),
            "export": refused(trainer.export_hf, folder / "hf"),
            "weights in a checkpoint": refused(trainer.begin_checkpoint, checkpoint),
        }
        weight.detach().copy_(kept)
        if last:
            states = [part.state for part in parts_of(trainer._trained.optimizer)]
            next(iter(states[-1].values()))["exp_avg"].view(-1)[0] = NAN
        errors["state in a checkpoint"] = refused(trainer.begin_checkpoint, checkpoint)
        trainer.export_hf(folder / "sound")  # Adam's state does not leave with the weights
        return errors


def parts_of(optimizer: Any) -> list[Any]:
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


@pytest.mark.parametrize(
    "case", ["one rank", "tensor 2, bfloat16", "pipeline 2", "data 2, overlapped", "expert 2"]
)
def test_weights_that_are_not_finite_on_one_rank_leave_no_rank(case: str, models: Path, tmp_path: Path):
    ranks = CASES[case].ranks
    by_rank = run_cases({case: (ranks, ways_out, (CASES[case].config(models), tmp_path))})[case]
    errors = [{way: text for way, text in rank.items() if way != "name"} for rank in by_rank]
    assert all(rank == errors[0] for rank in errors), "every rank raises the same error"
    for way, error in errors[0].items():
        assert f"rank {ranks - 1}: " in error, (way, error)
        assert not (ranks == 2 and "rank 0: " in error), (way, error)
    for way in ("publish", "export", "weights in a checkpoint"):
        assert by_rank[-1]["name"] in by_rank[0][way], by_rank[0][way]
    assert "exp_avg" in by_rank[0]["state in a checkpoint"]
    assert not (tmp_path / "hf").exists()
    assert not list((tmp_path / "checkpoint").iterdir())
    assert (tmp_path / "sound" / "config.json").exists()


def test_finite_weights_of_any_size_pass():
    """The squares of these overflow, and the weights do not."""
    from slipstream.backend.megatron.finite import not_finite_names

    large = torch.full((4,), 1e30)
    spoiled = torch.tensor([1.0, NAN])
    assert not_finite_names({"large": large, "whole numbers": torch.arange(3), "none": large[:0]}) == []
    assert not_finite_names({"large": large, "spoiled": spoiled}) == ["spoiled"]
