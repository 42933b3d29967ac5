"""A trainer that shows its peak before its first step trains as it would have without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.memory.trainer_memory import tokens_of
from slipstream.backend.trainer.rehearsal import largest_microbatches
from slipstream.configs.schema import ActorConfig, RunConfig
from tests.integration.test_resting import config_of
from tests.integration.test_trainer_checkpoint import draw, own_weights, train, trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs

CASES = ("bfloat16", "distributed, gathered late", "pipeline", "experts", "critic and average")


def after_steps(rank: RankSpec, work: list[tuple[int, RunConfig]], rehearses: bool) -> list[dict[str, Any]]:
    found = []
    for port, config in work:
        with trainer_of(replace(rank, port=port), config) as trainer:
            if rehearses:
                trainer.rehearse()
            drawn = draw()[2:]  # nobody seeds Python's and numpy's
            metrics = train(trainer, 2)
            found.append({"weights": own_weights(trainer), "metrics": metrics, "drawn": drawn})
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": make_checkpoint(folder / "dense"),
        "experts": make_checkpoint(folder / "experts", "qwen3_moe", tied=False),
    }


def test_a_rehearsal_changes_nothing(models: dict[str, Path]):
    jobs = {}
    for case in CASES:
        config = config_of(case, models)
        for rehearses in (False, True):
            work = [(held_port(), config)]
            jobs[case, rehearses] = Job(config.actor.parallel.world_size, after_steps, (work, rehearses))
    found = {key: [result for [result] in by_rank] for key, by_rank in run_jobs(jobs).items()}
    for case in CASES:
        for before, after in zip(found[case, False], found[case, True], strict=True):
            assert (after["metrics"], after["drawn"]) == (before["metrics"], before["drawn"]), case
            for name, weight in before["weights"].items():
                np.testing.assert_array_equal(after["weights"][name], weight, f"{case}: {name}")


@pytest.mark.parametrize(
    ("actor", "new_tokens", "count"),
    [
        ({"microbatch_tokens": 300}, 64, 1),
        ({"microbatch_tokens": 64}, 250, 1),
        ({"microbatch_tokens": 257, "parallel": {"pipeline": 3}}, 64, 3),
        ({"microbatch_tokens": 512, "parallel": {"pipeline": 2, "virtual_pipeline": 2}}, 64, 4),
        ({"microbatch_tokens": 512, "parallel": {"tensor": 2, "sequence": True}}, 64, 1),
    ],
)
def test_the_rehearsed_micro_batch_is_the_largest_of_the_plan(actor: dict, new_tokens: int, count: int):
    settings = ActorConfig.model_validate(actor)
    micros = largest_microbatches(settings, new_tokens, positions=128, vocab=50)
    assert len(micros) == count
    planned = tokens_of(settings, new_tokens)
    assert abs(len(micros[0].tokens_T) - planned) <= settings.parallel.length_multiple
    assert micros[0].longest <= 128 and micros[0].tokens_T.max() < 50
    assert len(micros[0].index_M) == planned - micros[0].owners or planned % 128 == 1
