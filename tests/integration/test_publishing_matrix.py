"""Engines filled shard by shard hold the bits that SGLang's own loader would have given them.

Families by layouts of the trainer by layouts of the engine, with SGLang's models on a CPU: plans, traces of
SGLang's loaders, and how they meet. What moves the bytes is tested elsewhere.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.bridge.families import FAMILIES
from tests.bridge_cases import LAYOUTS, MIXTURES, TEXT_PARTS
from tests.models import make_checkpoint

FEW = ["qwen3", "qwen3_moe", "deepseek_v3", "minimax_m2"]
NOT_IN_SGLANG = {
    *("glm", "helium", "nemotron", "seed_oss", "smollm3", "solar_open", "youtu"),
}
"""SGLang 0.5.21 has no model of these names."""
NOT_ON_CPUS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""SGLang's linear attention asserts that there is a GPU."""
UNTRACEABLE = {"gemma"}
"""SGLang adds one to the weights of norms after it has copied them."""
OWN_CODE = {"mimo"}
"""SGLang reads its config with the code of the checkpoint."""
OTHERS = sorted({*FAMILIES} - {*FEW} - {*TEXT_PARTS} - NOT_IN_SGLANG - NOT_ON_CPUS - UNTRACEABLE - OWN_CODE)
LATENT = {"rope": "yarn, DeepSeek", "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Settings that SGLang wants and transformers does not write, and the rotary embedding that SGLang knows."""
OF_FAMILY = {
    "deepseek_v2": {
        "rope": "yarn, DeepSeek",
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "gemma3_text": {"tied": True},  # SGLang knows no other
    "glm_moe_dsa": {"rope": "yarn, DeepSeek"},
    "olmoe": {"num_key_value_heads": 4},  # SGLang has a norm of that size over the keys
    "kimi_k2": LATENT,
    "qwen2_moe": {"mlp_only_layers": []},  # SGLang knows no dense layers there
    "qwen3_moe": {"mlp_only_layers": []},
}
OF_CONFIG = {
    "ernie4_5": {"architectures": ["Ernie4_5_ForCausalLM"]},
    "exaone4": {"sliding_window_pattern": "LG"},
    "glm_moe_dsa": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gpt_oss": {"swiglu_limit": 7.0},
}
"""Settings of real configs that transformers does not write."""


def matrix(root: Path, families: list[str], tensor: int, expert: int) -> dict[tuple[str, str], list[dict]]:
    """Return what each rank of the engine has found, by family and layout of the trainer."""
    folders = []
    for family in families:
        sizes = {"tied": False, "vocab_size": 104, **OF_FAMILY.get(family, {})}
        folders.append(make_checkpoint(root / family, family, **sizes))
        config = root / family / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | OF_CONFIG.get(family, {})))
    out = root / f"out-{tensor}-{expert}"
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.sglang_matrix",
        str(tensor),
        str(expert),
        str(out),
        *map(str, folders),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert not ended.returncode, ended.stdout[-2000:] + ended.stderr[-4000:]
    results: dict[tuple[str, str], list[dict]] = {}
    for rank in range(tensor):
        for line in (out / f"{rank}.jsonl").read_text().splitlines():
            result = json.loads(line)
            results.setdefault((result["model"], result["layout"]), []).append(result)
    return results


def assert_equal(results: dict[tuple[str, str], list[dict]], families: list[str], ranks: int) -> None:
    for key, found in results.items():
        assert len(found) == ranks
        for result in found:
            assert not result["error"], (key, result["error"])
            assert not result["wrong"] and not result["unfilled"] and result["tensors"], (key, result)
    for family in families:
        layouts = {layout for model, layout in results if model == family}
        assert layouts == set(LAYOUTS) if family in MIXTURES else layouts < set(LAYOUTS) and len(layouts) > 6


def test_engines_of_tensor_and_expert_parallel_ranks_hold_the_bits_of_the_checkpoint(tmp_path):
    assert_equal(matrix(tmp_path, FEW, 2, 2), FEW, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_engines_of_every_layout_hold_the_bits_of_the_checkpoint(tmp_path, tensor, expert):
    # SGLang itself cannot load gpt-oss's biases of experts that are spread over ranks.
    families = FEW + [family for family in OTHERS if expert == 1 or family != "gpt_oss"]
    assert_equal(matrix(tmp_path, families, tensor, expert), families, tensor)
