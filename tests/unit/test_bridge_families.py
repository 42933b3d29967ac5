"""Families: they map the tensors of transformers' checkpoints, and refuse configs that they cannot map."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoModel

from slipstream.backend.driver.modes.sft import reward_model_problems
from slipstream.bridge.families import FAMILIES, model_spec, spec_of
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.bridge.model.geometry import Experts, Geometry, GroupedAttention, Window
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.rope import Rope
from slipstream.bridge.shards.plan import entries
from tests.bridge_cases import CONFIG, DEEPSEEK, LINEAR_ATTENTION
from tests.models import ROPES, config_of, make_checkpoint, settings_of

MINIMAX = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_NEXT = {
    **LINEAR_ATTENTION,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
GEMMA = {"sliding_window": 8}
GPT_OSS = {"sliding_window": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
SPARSE = {**DEEPSEEK, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tensors_in(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_mapped_tensors_are_those_that_transformers_writes(tmp_path, family, tied):
    folder = make_checkpoint(tmp_path, family, tied=tied)
    spec = model_spec(folder)
    mapped = [
        pair
        for entry in entries(spec, Layout())
        if not entry.stacked or entry.stacked[0] == 0
        for pair in zip(entry.hf_names, entry.hf_shapes, strict=True)
    ]
    written, others = tensors_in(folder), spec.mappings.passed_through
    expected = {name: shape for name, shape in written.items() if not name.startswith(others or "-")}
    assert len(mapped) == len(expected)
    assert dict(mapped) == expected
    assert (len(written) > len(expected)) == bool(others)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {"q_lora_rank": None}),
        ("deepseek_v3", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
        ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2, "first_k_dense_replace": 2}),
        ("seed_oss", {"attention_bias": False}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen3_next", {"full_attention_interval": 2, "mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("qwen3_next", {"linear_num_key_heads": 3, "layer_types": ["linear_attention"] * 4}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 4}),
        ("gpt_oss", {"num_local_experts": 4, "layer_types": ["sliding_attention"] * 4}),
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


def test_gemma_3_s_published_config_is_read():
    geometry = spec_of(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "initializer_range": 0.02,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        Path(),
    ).geometry
    assert geometry.tied_embeddings and geometry.centered_norms and geometry.post_norms
    assert geometry.window is not None and geometry.window.tokens == 512
    assert [layer for layer in range(26) if geometry.window_of(layer) is None] == [5, 11, 17, 23]
    assert (geometry.rope.theta, geometry.window.rope) == (1e6, Rope(theta=1e4, original_positions=32768))
    assert geometry.embedding_scale == 1152**0.5
    assert isinstance(geometry.attention, GroupedAttention) and geometry.attention.scale == 1 / 16


def test_gpt_oss_s_published_config_is_read():
    geometry = FAMILIES["gpt_oss"].geometry(
        {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        }
    )
    assert geometry.window == Window(128, tuple(range(0, 24, 2)))
    assert geometry.experts == Experts(32, 4, 2880, dense_layers=())
    assert geometry.linear_biases and geometry.activation == "clamped_swiglu"
    assert (geometry.rope.theta, geometry.rope.truncate) == (150000.0, False)


def test_qwen3_next_s_published_config_is_read():
    geometry = FAMILIES["qwen3_next"].geometry(
        {
            "model_type": "qwen3_next",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
    )
    assert geometry.delta_layers == tuple(layer for layer in range(48) if layer % 4 != 3)
    assert (geometry.delta.keys, geometry.delta.values) == (2048, 4096)
    assert geometry.attention.gate and geometry.rotated_dim == 64
    assert (geometry.experts.shared_ffn_hidden, geometry.experts.shared_gate) == (512, True)


def test_the_rotary_embedding_of_qwen3_5_is_that_of_text():
    """The positions in time, height and width that its sections have are alike in text."""
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    }
    hf = {"model_type": "qwen3_5_text", **CONFIG, **LINEAR_ATTENTION, "rope_parameters": rope}
    assert FAMILIES["qwen3_5_text"].geometry(hf).rope == Rope(
        theta=1e7, fraction=0.25, original_positions=256
    )
    hf["rope_parameters"] = rope | {"unknown": 1}
    with pytest.raises(UnsupportedModel, match="with unknown is not mapped"):
        FAMILIES["qwen3_5_text"].geometry(hf)


# ---- what is left out, and what is there twice

OF_TRANSFORMERS = sorted(FAMILIES.keys() - {"kimi_k25"})
"""The families of which transformers has a model, or one with another name."""


def meaning(family: str, settings: dict[str, Any]) -> Geometry | None:
    """Return what we read; None if it is refused."""
    try:
        return spec_of({**settings, "model_type": family}, Path()).geometry
    except UnsupportedModel:
        return None


def meaning_to_transformers(family: str, settings: dict[str, Any]) -> Geometry | None:
    """Return what we read from a config with every default of its class filled in."""
    return meaning(family, json.loads(json.dumps(config_of(family, settings).to_dict(), default=str)))


def language(settings: dict[str, Any]) -> dict[str, Any]:
    return settings.get("text_config", settings)


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
def test_a_setting_that_is_left_out_means_what_its_class_in_transformers_says_or_is_refused(family):
    whole = json.loads(json.dumps(config_of(family, settings_of(family)).to_dict(), default=str))
    assert meaning(family, whole) is not None
    read = 0
    for name in language(whole).keys() - {"model_type"}:
        settings = deepcopy(whole)
        del language(settings)[name]
        if name == "first_k_dense_replace" and "mlp_layer_types" in language(settings):
            continue  # transformers fills in a number that contradicts the list, which it reads
        if (found := meaning(family, settings)) is not None:
            assert found == meaning_to_transformers(family, settings), name
            read += 1
    assert read > 10


@pytest.mark.parametrize("family", sorted({*OF_TRANSFORMERS} - {"phi3"}))  # whose class knows longrope alone
def test_a_base_that_is_left_out_among_the_rotary_parameters_is_that_of_the_class(family):
    settings = settings_of(family, tie_word_embeddings=False)
    inner = language(settings)
    inner["rope_parameters"] = {"rope_type": "linear", "factor": 4.0}
    inner.pop("rope_theta")
    assert meaning(family, settings) in (None, meaning_to_transformers(family, settings))
    inner["rope_scaling"] = inner.pop("rope_parameters")
    assert (found := meaning(family, settings)) is not None
    assert found == meaning_to_transformers(family, settings)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
@pytest.mark.parametrize(
    "pasted", [YARN, {"type": "linear", "factor": 4.0}, {"rope_type": "default"}, {"rope_theta": 500.0}, {}]
)
def test_two_rotary_settings_mean_what_they_mean_to_transformers_or_are_refused(family, pasted):
    settings = json.loads(json.dumps(config_of(family, settings_of(family)).to_dict(), default=str))
    language(settings)["rope_scaling"] = pasted
    found = meaning(family, settings)
    assert found is not None or pasted
    if found is None:
        with pytest.raises(UnsupportedModel, match=r"rope_parameters=\{.*rope_scaling=\{"):
            spec_of({**settings, "model_type": family}, Path())
    else:
        assert found == meaning_to_transformers(family, settings)


@pytest.mark.parametrize("family", OF_TRANSFORMERS)
@pytest.mark.parametrize("nested", [True, False])
def test_a_share_of_rotated_dimensions_is_that_of_transformers_or_refused(tmp_path, family, nested):
    settings = settings_of(family)
    inner, share = language(settings), {"partial_rotary_factor": 0.5}
    inner.pop("rotary_dim", None)
    inner.pop("partial_rotary_factor", None)
    if nested:
        inner["rope_parameters"] = {"rope_type": "default", "rope_theta": inner.pop("rope_theta"), **share}
    else:
        inner |= share
    if (found := meaning(family, settings)) is None:
        with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor|a part of|rope_parameters"):
            spec_of({**settings, "model_type": family}, Path())
        return
    model = AutoModel.from_config(config_of(family, settings))
    [rotated] = {
        2 * len(module.inv_freq)
        for name, module in model.named_modules()
        if hasattr(module, "inv_freq") and "vis" not in name
    }
    assert found.rotated_dim == rotated


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
        (
            "kimi_k2",
            {name: value for name, value in DEEPSEEK.items() if name not in ("n_group", "n_shared_experts")},
            "lacks n_shared_experts, n_group: transformers has no class",
        ),
        ("kimi_k2", {**DEEPSEEK, "moe_layer_freq": 2}, "kimi_k2: not mapped: moe_layer_freq=2"),
        ("kimi_k2", {**DEEPSEEK, "partial_rotary_factor": 0.5}, "kimi_k2: .* a part of the rotated"),
        (
            "glm4_moe_lite",
            {**DEEPSEEK, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            "mlp_layer_types is .* expected 4 kinds, first 'dense' and then 'sparse'",
        ),
        (
            "glm4_moe_lite",
            {**DEEPSEEK, "mlp_layer_types": ["dense", "sparse"]},
            "expected 4 kinds",
        ),
        (
            "glm4_moe_lite",
            {**DEEPSEEK, "first_k_dense_replace": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
            "has 1 dense layers, and first_k_dense_replace is 2",
        ),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias=True"),
        ("qwen3_vl", {}, "text_config is None in config.json, expected a JSON object"),
        (
            "mistral3",
            {"text_config": {"model_type": "ministral3", **CONFIG}},
            "a language model of model_type 'ministral3'.*expected mistral",
        ),
        (
            "qwen3_vl",
            {
                "text_config": {"model_type": "qwen3_vl_text", **CONFIG},
                "quantization_config": {"quant_method": "awq"},
            },
            "quantization_config",
        ),
        ("minimax_m2", {**MINIMAX, "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("minimax_m2", {**MINIMAX, "use_qk_norm": False}, "use_qk_norm=False"),
        ("minimax_m2", {**MINIMAX, "attn_type_list": [1, 0, 1, 1]}, r"attn_type_list .* has \[0\]"),
        (
            "minimax_m2",
            {**MINIMAX, "rotary_dim": 8, "partial_rotary_factor": 1.0},
            "rotary_dim is 8 .* 16 of 16",
        ),
        ("qwen3_next", {**QWEN3_NEXT, "attention_bias": True}, "attention_bias=True"),
        ("qwen3_next", {**QWEN3_NEXT, "attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_next", QWEN3_MOE, "shared_expert_intermediate_size"),
        ("qwen3_next", {**QWEN3_NEXT, "linear_num_value_heads": 5}, "5 is no multiple of .*=2"),
        ("qwen3_next", {**QWEN3_NEXT, "layer_types": ["full_attention"] * 3}, "for each of 4 layers"),
        ("qwen3_next", {**QWEN3_NEXT, "layer_types": ["mamba"] * 4}, "layer_types=.'mamba'"),
        ("qwen3_5_moe_text", {**QWEN3_NEXT, "norm_topk_prob": False}, "norm_topk_prob=False"),
        ("qwen3_5_moe_text", {**QWEN3_NEXT, "mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("gemma3_text", {**GEMMA, "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma3_text", {**GEMMA, "attention_bias": True}, "attention_bias=True"),
        ("gemma3_text", {**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {**GEMMA, "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {**GEMMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 4}, "no number for: sliding_window"),
        ("gemma3_text", {**GEMMA, "layer_types": ["full_attention"]}, "expected 4 times 'full_attention' or"),
        ("gemma3_text", {**GEMMA, "layer_types": ["chunked_attention"] * 4}, "layer_types is .*chunked"),
        (
            "gemma3_text",
            {**GEMMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope type 'yarn' is not mapped for layers of two kinds",
        ),
        ("gpt_oss", {**GPT_OSS, "attention_bias": False}, "attention_bias=False"),
        ("gpt_oss", {**GPT_OSS, "swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ("gpt_oss", {"sliding_window": 8}, "no number for: num_local_experts"),
        ("deepseek_v32", {**DEEPSEEK}, "no number for: index_n_heads, index_head_dim, index_topk"),
        ("deepseek_v32", {**SPARSE, "q_lora_rank": None}, "no number for: q_lora_rank"),
        ("deepseek_v32", {**SPARSE, "layer_types": ["full_attention"] * 4}, "not mapped: layer_types"),
        ("glm_moe_dsa", {**SPARSE, "index_topk_freq": 4}, "index_topk_freq=4"),
        ("glm_moe_dsa", {**SPARSE, "index_topk_pattern": "FSSS"}, "index_topk_pattern='FSSS'"),
        (
            "glm_moe_dsa",
            {**SPARSE, "indexer_types": ["full", "shared", "full", "full"]},
            "expected 4 times 'full': layers that share the choice",
        ),
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
        (
            '{"model_type": "mamba"}',
            "'mamba' is not mapped, and was not examined.*supported: .*qwen3, ",
        ),
    ],
)
def test_an_unreadable_or_unknown_config_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=message):
        model_spec(tmp_path)


@pytest.mark.parametrize(("learn", "count"), [("responses", 0), ("preferences", 1)])
def test_there_is_no_reward_model_of_a_model_that_reads_more_than_text(tmp_path, learn, count):
    spec = model_spec(make_checkpoint(tmp_path, "qwen3_vl"))
    problems = reward_model_problems(SimpleNamespace(learn=learn), spec)
    assert len(problems) == count
    assert all("a qwen3_vl reads more than text" in problem for problem in problems)
    text = model_spec(make_checkpoint(tmp_path, "qwen3"))
    assert not reward_model_problems(SimpleNamespace(learn=learn), text)
