"""Small random HF checkpoints of each supported family, and their reference log-probs and gradients."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

_SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
_CONFIGS = {
    "qwen3": lambda **kw: Qwen3Config(head_dim=24, **kw),
    "qwen2": lambda **kw: Qwen2Config(**kw),
    "llama": lambda **kw: LlamaConfig(rms_norm_eps=1e-5, **kw),
}


def make_checkpoint(
    folder: Path, family: str = "qwen3", *, tied: bool = True, seed: int = 0, **sizes: int
) -> Path:
    """Write a random checkpoint without a tokenizer. Norms and biases are random too: none is neutral."""
    torch.manual_seed(seed)
    config = _CONFIGS[family](**{**_SIZES, "tie_word_embeddings": tied, "rope_theta": 10000.0, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
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
