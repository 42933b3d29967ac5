"""What a config means by the settings that it leaves out: the defaults of its class in transformers.

They matter where they are not those of the other families, which are beside the code that reads a setting.
"""

from slipstream.bridge.hf.config import HfConfig

_DEEPSEEK = {"n_shared_experts": 1, "routed_scaling_factor": 2.5}
_GLM = {"rms_norm_eps": 1e-5, "n_shared_experts": 1}
_QWEN_HYBRID = {"head_dim": 256, "num_key_value_heads": 2}

DEFAULTS: dict[str, HfConfig] = {
    "arcee": {"rms_norm_eps": 1e-5},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 1536, "n_group": 8, "topk_group": 4},
    "deepseek_v32": {**_DEEPSEEK, "n_group": 8, "topk_group": 4},
    "ernie4_5": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "exaone4": {"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    "glm": {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07},
    "glm4_moe": {**_GLM, "num_key_value_heads": 8},
    "glm4_moe_lite": {**_GLM, "q_lora_rank": 768, "routed_scaling_factor": 1.8},
    "glm4v_text": {"attention_bias": True, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "glm4v_moe_text": {**_GLM, "attention_bias": True, "num_key_value_heads": 8},
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
    "helium": {"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    "mimo": {"num_key_value_heads": 32},
    "minimax_m2": {"num_key_value_heads": 8, "rope_theta": 5e6},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "nemotron": {"initializer_range": 0.0134, "norm_eps": 1e-5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmoe": {"rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_5_vl_text": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_5_moe_text": _QWEN_HYBRID,
    "qwen3_5_text": {**_QWEN_HYBRID, "num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_vl_moe_text": {"num_key_value_heads": 16, "rope_theta": 5e5},
    "qwen3_vl_text": {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    "solar_open": {**_GLM, "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1e6},
    "stablelm": {"layer_norm_eps": 1e-5, "num_key_value_heads": 32},
    "youtu": {"q_lora_rank": 1536, "tie_word_embeddings": True},
}
"""By ``model_type``."""


def with_defaults(hf: HfConfig) -> HfConfig:
    """Return a config that states them. A setting that is null is stated."""
    defaults = dict(DEFAULTS.get(str(hf.get("model_type")), {}))
    if hf.get("rope_scaling"):  # the older name of the same setting
        defaults.pop("rope_parameters", None)
    return {**defaults, **hf}
