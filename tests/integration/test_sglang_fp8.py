"""fp8 as SGLang has it: the same arithmetic bit for bit, and its own models load what is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.copy import write_copy
from slipstream.bridge.hf.quantization import FP8_FAMILIES, NO_SCALES, EngineFp8
from slipstream.bridge.hf.quantized import dequantized_fp8, quantized_fp8
from slipstream.bridge.shards.fp8 import fp8_problems
from tests.models import make_checkpoint

SHAPES = [(128, 128), (1, 1), (127, 129), (256, 384), (300, 520), (576, 200), (2200, 130)]


def weights() -> dict[str, torch.Tensor]:
    """Return weights of all sizes and magnitudes, blocks of zeros, and values at the ends of the format."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for number, shape in enumerate(SHAPES):
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randn(shape, generator=generator) * 10.0 ** (number - 4)
            made[f"{number}.{dtype}"] = weight.to(dtype)
    made["zeros"] = torch.zeros(256, 256, dtype=torch.bfloat16)
    made["one value"] = torch.zeros(256, 130)
    made["one value"][200, 129] = 3.0
    made["powers of two"] = torch.exp2(torch.arange(-60.0, 68.0)).repeat(128, 1)
    made["largest"] = torch.full((128, 128), 448.0)
    made["above the largest"] = torch.full((128, 128), 448.0000305)
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("fp8")
    save_file(weights(), folder / "in.safetensors")
    command = [
        sys.executable,
        "-m",
        "tests.sglang_fp8",
        folder / "in.safetensors",
        folder / "out.safetensors",
    ]
    subprocess.run(command, check=True)
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize("name", weights())
def test_quantizing_equals_sglang(results, name):
    values, scale = quantized_fp8(weights()[name], ue8m0=True)
    assert torch.equal(values.view(torch.uint8), results[f"{name}.values"].view(torch.uint8))
    assert torch.equal(scale, results[f"{name}.scale"])


@pytest.mark.parametrize("name", weights())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantizing_equals_sglang(results, name, dtype):
    plain = dequantized_fp8(results[f"{name}.values"], results[f"{name}.scale"], (128, 128)).to(dtype)
    assert torch.equal(plain, results[f"{name}.{str(dtype).removeprefix('torch.')}"])


# ---- SGLang's models

SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Also settings of DeepSeek-V3 that SGLang wants and transformers does not write."""
OF_FAMILY = {
    "deepseek_v3": {**LATENT, "rope": "yarn, DeepSeek"},
    "kimi_k2": {**LATENT, "rope": "yarn, DeepSeek"},
    "glm4_moe_lite": LATENT,
    "glm4_moe": {"moe_intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 128, "mlp_only_layers": []},  # SGLang knows no dense layers
    "minimax_m2": {"intermediate_size": 128, "rotary_dim": 32},
}
TOO_SMALL = "qwen3, of sizes that are refused"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, dict]:
    """Return what SGLang's models make of the families, by family."""
    root = tmp_path_factory.mktemp("models")
    folders = [
        write(root / family, family, **SIZES | OF_FAMILY.get(family, {}))
        for family in sorted(FP8_FAMILIES | NO_SCALES)
    ]
    folders.append(write(root / TOO_SMALL, "qwen3", **SIZES | {"intermediate_size": 320}))
    command = [sys.executable, "-m", "tests.sglang_models", *folders]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {result["folder"]: result for result in results}


def write(folder: Path, family: str, **sizes) -> Path:
    """Write a checkpoint in fp8, and the same one dequantized."""
    make_checkpoint(folder / "source", family, tied=False, **sizes)
    build_tokenizer().save_pretrained(folder / "source")
    write_copy(folder / "source", None, folder / "fp8", dtype=torch.bfloat16, fp8=EngineFp8())
    stored = model_spec(folder / "fp8").quantization
    write_copy(folder / "fp8", stored, folder / "plain", dtype=torch.bfloat16, fp8=None)
    return folder


def modules(result: dict) -> set[str]:
    return {".".join(name.split(".")[3:]).removesuffix("weight").rstrip("._") for name in result["fp8"]}


@pytest.mark.parametrize("family", sorted(FP8_FAMILIES))
def test_sglangs_models_hold_what_is_written(models, family):
    result = models[family]
    assert result["error"] == ""
    assert result["wrong"] == [], "parameters that were filled by nothing, or with other values"
    assert "self_attn.o_proj" in modules(result)
    if family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite"):
        assert {"self_attn.kv_b_proj", "self_attn.fused_qkv_a_proj_with_mqa"} <= modules(result)
    if family in ("deepseek_v3", "glm4_moe", "kimi_k2", "minimax_m2", "qwen3_moe"):
        assert any(module.endswith("experts.w13") for module in modules(result))


@pytest.mark.parametrize("family", sorted(NO_SCALES))
def test_families_whose_scales_sglang_drops_are_refused_for_that(models, family):
    """If this fails, SGLang loads them now, and the family belongs to FP8_FAMILIES."""
    assert any(name.endswith("o_proj.weight") for name in models[family]["wrong"])


def test_sglang_refuses_sizes_that_are_refused(models, tmp_path):
    assert "320 is not divisible by weight quantization block_n = 128" in models[TOO_SMALL]["error"]
    make_checkpoint(tmp_path, "qwen3", **SIZES | {"intermediate_size": 320})
    [problem] = fp8_problems(model_spec(tmp_path), EngineFp8(), ranks=1)
    assert "mlp.gate_proj has 320 rows on each of 1 ranks" in problem
