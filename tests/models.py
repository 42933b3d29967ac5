"""Small random HF checkpoints of each supported family, and their reference log-probs and gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bridge_cases import CONFIG

_SIZES = {
    **CONFIG,
    "initializer_range": 0.1,
    "rope_theta": 10000.0,
}
_SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_FAMILIES = {
    "qwen3": {"head_dim": 24},
    "qwen2": {},
    "llama": {"rms_norm_eps": 1e-5},
    "mistral": {"rms_norm_eps": 1e-5, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
    },
    "deepseek_v3": {
        **_SIGMOID_EXPERTS,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_group": 4,
        "topk_group": 2,
        "num_key_value_heads": 4,
    },
    "seed_oss": {"head_dim": 24},
    "glm4_moe": {**_SIGMOID_EXPERTS, "head_dim": 24, "attention_bias": True, "use_qk_norm": True},
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn, DeepSeek": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}
"""Variants of rotary embeddings, with wavelengths on both sides of their borders."""


def make_checkpoint(
    folder: Path, family: str = "qwen3", *, tied: bool = True, seed: int = 0, rope: str = "", **sizes: Any
) -> Path:
    """Write a random checkpoint without a tokenizer. Norms and biases are random too: none is neutral."""
    torch.manual_seed(seed)
    settings = {**_SIZES, "tie_word_embeddings": tied, **_FAMILIES[family], **sizes}
    if rope:
        settings["rope_parameters"] = {**ROPES[rope], "rope_theta": settings.pop("rope_theta")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> torch.nn.Module:
    """transformers' own implementation, float32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def reference_logprobs(model: torch.nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of tokens[1:], differentiable."""
    ids = torch.as_tensor(np.asarray(tokens))
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
