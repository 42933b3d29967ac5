"""What a config means by the settings that it leaves out: the defaults of its class in transformers.

They matter where they are not those of the other families, which are beside the code that reads a setting.
"""

from slipstream.bridge.hf.config import HfConfig

_DEEPSEEK = {"n_shared_experts": 1, "routed_scaling_factor": 2.5}
_GLM = {"rms_norm_eps": 1e-5, "n_shared_experts": 1}
_QWEN_HYBRID = {"head_dim": 256, "num_key_value_heads": 2}

DEFAULTS: dict[str, HfConfig] = {
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4},
    "deepseek_v32": {**_DEEPSEEK, "n_group": 8, "topk_group": 4},
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4},
    "glm4_moe": {**_GLM, "num_key_value_heads": 8},
    "glm4_moe_lite": {**_GLM, "q_lora_rank": 768, "routed_scaling_factor": 1.8},
    "glm_moe_dsa": {**_GLM, "routed_scaling_factor": 2.5},
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "minimax_m2": {"num_key_value_heads": 8, "rope_theta": 5e6},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "qwen3_5_text": {**_QWEN_HYBRID, "num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_vl_text": {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
}
"""By ``model_type``."""


def with_defaults(hf: HfConfig) -> HfConfig:
    """Return a config that states them. A setting that is null is stated."""
    defaults = dict(DEFAULTS.get(str(hf.get("model_type")), {}))
    if hf.get("rope_scaling"):  # the older name of the same setting
        defaults.pop("rope_parameters", None)
    return {**defaults, **hf}
