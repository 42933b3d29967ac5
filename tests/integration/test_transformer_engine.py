"""Layers of Transformer Engine's spec, with plain modules in its place: names, values, checkpoints, and the
tokens of a trajectory on several ranks.

tests/gpu has the same on a GPU, with Transformer Engine itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.families import FAMILIES, model_spec
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries_of
from slipstream.configs.schema import RunConfig
from slipstream.rollout.network import free_port
from tests import stand_in_engine
from tests.integration.test_megatron_parity import (
    check,
    config_for,
    make_batch,
    one_after_the_other,
    reference_gradients,
)
from tests.integration.test_trainer_checkpoint import train, trainer_of
from tests.models import make_checkpoint
from tests.ranks import run_ranks

VOCAB = 101
SPEC = "transformer_engine"


def parameters(rank: RankSpec, work: list[tuple[int, RunConfig]]) -> list[dict[str, tuple[int, ...]]]:
    stand_in_engine.install()
    found = []
    for port, config in work:
        with trainer_of(replace(rank, port=port), config) as trainer:
            found.append({name: tuple(p.shape) for part in trainer._parameters for name, p in part.items()})
    return found


def with_the_stand_in(rank: RankSpec, work: list[tuple[int, RunConfig]], batch: TrainBatch):
    stand_in_engine.install()
    return one_after_the_other(rank, work, batch)


def exported(trainer: Any) -> dict[str, np.ndarray]:
    return {
        name: tensor.float().numpy().copy()
        for bucket in trainer._export()
        if bucket is not None
        for name, tensor in bucket.tensors()
    }


def go_on(rank: RankSpec, work: dict[str, tuple[RunConfig, int, RunConfig, int, Path]]):
    """Per case the model two steps from a checkpoint, of the run that wrote it and of one that goes on."""
    stand_in_engine.install()
    lines = {}
    for name, (config, port, other, other_port, folder) in work.items():
        folder.mkdir()
        with trainer_of(replace(rank, port=port), config) as trainer:
            train(trainer, 1)
            trainer.begin_checkpoint(folder)
            trainer.finish_checkpoint()
            train(trainer, 2)
            before = exported(trainer)
        with trainer_of(replace(rank, port=other_port), other) as trainer:
            trainer.restore(folder)
            train(trainer, 2)
            lines[name] = (before, exported(trainer))
    return lines


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {
        family: make_checkpoint(tmp_path_factory.mktemp(family), family, tied=family == "qwen3")
        for family in sorted(FAMILIES)
    }


def test_the_bridge_names_every_parameter_that_megatron_makes_of_its_spec(models):
    work = [(free_port("127.0.0.1"), config_for(folder, {}, layer_spec=SPEC)) for folder in models.values()]
    [found] = run_ranks(1, parameters, work, fresh=True)
    for folder, names in zip(models.values(), found, strict=True):
        expected = {
            entry.parameter: entry.split.shard_shape(shard.size)
            for entry, shard in entries_of(model_spec(folder), Layout(layer_spec=SPEC), 0)
        }
        expected |= {name: names[name] for name in ("output_layer.weight",) if name in names}
        assert names == expected
        assert any("layer_norm_weight" in name for name in names)


def test_logprobs_and_gradients_equal_those_of_transformers(models):
    batch = make_batch(VOCAB)
    configs = [config_for(folder, {}, layer_spec=SPEC) for folder in models.values()]
    work = [(free_port("127.0.0.1"), config) for config in configs]
    [results] = run_ranks(1, with_the_stand_in, work, batch, fresh=True)
    for (family, folder), result in zip(models.items(), results, strict=True):
        logps, gradients = reference_gradients(folder, batch, temperature=0.8)
        check(family, batch, [result], logps, gradients)


def test_a_checkpoint_of_one_layer_spec_goes_on_with_the_other(models, tmp_path):
    def config(family: str, spec: str) -> RunConfig:
        return config_for(models[family], {}, layer_spec=spec, optimizer={"lr": 1e-3, "eps": 1e-6})

    work = {
        f"{family} {one} {other}": (
            config(family, one),
            free_port("127.0.0.1"),
            config(family, other),
            free_port("127.0.0.1"),
            tmp_path / f"{family}-{one}-{other}",
        )
        for family in ("qwen3", "glm4_moe", "deepseek_v3")
        for one, other in ((SPEC, SPEC), (SPEC, "local"), ("local", SPEC))
    }
    [found] = run_ranks(1, go_on, work, timeout_s=280, fresh=True)
    for name, (before, after) in found.items():
        assert after.keys() == before.keys()
        for tensor, value in before.items():
            np.testing.assert_allclose(after[tensor], value, 1e-4, 1e-5, err_msg=f"{name}: {tensor}")


CONTEXT = {"context": 2}


def test_ranks_that_share_a_context_give_the_logprobs_and_gradients_of_transformers(models):
    batch = make_batch(VOCAB)
    layouts = {
        "qwen3": CONTEXT,
        "qwen2": CONTEXT,
        "qwen3_moe": CONTEXT | {"expert": 2},
        "deepseek_v3": CONTEXT,
    }
    configs = [config_for(models[family], layout, layer_spec=SPEC) for family, layout in layouts.items()]
    work = [(free_port("127.0.0.1"), config) for config in configs]
    by_rank = run_ranks(2, with_the_stand_in, work, batch, timeout_s=280, fresh=True)
    for family, *results in zip(layouts, *by_rank, strict=True):
        logps, gradients = reference_gradients(models[family], batch, temperature=0.8)
        check(family, batch, results, logps, gradients)


def lines(rank: RankSpec, work: dict[str, tuple[int, RunConfig]]) -> dict[str, Any]:
    """Per case the metrics of the last of two steps, and the exported model on the first rank."""
    stand_in_engine.install()
    found = {}
    for name, (port, config) in work.items():
        with trainer_of(replace(rank, port=port), config) as trainer:
            found[name] = (train(trainer, 2), exported(trainer), trainer.logprobs(range(20, 50)))
    return found


@pytest.mark.parametrize("objective", ["gspo", "ppo"])
def test_ranks_that_share_a_context_train_what_one_rank_trains(models, objective):
    optimizer = {"lr": 1e-3, "eps": 1e-5, "distributed": True}
    actor = {"objective": {"type": objective}, "averaging": "sequence", "entropy_bonus": 0.01}
    configs = {
        name: config_for(
            models["qwen3"], layout, layer_spec=SPEC, optimizer=optimizer, minibatches=2, **actor
        )
        for name, layout in (("one", {}), ("two", CONTEXT))
    }
    work = {name: (free_port("127.0.0.1"), config) for name, config in configs.items()}
    [one] = run_ranks(1, lines, {"one": work["one"]}, fresh=True)
    first, second = run_ranks(2, lines, {"two": work["two"]}, fresh=True)
    assert second["two"][0] == {} and second["two"][2] is None  # one rank reports
    for before, after in zip(one["one"], first["two"], strict=True):
        if isinstance(before, list):
            np.testing.assert_allclose(after, before, atol=1e-4)
            continue
        assert after.keys() == before.keys()
        for name, value in before.items():
            if not name.startswith("packing/"):
                np.testing.assert_allclose(after[name], value, 1e-3, 1e-4, err_msg=name)
