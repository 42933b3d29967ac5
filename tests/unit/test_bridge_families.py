"""Families: they map the tensors of transformers' checkpoints, and refuse configs that they cannot map."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from slipstream.bridge.families import FAMILIES, model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.geometry import Experts
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.plan import entries
from tests.bridge_cases import CONFIG, DEEPSEEK
from tests.models import ROPES, make_checkpoint

QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tensors_in(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_mapped_tensors_are_those_that_transformers_writes(tmp_path, family, tied):
    folder = make_checkpoint(tmp_path, family, tied=tied)
    mapped = [
        pair
        for entry in entries(model_spec(folder), Layout())
        for pair in zip(entry.hf_names, entry.hf_shapes, strict=True)
    ]
    expected = tensors_in(folder)
    assert len(mapped) == len(expected)
    assert dict(mapped) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
        ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("qwen3", {"num_key_value_heads": 4}),
    ],
)
def test_the_mapped_tensors_of_a_variant_are_those_that_transformers_writes(tmp_path, family, changes):
    folder = make_checkpoint(tmp_path, family, tied=False, **changes)
    mapped = {
        name: shape
        for entry in entries(model_spec(folder), Layout())
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    assert mapped == tensors_in(folder)


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rope_variants_are_read_from_what_transformers_writes(tmp_path, rope):
    geometry = model_spec(make_checkpoint(tmp_path, "llama", rope=rope)).geometry
    assert (geometry.rope.kind, geometry.rope.factor) == (ROPES[rope]["rope_type"], ROPES[rope]["factor"])


def test_deepseek_v3_s_published_config_is_read():
    geometry = FAMILIES["deepseek_v3"].geometry(
        {
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "vocab_size": 129280,
        }
    )
    assert geometry.experts == Experts(
        256,
        8,
        2048,
        dense_layers=(0, 1, 2),
        score="sigmoid",
        bias=True,
        scaling=2.5,
        groups=8,
        groups_per_token=4,
        shared_ffn_hidden=2048,
    )
    assert geometry.extra_layers == 1
    assert (geometry.rope.magnitude, geometry.rope.magnitude_all) == (1.0, 1.0)


# ---- what is refused


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {**QWEN3_MOE, "attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {}, "num_local_experts, num_experts_per_tok, moe_intermediate_size"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("mistral", {"sliding_window": 128}, "a window of 128"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope type 'dynamic'"),
        (
            "qwen3",
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "6 attention heads.*4 key-value groups",
        ),
        ("qwen3", {"hidden_size": None, "vocab_size": "101"}, "no number for: hidden_size"),
        ("qwen3", {"head_dim": 16.0}, "head_dim is 16.0 in config.json, expected an integer"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5' in config.json, expected a number"),
        (
            "qwen3_moe",
            {**QWEN3_MOE, "mlp_only_layers": ["1"]},
            r"mlp_only_layers is \['1'\] in config.json, expected a list of integers",
        ),
        ("deepseek_v3", {**DEEPSEEK, "rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {**DEEPSEEK, "norm_topk_prob": False}, "not normalized"),
        ("deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2}, "2 experts from 2 groups"),
        ("deepseek_v3", {**DEEPSEEK, "partial_rotary_factor": 0.5}, "a part of the rotated dimensions"),
        (
            "deepseek_v3",
            {**DEEPSEEK, "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
            "truncate=false",
        ),
        ("glm4_moe", {**DEEPSEEK, "num_experts_per_tok": 1}, "not normalized"),
    ],
)
def test_a_config_that_is_not_mapped_is_refused_by_name(tmp_path, family, change, named):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **CONFIG, **change}))
    with pytest.raises(UnsupportedModel, match=named):
        model_spec(tmp_path)


def test_several_unmapped_settings_are_reported_together():
    with pytest.raises(UnsupportedModel, match=r"hidden_act='relu', mlp_bias=True"):
        FAMILIES["llama"].geometry({"model_type": "llama", **CONFIG, "hidden_act": "relu", "mlp_bias": True})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is not mapped; supported: .*qwen3, qwen3_moe"),
    ],
)
def test_an_unreadable_or_unknown_config_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=message):
        model_spec(tmp_path)
