"""Layouts and export plans: which rank holds what, the order of the export, and that nothing is missing."""

from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.bridge.families import spec_of
from slipstream.bridge.model.layout import Coordinates, Layout, UnevenSplit
from slipstream.bridge.model.mapping import copy_in
from slipstream.bridge.shards.plan import entries, entries_of, make_plan, pieces_of
from slipstream.configs.schema import ParallelConfig
from tests.bridge_cases import CONFIG, DEEPSEEK, LAYOUTS, hf_configs, same_bits, trained_tensors
from tests.tries import tries

QWEN3 = spec_of({"model_type": "qwen3", **CONFIG}, Path())
MOE_CONFIG = {"model_type": "deepseek_v3", **CONFIG, **DEEPSEEK}
MOE = spec_of(MOE_CONFIG, Path())


# ---- layouts


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_ranks_have_the_places_that_megatron_gives_them(tensor, pipeline, data, expert, expert_tensor):
    from megatron.core.parallel_state import RankGenerator

    layout = Layout(tensor, pipeline, data, expert=expert, expert_tensor=expert_tensor)
    stage_ranks = tensor * data
    if stage_ranks % (expert * expert_tensor):
        with pytest.raises(UnevenSplit, match=f"do not divide the {stage_ranks} ranks"):
            layout.check()
        return
    replicas = stage_ranks // (expert * expert_tensor)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=1, order=order)
    experts = RankGenerator(tp=expert_tensor, ep=expert, dp=replicas, pp=pipeline, cp=1, order=order)
    places = [Coordinates.of(rank, layout) for rank in range(layout.world_size)]
    for group in dense.get_ranks("tp"):
        assert [places[rank].tensor for rank in group] == list(range(tensor))
    for group in dense.get_ranks("pp"):
        assert [places[rank].stage for rank in group] == list(range(pipeline))
    for group in experts.get_ranks("ep"):
        assert [places[rank].expert for rank in group] == list(range(expert))
    for group in experts.get_ranks("tp"):
        assert [places[rank].expert_tensor for rank in group] == list(range(expert_tensor))
    for stage in range(pipeline):
        assert layout.owners(stage) in dense.get_ranks("tp")
        for number in range(expert):
            owners = layout.owners(stage, expert=number)
            assert owners in experts.get_ranks("tp")
            assert {(places[rank].stage, places[rank].expert) for rank in owners} == {(stage, number)}


@pytest.mark.parametrize(
    ("tensor", "context", "pipeline", "data"), [(1, 2, 1, 1), (2, 2, 2, 3), (1, 4, 2, 2)]
)
def test_ranks_that_share_a_context_are_replicas_of_the_weights(tensor, context, pipeline, data):
    from megatron.core.parallel_state import RankGenerator

    parallel = ParallelConfig(tensor=tensor, context=context, pipeline=pipeline, data=data)
    layout = Layout.of(parallel, "transformer_engine")
    assert layout.world_size == parallel.world_size == tensor * context * pipeline * data
    megatron = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp")
    places = [Coordinates.of(rank, layout) for rank in range(layout.world_size)]
    for group in megatron.get_ranks("tp"):
        assert [places[rank].tensor for rank in group] == list(range(tensor))
    for group in megatron.get_ranks("pp"):
        assert [places[rank].stage for rank in group] == list(range(pipeline))
    for group in megatron.get_ranks("dp-cp"):
        assert len({(places[rank].stage, places[rank].tensor) for rank in group}) == 1
        assert len(group) == layout.data


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3))
def test_parts_of_the_pipeline_own_consecutive_layers_each_once(layers, stages, chunks):
    layout = Layout(pipeline=stages, chunks=chunks)
    if layers % (stages * chunks):
        with pytest.raises(UnevenSplit, match=f"{layers} layers.*{stages * chunks} parts"):
            layout.places(layers)
        return
    places = layout.places(layers)
    parts = [place.chunk * stages + place.stage for place in places]
    assert parts == sorted(parts)
    for part in set(parts):
        numbers = [place.layer for place, other in zip(places, parts, strict=True) if other == part]
        assert numbers == list(range(layers // (stages * chunks)))


def test_an_uneven_pipeline_has_the_configured_layers():
    layout = Layout(pipeline=2, chunks=2, layers=(1, 2, 0, 1))
    assert [(p.stage, p.chunk, p.layer) for p in layout.places(4)] == [
        (0, 0, 0),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
    ]
    with pytest.raises(
        UnevenSplit, match=r"\[1, 2, 0, 1\]: expected 4 numbers that sum to the model's 5 layers"
    ):
        layout.places(5)


# ---- plans


@tries(50)
@given(
    hf_configs(),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(["local", "transformer_engine"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 5000),
    st.integers(0, 2**31),
)
def test_the_owners_shards_make_up_every_tensor_bit_for_bit(hf, name, layer_spec, dtype, size, seed):
    """Load and export along a plan with all ranks in one process."""
    spec = spec_of(hf, Path())
    layout = Layout(**{**LAYOUTS[name].__dict__, "layer_spec": layer_spec})
    tensors = trained_tensors(spec, dtype, seed)
    ranks = []
    for rank in range(layout.world_size):
        held = {}
        for entry, shard in entries_of(spec, layout, rank):
            kind = torch.float32 if entry.mapping.float32 else dtype
            target = held[entry.chunk, entry.parameter] = torch.empty(
                entry.split.shard_shape(shard.size), dtype=kind
            )
            sources = [entry.own_part(tensors[hf]) for hf in entry.hf_names]
            copy_in(target, sources, pieces_of(entry.split, shard))
        ranks.append(held)
    plan = make_plan(spec, layout, size, dtype.itemsize)
    exported: dict[str, torch.Tensor] = {}
    for bucket in plan.buckets:
        flat = torch.full((bucket.numel,), torch.nan, dtype=torch.float32 if bucket.float32 else dtype)
        for parts in plan.rounds(bucket):
            for part in parts:
                tensor = flat[part.offset : part.offset + prod(part.shape)].view(part.shape)
                place = part.piece.in_hf(tensor)
                assert place.numel() == part.numel
                assert place.is_contiguous() or not part.in_place
                place.copy_(part.piece.in_shard(ranks[part.owner][part.entry.chunk, part.entry.parameter]))
        split = flat.split([prod(shape) for shape in bucket.hf_shapes])
        for hf_name, shape, values in zip(bucket.hf_names, bucket.hf_shapes, split, strict=True):
            assert hf_name not in exported
            exported[hf_name] = values.view(shape)
    assert exported.keys() == tensors.keys()
    assert all(same_bits(exported[key], tensors[key]) for key in tensors)


@settings(deadline=None)
@given(st.integers(1, 200_000), st.sampled_from([2, 4]), st.sampled_from(sorted(LAYOUTS)))
def test_buckets_are_bounded_and_as_full_as_the_order_permits(bucket_bytes, itemsize, name):
    plan = make_plan(MOE, LAYOUTS[name], bucket_bytes, itemsize)
    regular = [bucket for bucket in plan.buckets if not bucket.float32]
    for bucket in regular:
        assert bucket.numel * itemsize <= bucket_bytes or len(bucket.entries) == 1
        assert bucket.numel == sum(map(prod, bucket.hf_shapes))
    for bucket, following in pairwise(regular):
        assert (bucket.numel + following.entries[0].numel) * itemsize > bucket_bytes * 15 / 16
    for bucket in regular:
        for parts in plan.rounds(bucket):
            staged = [part.numel for part in parts if part.owner != 0 and not part.in_place]
            largest = max((b.numel for b in regular if len(b.entries) > 1), default=0)
            assert (2 * largest + sum(staged)) * itemsize <= 2 * bucket_bytes or len(staged) == 1


def test_a_plan_follows_the_forward_pass_in_each_stage_whatever_the_bucket_size():
    plans = [make_plan(QWEN3, Layout(2, 2), size, 2) for size in (10_000, 10_000, 10**9)]
    assert plans[0] == plans[1]
    orders = [[name for bucket in plan.buckets for name in bucket.hf_names] for plan in plans]
    assert orders[0] == orders[2]
    assert orders[0][0] == "model.embed_tokens.weight"
    layers = [int(name.split(".")[2]) for name in orders[0] if name.startswith("model.layers.")]
    for stage in ({0, 1}, {2, 3}):
        in_stage = [layer for layer in layers if layer in stage]
        assert in_stage == sorted(in_stage)


def test_stages_take_turns():
    """At any time the exported shares of all stages are equal, up to one parameter."""
    [bucket] = make_plan(QWEN3, Layout(pipeline=2), 10**9, 4).buckets
    totals, done = [0, 0], [0, 0]
    for entry in bucket.entries:
        totals[entry.stage] += entry.numel
    for entry in bucket.entries:
        done[entry.stage] += entry.numel
        shares = [part / total for part, total in zip(done, totals, strict=True)]
        assert abs(shares[0] - shares[1]) < max(e.numel for e in bucket.entries) / min(totals)


def test_names_are_local_to_the_rank_in_megatron_and_global_in_hf():
    layout = Layout(pipeline=2, data=2, expert=2)
    [expert] = [
        entry
        for entry in entries(MOE, layout)
        if "model.layers.3.mlp.experts.5.down_proj.weight" in entry.hf_names
    ]
    assert expert.parameter == "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    assert (expert.stage, expert.expert) == (1, 1)
    assert layout.owners(expert.stage, expert=expert.expert) == [3]


def test_transformer_engine_has_norms_inside_linear_layers_and_experts_in_one_module():
    names = {e.parameter for e in entries(QWEN3, Layout(layer_spec="transformer_engine"))}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert not any("input_layernorm" in name or "pre_mlp" in name for name in names)
    names = {e.parameter for e in entries(MOE, Layout(layer_spec="transformer_engine"))}
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight7" in names
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.1.self_attention.q_layernorm.weight" in names


def test_a_trillion_parameters_on_a_thousand_ranks_can_be_planned():
    sizes = {"num_hidden_layers": 61, "n_routed_experts": 384, "hidden_size": 7168}
    spec = spec_of(MOE_CONFIG | sizes | {"moe_intermediate_size": 2048}, Path())
    layout = Layout(tensor=8, pipeline=8, data=16, expert=32, expert_tensor=1, layers=(8,) * 7 + (5,))
    assert layout.world_size == 1024
    plan = make_plan(spec, layout, 2**30, 2)
    assert sum(bucket.numel for bucket in plan.buckets) > 10**12
