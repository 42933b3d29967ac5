"""Small random HF checkpoints of each supported family, and their reference log-probs and gradients."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from tests.bridge_cases import CONFIG, LINEAR_ATTENTION, TEXT_PARTS

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
_LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
_VISION: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 16,
        "patch_size": 4,
    },
    "qwen3_vl": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
_VISION |= dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"), _VISION["qwen3_vl"])
_VISION["qwen2_5_vl"] = {**_VISION["qwen3_vl"], "fullatt_block_indexes": [0]}
_VISION["glm4v_moe"] = {**_VISION["qwen3_vl"], "image_size": 16}
_VISION |= dict.fromkeys(("glm4v", "glm46v"), _VISION["glm4v_moe"])
_VISION["gemma3"] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
"""Settings of the vision towers of families whose language model is described in ``text_config``."""
_WRAPPED = {"kimi_k25": ("kimi_k2", "language_model.", "vision_tower.")}
"""Families that transformers lacks, and that are another with a prefix and tensors beside it."""
_UNKNOWN_TO_TRANSFORMERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Families without an implementation in transformers, and the family whose implementation they use."""
_HYBRID = {**LINEAR_ATTENTION, "head_dim": 24, "full_attention_interval": 3}
_GATED_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_SPARSE = {
    **_SIGMOID_EXPERTS,
    **_LATENT,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 8,
    "index_n_heads": 8,  # with few heads many scores are exactly zero, and equal scores have no order
    "index_head_dim": 16,
    "index_topk": 6,
    "rms_norm_eps": 1e-6,
}
_GEMMA3 = {
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 100.0,
    "pad_token_id": None,  # that of a pad token is zero and has no gradient in transformers
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [6, 3, 3],
    "mrope_interleaved": True,
}
_GLM4V = {
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
_FAMILIES = {
    "arcee": {"hidden_act": "relu2"},
    "deepseek_v2": {
        **_SIGMOID_EXPERTS,
        **_LATENT,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    "ernie4_5": {"head_dim": 24, "use_bias": False, "pad_token_id": None},
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2, "pad_token_id": None},
    "gemma": {"head_dim": 24, "pad_token_id": None},
    "gemma3": _GEMMA3,
    "glm": {"head_dim": 24, "attention_bias": True, "pad_token_id": None},
    "glm4": {"head_dim": 24, "attention_bias": True, "pad_token_id": None},
    "glm4v": _GLM4V,
    "glm46v": _GLM4V,
    "glm4v_moe": {
        **_SIGMOID_EXPERTS,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "granite": {
        "pad_token_id": None,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "helium": {"head_dim": 16, "pad_token_id": None},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5, "pad_token_id": None},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "pad_token_id": None},
    "mimo": {"attention_bias": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmo2": {"pad_token_id": None},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "pad_token_id": None},
    "phi3": {"pad_token_id": None},
    "qwen2_5_vl": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    },
    "qwen2_moe": {**_GATED_EXPERTS, "mlp_only_layers": [1]},
    "qwen3_vl_moe": {
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "rope_parameters": _MROPE,
    },
    "smollm3": {"no_rope_layer_interval": 3, "pad_token_id": None},
    "solar_open": {**_SIGMOID_EXPERTS, "head_dim": 24, "norm_topk_prob": True},
    "youtu": {**_LATENT, "rms_norm_eps": 1e-6, "pad_token_id": None},
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
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
        **_LATENT,
        "n_group": 4,
        "topk_group": 2,
    },
    "kimi_k2": {
        **_SIGMOID_EXPERTS,
        **_LATENT,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    # transformers has this epsilon in the norms inside of latent attention, whatever the config says.
    "glm4_moe_lite": {**_SIGMOID_EXPERTS, **_LATENT, "rms_norm_eps": 1e-6},
    "minimax_m2": {
        "head_dim": 24,
        "rotary_dim": 12,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    # transformers has no gradient for the embedding of the padding token, which is token 1 by default.
    "seed_oss": {"head_dim": 24, "pad_token_id": None},
    "mistral3": {"model_type": "mistral", "head_dim": 24, "sliding_window": None, "rms_norm_eps": 1e-5},
    "qwen3_vl": {"head_dim": 24, "rope_parameters": _MROPE},
    "dots1": {**_SIGMOID_EXPERTS, "head_dim": 24, "norm_topk_prob": True},
    "qwen3_next": {**_HYBRID, **_GATED_EXPERTS, "mlp_only_layers": [1]},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {**_HYBRID, **_GATED_EXPERTS},
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": {**_HYBRID, **_GATED_EXPERTS},
    "glm4_moe": {**_SIGMOID_EXPERTS, "head_dim": 24, "attention_bias": True, "use_qk_norm": True},
    "gemma3_text": _GEMMA3,
    "gpt_oss": {
        "head_dim": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
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


def stack_experts(folder: Path) -> None:
    """Stack the experts of a checkpoint, as Qwen3.5-MoE is published and transformers holds them.

    Those of Qwen3-VL, which are stacked by transformers, are transposed, as they are published.
    """
    config = json.loads((folder / "config.json").read_text())
    transposed = config["model_type"] == "qwen3_vl_moe"
    stacked, single = dict[str, torch.Tensor](), dict[str, dict[str, list[torch.Tensor]]]()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items(), key=_expert_of):
        if match := _EXPERT.fullmatch(name):
            single.setdefault(match[1], {}).setdefault(_KINDS.get(match[3], match[3]), []).append(tensor)
        elif transposed and _STACKED.search(name):
            stacked[name] = tensor.transpose(1, 2).contiguous()
        else:
            stacked[name] = tensor
    for prefix, kinds in single.items():
        gate, up, down = (torch.stack(kinds[kind]) for kind in ("gate_proj", "up_proj", "down_proj"))
        stacked |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    save_file(stacked, folder / "model.safetensors", {"format": "pt"})


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_STACKED = re.compile(r"\.experts\.(gate_up|down)_proj$")
_KINDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Projections of MiniMax's experts, by their names."""


def _expert_of(item: tuple[str, torch.Tensor]) -> int:
    match = _EXPERT.fullmatch(item[0])
    return int(match[2]) if match else -1


def make_checkpoint(
    folder: Path, family: str = "qwen3", *, tied: bool = True, seed: int = 0, rope: str = "", **sizes: Any
) -> Path:
    """Write a random checkpoint without a tokenizer. Norms and biases are random too: none is neutral."""
    if family in _WRAPPED:
        return _make_wrapped(folder, family, tied=tied, seed=seed, rope=rope, **sizes)
    torch.manual_seed(seed)
    settings = {"tie_word_embeddings": tied, **sizes}
    if rope:
        settings["rope_parameters"] = {**ROPES[rope], "rope_theta": _SIZES["rope_theta"]}
    known = _UNKNOWN_TO_TRANSFORMERS.get(family, family)
    config = config_of(family, settings_of(family, **settings))
    model = _auto(family).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    if known != family:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))
    return folder


def settings_of(family: str, **changed: Any) -> dict[str, Any]:
    """Return the settings of a small model, with those of its language model in ``text_config`` if it reads
    more than text.
    """
    settings = {**_SIZES, **_FAMILIES[family], **changed}
    if family not in _VISION:
        return settings
    tied = {name: settings.pop(name) for name in ("tie_word_embeddings",) if name in settings}
    text = {"model_type": TEXT_PARTS[family][1], **settings}
    return {**tied, "text_config": text, "vision_config": dict(_VISION[family])}


def config_of(family: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """Return what transformers makes of the settings in a config.json."""
    stated = {name: value for name, value in deepcopy(settings).items() if name != "model_type"}
    return AutoConfig.for_model(_UNKNOWN_TO_TRANSFORMERS.get(family, family), **stated)


def _make_wrapped(folder: Path, family: str, **settings: Any) -> Path:
    """Write a checkpoint of the language model into a folder of its own, and the wrapped one beside it."""
    text, prefix, vision = _WRAPPED[family]
    inner = make_checkpoint(folder / _TEXT, text, **settings)
    tensors = {prefix + name: tensor for name, tensor in load_file(inner / "model.safetensors").items()}
    tensors[f"{vision}patch_embed.weight"] = torch.randn(3, 5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": family,
        "tie_word_embeddings": settings["tied"],
        "text_config": json.loads((inner / "config.json").read_text()),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_TEXT = "text"


def _auto(family: str) -> Any:
    return AutoModelForImageTextToText if family in _VISION else AutoModelForCausalLM


def reference_model(folder: Path, **options: Any) -> torch.nn.Module:
    """transformers' own implementation, float32, eager attention."""
    hf = json.loads((folder / "config.json").read_text())
    family = hf.pop("model_type")
    if family in _WRAPPED:
        model = reference_model(folder / _TEXT, **options)
        model.wrapped_as = family
        return model
    config = AutoConfig.for_model(_UNKNOWN_TO_TRANSFORMERS.get(family, family), **hf)
    return _auto(family).from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", **options
    )


_BLOCK_SPARSE = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.weight": ".w1.weight",
    ".up_proj.weight": ".w3.weight",
    ".down_proj.weight": ".w2.weight",
}
_NAMES = {
    "minimax_m2": _BLOCK_SPARSE,
    "mixtral": _BLOCK_SPARSE,
    "mistral3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "gemma3": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "qwen2_5_vl": {"model.language_model.": "model.", "model.visual.": "visual."},
}
"""Parts of names in checkpoints, by those in transformers' models, where they differ."""


def name_in_checkpoints(model: torch.nn.Module, name: str) -> str:
    """Return the name under which transformers stores a parameter of a reference model."""
    for old, new in _NAMES.get(model.config.model_type, {}).items():
        name = name.replace(old, new)
    wrapped_as = getattr(model, "wrapped_as", None)
    return name if wrapped_as is None else _WRAPPED[wrapped_as][1] + name


def reference_logprobs(model: torch.nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of tokens[1:], differentiable."""
    ids = torch.as_tensor(np.asarray(tokens))
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
