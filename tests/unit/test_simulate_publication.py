"""The time that a version takes to reach the engines, by transport, against the plans that a run follows."""

from pathlib import Path

import pytest
import yaml

from slipstream.backend.commands.check import planned, read_recipe, shipped_model
from slipstream.backend.commands.plan_document import costs_of
from slipstream.backend.simulate.derived import derived_model
from slipstream.backend.simulate.gpu_split import GpuSplit, layout_of, trainer_unit
from slipstream.bridge.families import spec_of
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries
from slipstream.bridge.shards.regions import Region, contiguous
from slipstream.bridge.shards.sends import EngineSeat, Sends, Table, indexed, most_sent
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.schema import ParallelConfig
from slipstream.configs.schema.simulate import SimulateConfig
from tests.environment import ROOT

SMALL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def model_of_costs(size: str, *overrides: str) -> SimulateConfig:
    """The cost model that ``plan`` and ``simulate`` derive for the bundled recipe of a model."""
    [recipe] = (ROOT / "configs/recipes").glob(f"*-{size}-*async*.yaml")
    model = shipped_model(recipe.stem, overrides)
    plan = planned(read_recipe(recipe.stem, overrides, model_config=model))
    assert plan.engine is not None
    return derived_model(plan.config, plan.export, plan.engine, layout_of(plan.config))


@pytest.mark.parametrize(
    ("layout", "engines"),
    [
        (Layout(tensor=2, data=4, expert=2, expert_tensor=1), 8),
        (Layout(tensor=2, data=4, expert=2, expert_tensor=1), 3),
        (Layout(tensor=2, pipeline=2, data=2, expert=4, expert_tensor=1), 5),
        (Layout(data=4, expert=4), 1),
        (Layout(data=2, expert=2, expert_tensor=1, pipeline=4), 4),
    ],
)
def test_the_busiest_rank_sends_as_often_as_the_send_plan_makes_it_send(layout, engines):
    """An engine of one rank takes every tensor once. With as many engines as copies each copy sends once."""
    spec = spec_of(SMALL, Path("nowhere"))
    table = indexed(
        Region(name, (0,) * len(shape), shape, name, 0, contiguous(shape), (1,) * len(shape))
        for entry in entries(spec, Layout())
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    )
    for expert in (False, True):
        part = {name: regions for name, regions in table.items() if (".experts." in name) is expert}
        copies = layout.tensor * layout.data // (layout.expert * layout.etp if expert else layout.tensor)
        often = busiest(spec, layout, part, engines) / busiest(spec, layout, part, copies)
        assert often == pytest.approx(most_sent(layout, engines, expert=expert), rel=0.2)


def busiest(spec: ModelSpec, layout: Layout, table: Table, engines: int) -> int:
    """The elements that the rank sends that sends most."""
    return max(
        sum(
            message.numel
            for number in range(engines)
            for sent in sends.to_engine(["table"], {"table": table}, EngineSeat(number, engines)).values()
            for message in sent
        )
        for rank in range(layout.world_size)
        for sends in [Sends(spec, layout, rank, packed=10**9, direct=10**9)]
    )


@pytest.mark.parametrize(
    ("size", "layout", "engine", "fullest_gb"),
    [
        (
            "qwen3-235b-a22b",
            "{tensor: 4, sequence: true, pipeline: 4, data: 2, expert: 8, expert_tensor: 1, "
            "layers: [24, 24, 23, 23]}",
            "{count: 4, tensor_parallel: 8, expert_parallel: 8}",
            60.5,
        ),
        (
            "deepseek-v3",
            "{tensor: 8, sequence: true, pipeline: 16, data: 2, expert: 16, expert_tensor: 1, "
            "layers: [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2]}",
            "{count: 16, tensor_parallel: 16, expert_parallel: 16, nodes: 2}",
            94.1,
        ),
    ],
)
def test_the_fullest_link_is_that_of_the_plans_that_were_made_from_sglang_s_own_loaders(
    size, layout, engine, fullest_gb
):
    """The figures are those of ``python -m benchmarks.publish plans`` (benchmarks/README.md)."""
    overrides = (f"actor.parallel={layout}", f"rollout.engine={engine}", "cluster.gpu_memory_gib=139")
    transfer = model_of_costs(size, *overrides).transfer
    assert transfer.bytes / 1e9 == pytest.approx(fullest_gb, rel=0.03)
    assert transfer.bytes_per_s == 45e9
    assert transfer.prepare_s == 0


def test_each_transport_has_its_own_time():
    by_type = {
        kind: model_of_costs("qwen3-30b-a3b", f"weights.transport={{type: {kind}}}").transfer
        for kind in ("shards", "disk", "delta")
    }
    model = 61.1e9
    assert by_type["shards"].bytes == pytest.approx(12 * model / 8, rel=0.01), "8 GPUs serve 12 engines"
    assert by_type["disk"].prepare_s == pytest.approx(model / 5e9, rel=0.01)
    assert by_type["disk"].bytes_per_s == 5e9
    assert by_type["disk"].bytes / model == pytest.approx(3, rel=0.01), "the engines are on three nodes"
    assert by_type["delta"].bytes == pytest.approx(model / 2, rel=0.01), "a rank reads its part"
    slow = ("weights.transport={type: disk}", "cluster.file_system_bytes_per_s=1e9")
    assert model_of_costs("qwen3-30b-a3b", *slow).transfer.prepare_s == pytest.approx(61.1, rel=0.01)
    bucketed = "weights.transport={type: tensor}"
    assert model_of_costs("qwen3-1.7b", bucketed).transfer.bytes == pytest.approx(3.44e9, rel=0.01)


def test_an_adapter_alone_travels_before_the_pause():
    served = ("actor.lora={rank: 16, alpha: 32, serve: adapter}", "weights.interrupt=abort")
    transfer = model_of_costs("qwen3-1.7b", *served).transfer
    assert transfer.bytes == 0
    assert 0 < transfer.prepare_s < 0.1


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("transfer", "bytes_per_s", 20e9),
        ("transfer", "pause_s", 2.0),
        ("engine", "max_running", 17),
        ("engine", "step_s", 0.5),
        ("trainer", "step_s", 1.0),
        ("trainer", "tokens_per_s", 123.0),
        ("responses", "sigma", 0.1),
    ],
)
def test_an_override_of_the_cost_model_changes_one_setting(section, name, value):
    plain = model_of_costs("qwen3-235b-a22b").model_dump()
    changed = model_of_costs("qwen3-235b-a22b", f"simulate.{section}.{name}={value}").model_dump()
    if section == "responses":  # speeds follow from lengths
        plain, changed = plain["responses"], changed["responses"]
        assert changed == plain | {name: value}
    else:
        assert changed == plain | {section: plain[section] | {name: value}}


@pytest.mark.parametrize(
    ("parallel", "unit"),
    [
        ("{tensor: 4, pipeline: 8, data: 2, expert: 8, expert_tensor: 1, sequence: true}", 64),
        ("{tensor: 4, pipeline: 8, data: 4, expert: 16, expert_tensor: 1, sequence: true}", 128),
        ("{tensor: 4, pipeline: 8, context: 2, data: 4, sequence: true}", 64),
        ("{tensor: 4, pipeline: 8, data: 3, sequence: true}", 32),
    ],
)
def test_splits_give_the_trainer_whole_replicas_and_whole_grids_of_experts(parallel, unit):
    config = read_recipe("gspo-qwen3-235b-a22b-32n8g-tp4pp8dp2ep8-async4", [f"prepare={NO_INPUTS}"])
    actor = config.actor.model_copy(update={"parallel": ParallelConfig(**yaml.safe_load(parallel))})
    assert trainer_unit(config.model_copy(update={"actor": actor})) == unit


def test_groups_of_data_parallel_attention_read_their_caches_at_the_same_time():
    """A step of one group of ranks with all requests would read the KV of four times as many."""
    apart = model_of_costs("deepseek-v3").engine
    together = model_of_costs("deepseek-v3", "rollout.engine.data_parallel=1").engine
    assert apart.request_s == pytest.approx(together.request_s / 4, rel=0.01)


def test_simulate_compares_splits_with_the_publications_of_each():
    """More engines and fewer trainer ranks make the fullest link fuller."""
    costs = costs_of(read_recipe("gspo-qwen3-30b-a3b-4n8g-tp2dp4ep8-async4", [f"prepare={NO_INPUTS}"]))
    assert costs is not None
    few, many = (costs(GpuSplit(32, trains, (32 - trains) // 2, 2)).simulate for trains in (16, 8))
    assert few is not None
    assert many is not None
    assert many.transfer.bytes == pytest.approx(3 * few.transfer.bytes, rel=0.05), "12 by 8, for 8 by 16"
    assert many.engine == few.engine
