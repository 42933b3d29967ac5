"""A trainer that gives its memory up between steps trains the same weights, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.megatron.resting import Resting
from slipstream.configs.schema import ParallelConfig, RunConfig
from tests.exported import buckets_of
from tests.integration.test_megatron_parity import config_for
from tests.integration.test_trainer_checkpoint import own_weights, train, trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "distributed, bfloat16": {
        "dtype": "bfloat16",
        "parallel": {"data": 2},
        "optimizer": {"distributed": True},
    },
    "distributed, gathered late": {
        "parallel": {"data": 2},
        "minibatches": 2,
        "optimizer": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    },
    "pipeline": {"parallel": {"pipeline": 2}},
    "adapters": {"lora": {"rank": 3, "alpha": 12.0}},
    "experts": {"model": "experts", "parallel": {"data": 2, "expert": 2}},
    "critic and average": {
        "advantage": [{"type": "reward", "estimator": "gae"}],
        "kl": {"where": "loss", "reference": {"type": "average", "decay": 0.5}},
        "critic": {"optimizer": {"lr": 1e-2}},
    },
}


def config_of(case: str, models: dict[str, Path]) -> RunConfig:
    settings = dict(CASES[case])
    critic = settings.pop("critic", None)
    model, parallel = models[settings.pop("model", "dense")], settings.pop("parallel", {})
    config = config_for(model, parallel, **settings)
    if critic is None:
        return config
    return RunConfig.model_validate(config.model_dump() | {"critic": critic})


def after_steps(rank: RankSpec, work: list[tuple[int, RunConfig]], rests: bool) -> list[dict[str, Any]]:
    found = []
    for port, config in work:
        with trainer_of(replace(rank, port=port), config) as trainer:
            read = []
            for _ in range(STEPS):
                metrics = train(trainer, 1)
                if not rests:
                    continue
                trainer.rest(True)
                weights = [w for part in trainer._trained.modules for w in part.parameters()]
                read.append(all(w.untyped_storage().nbytes() for w in weights))
                exported = [bucket is None for bucket in buckets_of(trainer)]
                assert exported or torch.distributed.get_rank()
                trainer.rest(False)
                read.append(any(w.untyped_storage().nbytes() for w in weights))
                trainer.wake()
            found.append({"weights": own_weights(trainer), "metrics": metrics, "read": read})
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": make_checkpoint(folder / "dense"),
        "experts": make_checkpoint(folder / "experts", "qwen3_moe", tied=False),
    }


@pytest.fixture(scope="module")
def trained(models) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """By case, and whether the trainer rests: what every rank has."""
    jobs = {}
    for case in CASES:
        config = config_of(case, models)
        for rests in (False, True):
            work = [(held_port(), config)]
            jobs[case, rests] = Job(config.actor.parallel.world_size, after_steps, (work, rests))
    return {key: [result for [result] in by_rank] for key, by_rank in run_jobs(jobs).items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_rests_between_steps_change_nothing(trained, ranks: int):
    cases = [case for case in CASES if len(trained[case, True]) == ranks]
    assert cases
    for case in cases:
        for expected, found in zip(trained[case, False], trained[case, True], strict=True):
            assert found["read"] == [True, False] * STEPS, case
            assert found["metrics"] == expected["metrics"], case
            assert found["weights"].keys() == expected["weights"].keys()
            for name, weight in expected["weights"].items():
                np.testing.assert_array_equal(found["weights"][name], weight, f"{case}: {name}")


def test_views_of_one_memory_stay_views_of_it():
    memory = torch.arange(10.0)
    view, other = memory[2:7], torch.arange(3, dtype=torch.int32)
    resting = Resting(torch.device("cpu"), chunk=7)  # bytes: not even a float fits into every piece
    resting.rest([view, memory], keep=True)
    resting.rest([other, memory])
    assert memory.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    resting.wake()
    assert memory.tolist() == list(range(10)) and other.tolist() == [0, 1, 2]
    memory[3] = 50
    assert view[1] == 50


def test_what_is_not_kept_comes_back_with_room_for_it():
    memory = torch.arange(10.0)
    resting = Resting(torch.device("cpu"))
    resting.rest([memory], keep=False)
    resting.wake()
    assert memory.zero_().tolist() == [0] * 10


def test_a_world_size_for_each_number_of_ranks():
    assert {
        ParallelConfig.model_validate(case.get("parallel", {})).world_size for case in CASES.values()
    } == {1, 2}
