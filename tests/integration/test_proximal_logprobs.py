"""The training pass of the first mini-batch gives its proximal log-probs, which a pass of their own would."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from slipstream.backend.batch.flops import forward_flops
from slipstream.backend.batch.packing import split_minibatches
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import model_spec
from slipstream.configs.schema import ParallelConfig, RunConfig
from tests.integration.test_megatron_parity import config_for, make_batch
from tests.integration.test_trainer_checkpoint import own_weights, trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

VOCAB, TRAJECTORIES = 101, 12
CASES: dict[str, dict[str, Any]] = {
    "one update": {},
    "one update, bfloat16": {"dtype": "bfloat16"},
    "three updates": {"minibatches": 3},
    "tensor 2": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline 2, three updates": {"parallel": {"pipeline": 2}, "minibatches": 3},
    "virtual pipeline 2, two updates": {
        "parallel": {"pipeline": 2, "virtual_pipeline": 2},
        "minibatches": 2,
    },
    "data 2, two updates, bfloat16": {"parallel": {"data": 2}, "minibatches": 2, "dtype": "bfloat16"},
    "experts": {"model": "experts", "parallel": {"data": 2, "expert": 2}, "minibatches": 2},
    "replayed experts": {
        "model": "experts",
        "parallel": {"pipeline": 2},
        "minibatches": 2,
        "routing_replay": "recompute",
        "recompute": "full",
    },
    "masks": {
        "minibatches": 2,
        "correction": {
            "token": {"type": "mask", "low": 0.2, "high": 4.0},
            "sequence": {"type": "geometric", "low": 0.1, "high": 10.0},
            "negative": {"delta": 0.1},
        },
    },
    "activations recomputed": {"recompute": "full"},
    "without recomputing": {"recompute_logprobs": False, "use_decoupled_loss": False},
    "penalty in the reward": {"kl": {"where": "reward", "coefficient": 0.1}, "minibatches": 2},
}
"""By name: settings of the actor."""
KEPT = ("one update", "three updates", "tensor 2", "experts", "masks", "without recomputing")
IN_ADVANCE = {"penalty in the reward": 2, "without recomputing": 0}
"""Number of mini-batches with a forward pass for proximal log-probs, where it is not all but the first."""


def config_of(case: str, models: Path) -> RunConfig:
    settings = dict(CASES[case])
    model, parallel = models / settings.pop("model", "dense"), settings.pop("parallel", {})
    settings["optimizer"] = {"lr": 1e-2, "clip_grad": 0.5}
    return config_for(model, parallel, **settings)


def batch_of(step: int) -> TrainBatch:
    """Return trajectories of which every other one is a version old, if there is an older one."""
    batch = make_batch(VOCAB, n=TRAJECTORIES, seed=step, version=step)
    aged = [
        replace(t, versions_T=np.where(t.loss_mask_T, step - number % 2, t.versions_T).astype(np.int32))
        for number, t in enumerate(batch.trajectories)
    ]
    return replace(batch, trajectories=tuple(aged) if step else batch.trajectories)


def train(rank: RankSpec, work: list[tuple[int, RunConfig]], all_in_advance: bool) -> list[dict[str, Any]]:
    """Train two steps. ``all_in_advance``: compute the proximal log-probs of every mini-batch beforehand."""
    from slipstream.backend.trainer import rank as steps

    results = []
    for port, config in work:
        with trainer_of(replace(rank, port=port), config) as trainer:
            passes, log_probs = [0], trainer._policy.log_probs

            def counting(microbatches: Any, temperature: float, passes=passes, log_probs=log_probs) -> Any:
                passes[-1] += len(microbatches)
                return log_probs(microbatches, temperature)

            first: Callable[..., int] = steps.first_recomputed
            if all_in_advance:
                first = lambda actor, _: 0 if actor.recompute_logprobs else actor.minibatches  # noqa: E731
            with (
                patch.object(trainer._policy, "log_probs", counting),
                patch.object(steps, "first_recomputed", first),
            ):
                metrics, counts = [], []
                for step in range(2):
                    microbatches, _ = trainer.microbatches(batch_of(step))
                    counts.append(list(map(len, microbatches)))
                    metrics.append(trainer.train(batch_of(step)))
            results.append(
                {
                    "weights": own_weights(trainer),
                    "metrics": metrics,
                    "passes": passes[0],
                    "counts": counts,
                }
            )
    return results


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "dense")
    make_checkpoint(folder / "experts", "qwen3_moe", tied=False, num_hidden_layers=2, mlp_only_layers=[0])
    return folder


@pytest.fixture(scope="module")
def trained(models: Path, request) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """By case, and whether all is computed in advance: the results of each rank."""
    jobs = {}
    for case in chosen(request, "case"):
        config = config_of(case, models)
        for in_advance in (False, True):
            work = [(held_port(), config)]
            jobs[case, in_advance] = Job(config.actor.parallel.world_size, train, (work, in_advance))
    return {key: [result for [result] in by_rank] for key, by_rank in run_jobs(jobs).items()}


@pytest.mark.parametrize("case", shortened(CASES, KEPT))
def test_the_weights_and_the_metrics_are_those_of_a_pass_of_their_own(case: str, trained):
    for rank, separate in zip(trained[case, False], trained[case, True], strict=True):
        assert rank["weights"].keys() == separate["weights"].keys()
        for name, weight in separate["weights"].items():
            np.testing.assert_array_equal(rank["weights"][name], weight, err_msg=name)
        for metrics, expected in zip(rank["metrics"], separate["metrics"], strict=True):
            assert metrics == expected
    [metrics] = [rank["metrics"] for rank in trained[case, False] if rank["metrics"][0]]
    if case != "without recomputing":
        assert metrics[0]["mismatch/tokens"] > metrics[1]["mismatch/tokens"] > 0
        assert metrics[1]["staleness/logprob_abs_mean"] > 0


@pytest.mark.parametrize("case", shortened(CASES, KEPT))
def test_only_later_mini_batches_are_computed_in_advance(case: str, models: Path, trained):
    minibatches = config_of(case, models).actor.minibatches
    later = minibatches - IN_ADVANCE.get(case, minibatches - 1)
    for rank, separate in zip(trained[case, False], trained[case, True], strict=True):
        assert rank["passes"] == sum(sum(counts[later:]) for counts in rank["counts"])
        if case != "without recomputing":
            assert separate["passes"] == sum(map(sum, separate["counts"])) > 0


@pytest.mark.parametrize(
    "case", shortened([case for case in CASES if CASES[case].get("model") != "experts"], KEPT)
)
def test_the_arithmetic_of_a_step_leaves_out_passes_that_are_not_made(case: str, models: Path, trained):
    config = config_of(case, models)
    geometry = model_spec(models / "dense").geometry
    lengths = np.array([len(trajectory.tokens_T) for trajectory in batch_of(0).trajectories])
    flops = forward_flops(geometry, lengths)
    parts = split_minibatches(
        np.arange(TRAJECTORIES), config.actor.minibatches, np.random.default_rng((0, 0))
    )
    in_advance = parts[len(parts) - IN_ADVANCE.get(case, len(parts) - 1) :]
    expected = 3 * flops.sum() + sum(flops[part].sum() for part in in_advance)
    [metrics] = [rank["metrics"][0] for rank in trained[case, False] if rank["metrics"][0]]
    assert metrics["train/tflop"] == pytest.approx(expected / 1e12)


def test_there_are_cases_of_one_and_of_two_ranks():
    sizes = {ParallelConfig.model_validate(c.get("parallel", {})).world_size for c in CASES.values()}
    assert sizes == {1, 2}
