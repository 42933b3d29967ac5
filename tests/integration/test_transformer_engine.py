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
from slipstream.backend.megatron.supported import require_supported
from slipstream.bridge.families import FAMILIES, model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries_of
from slipstream.configs.schema import RunConfig
from tests import stand_in_engine
from tests.exported import buckets_of
from tests.integration.test_engine_routes import batch_with_routes, forced_reference
from tests.integration.test_megatron_fields import (
    AUXILIARY,
    assert_has_auxiliary_gradients,
    packs_and_gradients,
    without_advantages,
)
from tests.integration.test_megatron_parity import (
    check,
    computed,
    config_for,
    make_batch,
    one_after_the_other,
    reference_gradients,
)
from tests.integration.test_trainer_checkpoint import train, trainer_of
from tests.models import make_checkpoint
from tests.ports import held_port
from tests.ranks import Job, run_jobs
from tests.selection import chosen, shortened

VOCAB = 101
SPEC = "transformer_engine"


def named_and_computed(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    """Return the shapes of the parameters by name, and ``logprobs_and_gradients``, of one rank."""
    stand_in_engine.install()
    with trainer_of(rank, config) as trainer:
        shapes = {name: tuple(p.shape) for part in trainer._parameters for name, p in part.items()}
        return shapes, computed(trainer, rank, batch)


def with_the_stand_in(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    stand_in_engine.install()
    [result] = one_after_the_other(rank, [(rank.port, config)], batch)
    return result


def auxiliary_alone(rank: RankSpec, config: RunConfig, batch: TrainBatch):
    """Return ``packs_and_gradients`` with the stand-in."""
    stand_in_engine.install()
    return packs_and_gradients(rank, config, batch)


def exported(trainer: Any) -> dict[str, np.ndarray]:
    return {
        name: tensor.float().numpy().copy()
        for bucket in buckets_of(trainer)
        if bucket is not None
        for name, tensor in bucket.tensors()
    }


def go_on(rank: RankSpec, config: RunConfig, other: RunConfig, other_port: int, folder: Path):
    """Return the model two steps from a checkpoint, of the run that wrote it and of one that goes on."""
    stand_in_engine.install()
    folder.mkdir()
    with trainer_of(rank, config) as trainer:
        train(trainer, 1)
        trainer.begin_checkpoint(folder)
        trainer.finish_checkpoint()
        train(trainer, 2)
        before = exported(trainer)
    with trainer_of(replace(rank, port=other_port), other) as trainer:
        trainer.restore(folder)
        train(trainer, 2)
        return before, exported(trainer)


def trained_line(rank: RankSpec, config: RunConfig):
    """Return the metrics of the last of two steps, the exported model on the first rank, and log-probs."""
    stand_in_engine.install()
    with trainer_of(rank, config) as trainer:
        return train(trainer, 2), exported(trainer), trainer.logprobs(range(20, 50))


LOCAL_ONLY = {"deepseek_v32", "glm_moe_dsa"}
"""Families that are refused with these layers."""
CONTEXT = {"context": 2}
CONTEXT_LAYOUTS = {
    "qwen3": CONTEXT,
    "qwen2": CONTEXT,
    "qwen3_moe": CONTEXT | {"expert": 2},
    "deepseek_v3": CONTEXT,
}
ROUTED = ("qwen3_moe",)
OBJECTIVES = ("gspo", "ppo")
ON_ONE_RANK = sorted(FAMILIES.keys() - LOCAL_ONLY)
KEPT = ("qwen3", "qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next")
CHECKPOINTS = [
    (family, spec, other)
    for family in ("qwen3", "glm4_moe", "deepseek_v3")
    for spec, other in ((SPEC, SPEC), (SPEC, "local"), ("local", SPEC))
]
KEPT_CHECKPOINTS = [("qwen3", SPEC, "local"), ("glm4_moe", "local", SPEC), ("deepseek_v3", SPEC, SPEC)]


@pytest.fixture(scope="module")
def models(tmp_path_factory, request) -> dict[str, Path]:
    needed = {"qwen3", *CONTEXT_LAYOUTS, *chosen(request, "family"), *(each[0] for each in CHECKPOINTS)}
    return {
        family: make_checkpoint(tmp_path_factory.mktemp(family), family, tied=family == "qwen3")
        for family in sorted(needed - LOCAL_ONLY)
    }


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory, request) -> dict[tuple[str, ...], list[Any]]:
    """The results of all jobs by rank: the stand-in needs processes without Megatron, which start slowly."""
    folder, batch = tmp_path_factory.mktemp("checkpoints"), make_batch(VOCAB)
    jobs: dict[tuple[str, ...], Job] = {}
    for family in ON_ONE_RANK:
        if family not in chosen(request, "family"):
            continue
        config = config_for(models[family], {}, layer_spec=SPEC)
        jobs["one rank", family] = Job(1, named_and_computed, (config, batch))
    for family, layout in CONTEXT_LAYOUTS.items():
        config = config_for(models[family], layout, layer_spec=SPEC)
        jobs["context", family] = Job(2, with_the_stand_in, (config, batch))
    for family in ROUTED:
        config = config_for(
            models[family], CONTEXT_LAYOUTS[family], layer_spec=SPEC, routing_replay="rollout"
        )
        jobs["routes", family] = Job(2, with_the_stand_in, (config, batch_with_routes(models[family])))
    for kind, fields in AUXILIARY.items():
        config = config_for(models["qwen3_moe"], CONTEXT, layer_spec=SPEC, megatron=fields)
        jobs["auxiliary", kind] = Job(2, auxiliary_alone, (config, without_advantages(batch)))
    for family, spec, other in chosen(request, "of", "spec", "other"):
        first, second = (
            config_for(models[family], {}, layer_spec=x, optimizer={"lr": 1e-3, "eps": 1e-6})
            for x in (spec, other)
        )
        checkpoint = folder / f"{family}-{spec}-{other}"
        args = (first, second, held_port(), checkpoint)
        jobs["checkpoint", family, spec, other] = Job(1, go_on, args)
    for objective in OBJECTIVES:
        for ranks, layout in ((1, {}), (2, CONTEXT)):
            config = config_for(
                models["qwen3"],
                layout,
                layer_spec=SPEC,
                optimizer={"lr": 1e-3, "eps": 1e-5, "distributed": True},
                minibatches=2,
                objective={"type": objective},
                averaging="sequence",
                entropy_bonus=0.01,
            )
            jobs["line", objective, str(ranks)] = Job(ranks, trained_line, (config,))
    return run_jobs(jobs, fresh=True)


@pytest.mark.parametrize("family", shortened(ON_ONE_RANK, KEPT))
def test_the_bridge_names_every_parameter_that_megatron_makes_of_its_spec(models, results, family: str):
    [(names, _)] = results["one rank", family]
    expected = {
        entry.parameter: entry.split.shard_shape(shard.size)
        for entry, shard in entries_of(model_spec(models[family]), Layout(layer_spec=SPEC), 0)
    }
    expected |= {name: names[name] for name in ("output_layer.weight",) if name in names}
    assert names == expected
    has_norms = model_spec(models[family]).geometry.pre_norms
    assert any("layer_norm_weight" in name for name in names) == has_norms


@pytest.mark.parametrize("family", shortened(ON_ONE_RANK, KEPT))
def test_logprobs_and_gradients_equal_those_of_transformers(models, results, family: str):
    batch = make_batch(VOCAB)
    logps, gradients = reference_gradients(models[family], batch, temperature=0.8)
    [(_, found)] = results["one rank", family]
    check(family, batch, [found], logps, gradients)


@pytest.mark.parametrize(("of", "spec", "other"), shortened(CHECKPOINTS, KEPT_CHECKPOINTS))
def test_a_checkpoint_of_one_layer_spec_goes_on_with_the_other(results, of: str, spec: str, other: str):
    [(before, after)] = results["checkpoint", of, spec, other]
    assert after.keys() == before.keys()
    for tensor, value in before.items():
        np.testing.assert_allclose(after[tensor], value, 1e-4, 1e-5, err_msg=tensor)


def test_ranks_that_share_a_context_give_the_logprobs_and_gradients_of_transformers(models, results):
    batch = make_batch(VOCAB)
    for family in CONTEXT_LAYOUTS:
        logps, gradients = reference_gradients(models[family], batch, temperature=0.8)
        check(family, batch, results["context", family], logps, gradients)


@pytest.mark.parametrize("family", ROUTED)
def test_ranks_that_share_a_context_take_the_experts_of_the_engine(models, results, family: str):
    expected = forced_reference(models[family])
    check(family, batch_with_routes(models[family]), results["routes", family], *expected)


@pytest.mark.parametrize("kind", AUXILIARY)
def test_auxiliary_losses_have_the_gradient_of_transformers_on_ranks_that_share_a_context(
    models, results, kind: str
):
    packs, found = results["auxiliary", kind][0]
    assert_has_auxiliary_gradients(models["qwen3_moe"], kind, [packs], found)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_ranks_that_share_a_context_train_what_one_rank_trains(results, objective):
    [alone] = results["line", objective, "1"]
    first, second = results["line", objective, "2"]
    assert second[0] == {} and second[2] is None  # one rank reports
    for before, after in zip(alone, first, strict=True):
        if isinstance(before, list):
            np.testing.assert_allclose(after, before, atol=1e-4)
            continue
        assert after.keys() == before.keys()
        for name, value in before.items():
            if not name.startswith("packing/"):
                np.testing.assert_allclose(after[name], value, 1e-3, 1e-4, err_msg=name)


@pytest.mark.parametrize("family", sorted(LOCAL_ONLY))
def test_a_model_that_these_layers_cannot_compute_is_refused(tmp_path, family):
    geometry = model_spec(make_checkpoint(tmp_path, family, tied=False)).geometry
    with pytest.raises(UnsupportedModel, match=rf"{family}: .*; set actor\.layer_spec to local"):
        require_supported(geometry, Layout(layer_spec=SPEC))
    require_supported(geometry, Layout())
