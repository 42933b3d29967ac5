"""Formulas of the memory estimate that no allocation on one rank can show."""

from math import prod

import pytest

from slipstream.backend.memory import trainer
from slipstream.backend.memory.activations import Sharing, layer_bytes
from slipstream.backend.memory.engine import kv_bytes
from slipstream.backend.memory.parameters import buffer_of, stage_parameters
from slipstream.backend.memory.pipeline import parts_in_flight
from slipstream.backend.objective import logprob
from slipstream.bridge.families import model_spec
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries_of
from tests.environment import ROOT

CONFIGS = ROOT / "tests/unit/model_configs"
LAYOUTS = {
    "qwen3-1.7b": Layout(pipeline=2, data=2),
    "qwen3-30b-a3b": Layout(tensor=2, pipeline=4, data=4, expert=8, expert_tensor=1),
    "deepseek-v3": Layout(tensor=4, pipeline=4, layers=(16, 15, 15, 15), data=4, expert=8, expert_tensor=2),
    "llama-3.1-70b": Layout(tensor=8, pipeline=2, chunks=4, data=2),
}


@pytest.mark.parametrize("model", LAYOUTS)
def test_every_rank_holds_the_parameters_that_the_trainers_plan_gives_it(model):
    layout, spec = LAYOUTS[model], model_spec(CONFIGS / model)
    stages = stage_parameters(spec, layout)
    per_stage = layout.tensor * layout.data
    for rank in (*range(0, layout.world_size, per_stage), layout.world_size - 1):
        held = [
            prod(entry.split.shard_shape(shard.size))
            for entry, shard in entries_of(spec, layout, rank)
            if not entry.mapping.float32
        ]
        assert stages[rank // per_stage].total == sum(held)


def test_a_schedule_holds_what_megatron_runs_before_the_first_backward_pass():
    assert [parts_in_flight(stage, 4, 1) for stage in range(4)] == [[4], [3], [2], [1]]
    assert [sum(parts_in_flight(stage, 2, 2)) for stage in range(2)] == [5, 3]
    assert parts_in_flight(0, 1, 1) == [1]


def test_the_shares_of_a_buffer_add_up_and_padding_belongs_to_nobody():
    whole = buffer_of((100, 30, 7), 1, distributed=True, buckets=False)
    assert (whole.elements, whole.largest_share) == (256, 137)
    plain = buffer_of((100, 30, 7), 4, distributed=False, buckets=False)
    assert (plain.elements, plain.largest_share) == (137, 137)
    shared = buffer_of((1000, 1000), 2, distributed=True, buckets=False)
    assert shared.elements % 128 == 0
    assert 1000 <= shared.largest_share <= shared.elements // 2


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_tensor_and_sequence_parallelism_divide_all_activations(model):
    """Expert tokens too: with one rank per expert, a rank has its share of them."""
    geometry = model_spec(CONFIGS / model).geometry
    layer = geometry.n_layers - 1
    alone = layer_bytes(geometry, layer, Sharing())
    shared = layer_bytes(geometry, layer, Sharing(tensor=4, sequence=True, expert=4))
    assert alone.input / shared.input == 4
    assert alone.kept / shared.kept == pytest.approx(4, rel=1e-6)


def test_without_sequence_parallelism_the_residual_stream_stays_whole():
    geometry = model_spec(CONFIGS / "qwen3-8b").geometry
    split = layer_bytes(geometry, 0, Sharing(tensor=4))
    assert split.input == layer_bytes(geometry, 0, Sharing()).input


def test_the_kv_cache_of_a_token_has_its_published_size():
    """Llama-3.1-70B: 80 layers * 2 * 8 heads * 128 * 2 bytes. DeepSeek-V3: 61 layers * 576 * 2 bytes."""
    llama = model_spec(CONFIGS / "llama-3.1-70b").geometry
    assert kv_bytes(llama, 1, 2) == 327_680
    assert kv_bytes(llama, 16, 2) == 327_680 // 8, "heads are repeated, not split further"
    assert kv_bytes(model_spec(CONFIGS / "deepseek-v3").geometry, 8, 2) == 70_272


def test_the_head_is_counted_with_the_slices_that_it_uses():
    slices = {"cpu": trainer.HEAD_SLICE["plain"], "cuda": trainer.HEAD_SLICE["fused"]}
    assert slices == logprob.SLICE_ELEMENTS
    assert (trainer.HEAD_MIN_COLUMNS, trainer.HEAD_KEPT) == (logprob.MIN_COLUMNS, logprob.KEPT_BYTES)
