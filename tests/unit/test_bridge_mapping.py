"""Mappings, layouts, export plans, and the configs that are refused."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from bridge.families import FAMILIES, ModelSpec, model_spec
from bridge.geometry import Geometry, UnsupportedModel
from bridge.layout import Layout, Shard, UnevenSplit
from bridge.mapping import GateUp, GroupedQKV, VocabRows
from bridge.plan import make_plan, stage_entries
from tests.models import make_checkpoint

CONFIG = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@st.composite
def geometries(draw) -> tuple[Geometry, int]:
    """A geometry and a tensor-parallel size that divides it; the vocabulary is divided with padding."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    groups = tensor * draw(st.integers(1, 2))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    hf = {
        "model_type": family,
        "num_hidden_layers": 2,
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": tensor * draw(st.integers(1, 5)),
        "num_attention_heads": groups * draw(st.integers(1, 3)),
        "num_key_value_heads": groups,
        "head_dim": draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(1, 23)),
        "max_position_embeddings": 32,
        "tie_word_embeddings": draw(st.booleans()),
    }
    return FAMILIES[family].geometry(hf), tensor


def all_mappings(geometry: Geometry):
    mappings = FAMILIES[geometry.family].mappings(geometry)
    return (*mappings.embedding, *mappings.layer, *mappings.head)


@settings(max_examples=60, deadline=None)
@given(geometries(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
def test_merging_all_shards_gives_the_hf_tensors_back_bit_for_bit(case, dtype, seed):
    geometry, tensor = case
    generator = torch.Generator().manual_seed(seed)
    for mapping in all_mappings(geometry):
        sources = [torch.randn(s, generator=generator).to(dtype) for s in mapping.hf_shapes(geometry)]
        shards = [mapping.read(sources, geometry, Shard(rank, tensor)) for rank in range(tensor)]
        assert {tuple(shard.shape) for shard in shards} == {mapping.shard_shape(geometry, tensor)}
        assert {shard.dtype for shard in shards} == {dtype}
        merged = mapping.merge(shards, geometry)
        assert len(merged) == len(mapping.hf)
        for found, source in zip(merged, sources, strict=True):
            assert torch.equal(found, source)


def geometry_of(**changes) -> Geometry:
    return replace(FAMILIES["qwen2"].geometry(CONFIG), **changes)


def test_grouped_qkv_interleaves_queries_keys_and_values_by_group():
    geometry = geometry_of(n_heads=4, n_kv_heads=2, head_dim=1, hidden=1)
    query, key, value = (torch.tensor(x)[:, None] for x in ([0, 1, 2, 3], [10, 11], [20, 21]))
    mapping = GroupedQKV("m", ("q", "k", "v"))
    halves = [
        mapping.read([query, key, value], geometry, Shard(rank, 2)).flatten().tolist() for rank in (0, 1)
    ]
    assert halves == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_every_rank_holds_its_gate_rows_and_then_its_up_rows():
    geometry = geometry_of(ffn_hidden=4, hidden=1)
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    halves = [
        GateUp("m", ("g", "u")).read([gate, up], geometry, Shard(r, 2)).flatten().tolist() for r in (0, 1)
    ]
    assert halves == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_padding_rows_of_the_vocabulary_are_zero_even_where_a_shard_has_nothing_else(tmp_path):
    from safetensors.torch import save_file

    geometry = geometry_of(vocab=5, hidden=3)
    save_file({"w": torch.ones(5, 3)}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        read = [VocabRows("m", ("w",)).read([file.get_slice("w")], geometry, Shard(r, 4)) for r in range(4)]
    assert [shard.sum(1).tolist() for shard in read] == [[3, 3], [3, 3], [3, 0], [0, 0]]


@pytest.mark.parametrize("tensor", [3, 4])
def test_a_split_that_does_not_come_out_even_says_what_cannot_be_split(tensor):
    geometry = geometry_of(n_heads=4, n_kv_heads=2)
    sources = [torch.zeros(shape) for shape in GroupedQKV("m", ("q", "k", "v")).hf_shapes(geometry)]
    with pytest.raises(UnevenSplit, match=f"2 key-value heads.*{tensor} tensor-parallel ranks"):
        GroupedQKV("m", ("q", "k", "v")).read(sources, geometry, Shard(0, tensor))


@given(st.integers(1, 40), st.integers(1, 8))
def test_pipeline_stages_own_consecutive_layers_each_once(layers, stages):
    layout = Layout(pipeline=stages)
    if layers % stages:
        with pytest.raises(UnevenSplit, match=f"{layers} layers.*{stages} pipeline stages"):
            layout.layers_of(0, layers)
    else:
        owned = [layer for stage in range(stages) for layer in layout.layers_of(stage, layers)]
        assert owned == list(range(layers))


# ---- plans


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_plan_has_every_tensor_of_a_checkpoint_once_whatever_the_layout(tmp_path, family, tied):
    folder = make_checkpoint(tmp_path, family, tied=tied)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    spec = model_spec(folder)
    for tensor, pipeline in [(1, 1), (2, 1), (1, 2), (2, 4)]:
        plan = make_plan(spec, Layout(tensor, pipeline), bucket_bytes=30_000, itemsize=4)
        named = [pair for b in plan.buckets for pair in zip(b.hf_names, b.hf_shapes, strict=True)]
        assert len(named) == len(expected)
        assert dict(named) == expected


@given(st.integers(1, 200_000), st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]))
def test_buckets_are_bounded_and_as_full_as_the_order_permits(bucket_bytes, itemsize, stages):
    spec = model_spec_of("qwen3")
    plan = make_plan(spec, Layout(pipeline=stages), bucket_bytes, itemsize)
    assert [b.stage for b in plan.buckets] == sorted(b.stage for b in plan.buckets)
    for bucket in plan.buckets:
        assert bucket.numel * itemsize <= bucket_bytes or len(bucket.entries) == 1
        assert bucket.numel == sum(map(prod, bucket.hf_shapes))
    for one, other in zip(plan.buckets, plan.buckets[1:], strict=False):
        if one.stage == other.stage:
            assert (one.numel + other.entries[0].numel) * itemsize > bucket_bytes


def test_the_order_of_a_plan_is_that_of_the_forward_pass_and_depends_on_nothing_else():
    spec = model_spec_of("qwen3")
    plans = [make_plan(spec, Layout(2, 2), size, 2) for size in (10_000, 10_000, 10**9)]
    assert plans[0] == plans[1]
    orders = [[name for bucket in plan.buckets for name in bucket.hf_names] for plan in plans]
    assert orders[0] == orders[2]
    assert orders[0][0] == "model.embed_tokens.weight"
    layers = [int(name.split(".")[2]) for name in orders[0] if name.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_layer_names_are_local_to_the_stage_in_megatron_and_global_in_hf():
    second = list(stage_entries(model_spec_of("qwen3"), Layout(pipeline=2), 1))
    assert second[0].parameter == "decoder.layers.0.input_layernorm.weight"
    assert second[0].hf_names == ("model.layers.2.input_layernorm.weight",)


def test_transformer_engine_has_the_norms_inside_the_linear_layers():
    names = [
        e.parameter for e in stage_entries(model_spec_of("llama"), Layout(layer_spec="transformer_engine"), 0)
    ]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert not any("input_layernorm" in name or "pre_mlp" in name for name in names)


def model_spec_of(family: str) -> ModelSpec:
    geometry = FAMILIES[family].geometry(CONFIG)
    return ModelSpec(Path(), CONFIG, geometry, FAMILIES[family].mappings(geometry))


# ---- what is refused


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope type 'yarn'"),
        ("qwen2", {"rope_scaling": {"type": "linear"}}, "rope type 'linear'"),
        (
            "qwen3",
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "6 attention heads.*4 key-value groups",
        ),
        ("qwen3", {"hidden_size": None, "vocab_size": "101"}, "hidden_size, vocab_size"),
    ],
)
def test_a_config_that_is_not_mapped_is_refused_by_name(tmp_path, family, change, named):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **CONFIG, **change}))
    with pytest.raises(UnsupportedModel, match=named):
        model_spec(tmp_path)


def test_several_unmapped_settings_are_reported_together():
    with pytest.raises(UnsupportedModel, match=r"hidden_act='relu', mlp_bias=True"):
        FAMILIES["llama"].geometry({**CONFIG, "hidden_act": "relu", "mlp_bias": True})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is not mapped; supported: llama, qwen2, qwen3"),
    ],
)
def test_an_unreadable_or_unknown_config_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=message):
        model_spec(tmp_path)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_theta": 7.0, "rope_scaling": None}, 7.0),
    ],
)
def test_the_rotary_base_is_read_in_either_spelling(config, theta):
    assert FAMILIES["qwen3"].geometry({**CONFIG, **config}).rope_theta == theta
