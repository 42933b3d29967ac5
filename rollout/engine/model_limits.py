"""The limits of a model that engines serve, of whatever family: what its config.json says."""

import json
from pathlib import Path
from typing import cast

_GPU_INDEXER = "the indexer of its sparse attention has kernels for GPUs alone"
_LINEAR_ATTENTION = "its linear attention needs kernels of Triton or, on CPUs with AMX, of sgl_kernel"

UNSERVED_ON_CPUS = {
    "deepseek_v32": _GPU_INDEXER,
    "glm_moe_dsa": _GPU_INDEXER,
    "qwen3_next": _LINEAR_ATTENTION,
    "qwen3_5": _LINEAR_ATTENTION,
    "qwen3_5_text": _LINEAR_ATTENTION,
    "qwen3_5_moe": _LINEAR_ATTENTION,
    "qwen3_5_moe_text": _LINEAR_ATTENTION,
    "minimax_m2": "the norm over all heads of its queries and keys is a kernel of Triton",
    **dict.fromkeys(
        ("gemma3", "glm4v", "glm4v_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        "its image processor is not imported there, and SGLang starts none of its models without",
    ),
    "gpt_oss": "torch_native, its attention for CPUs, has no sinks",
}
"""The reason, as of SGLang 0.5.21, by ``model_type``."""

UNSERVED = {
    "gemma": "its loader adds one to weights in the memory from which it reads them, which engines share",
    **dict.fromkeys(
        ("glm", "glm46v", "helium", "nemotron", "seed_oss", "smollm3", "solar_open", "youtu"),
        "it has no model of this type",
    ),
}
"""Why SGLang 0.5.21 cannot serve a model anywhere, by ``model_type``."""

UNSERVED_BY_EXPERT_RANKS = {"gpt_oss": "its loader of their biases takes each rank for one with all experts"}
"""Why SGLang 0.5.21 cannot load a model whose experts are divided among ranks, by ``model_type``."""

READ_STACKED_EXPERTS = frozenset({"gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe"})
"""The types whose loaders in SGLang 0.5.21 read tensors that stack the experts of a layer."""

TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "qwen3_vl_moe"})
"""Types of which SGLang reads each stacked expert as [inputs, outputs], and not as [outputs, inputs]."""

TIED_ONLY = frozenset({"gemma", "gemma3", "gemma3_text"})
UNTIED_ONLY = frozenset(
    {
        *("arcee", "glm4_moe", "glm4_moe_lite", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "qwen2_moe"),
        *("qwen3_moe", "qwen3_next", "stablelm"),
    }
)
"""The types of which SGLang 0.5.21 loads no head of its own, and those whose head it never ties."""


def vocabulary_of(folder: Path) -> int:
    """Return the number of token ids. Raises ValueError and OSError."""
    return _number(folder, "vocab_size")


def context_of(folder: Path) -> int:
    """Return the largest number of tokens of prompt and completion together. Raises ValueError, OSError."""
    return _number(folder, "max_position_embeddings")


def _number(folder: Path, key: str) -> int:
    """Return a number of the language model, which may be a part of a larger one."""
    content: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = cast("dict[str, object]", content) if isinstance(content, dict) else {}
    inner = config.get("text_config")
    for each in (config, cast("dict[str, object]", inner) if isinstance(inner, dict) else {}):
        number = each.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    raise ValueError(f"{folder / 'config.json'} has no {key}, expected a positive whole number")
