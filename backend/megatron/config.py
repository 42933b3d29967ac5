"""Megatron's ``TransformerConfig`` of a model.

Fields that follow from the HF config and from the recipe's layout are set here; ``actor.megatron`` overrides
them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from slipstream.backend.megatron.fusions import KernelSupport, chosen_fusions
from slipstream.bridge.model.geometry import (
    CLAMP,
    Activation,
    Experts,
    Geometry,
    GroupedAttention,
    LatentAttention,
)
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.rope import Rope
from slipstream.configs.schema import ActorConfig

Settings = dict[str, Any]
"""Fields of one of Megatron's configs, by their own names."""

RECOMPUTE: Mapping[str, Settings] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Megatron's settings for each value of ``actor.recompute``."""


def fields_of(config_class: type, settings: Settings) -> Settings:
    """Return the part of a recipe's ``actor.megatron`` that belongs to one of Megatron's configs."""
    names = {field.name for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in settings.items() if name in names}
    if "attention_backend" in given:
        # Megatron takes no notice of the name of a member; its own command line translates it too.
        given["attention_backend"] = AttnBackend[given["attention_backend"]]
    return given


def transformer_config(
    geometry: Geometry, actor: ActorConfig, layout: Layout, dtype: torch.dtype
) -> TransformerConfig:
    """Return Megatron's config of the model, with the overrides of the recipe's ``actor.megatron``."""
    on_gpu = torch.cuda.is_available()
    settings: Settings = {
        "num_layers": geometry.n_layers,
        "hidden_size": geometry.hidden,
        "ffn_hidden_size": geometry.ffn_hidden,
        "num_attention_heads": geometry.attention.heads,
        "layernorm_epsilon": geometry.norm_eps,
        "init_method_std": geometry.init_std,
        "normalization": "LayerNorm" if geometry.layer_norms else "RMSNorm",
        "layernorm_zero_centered_gamma": geometry.centered_norms,
        "gated_linear_unit": geometry.gated,
        "add_bias_linear": geometry.linear_biases,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "sequence_parallel": actor.parallel.sequence,
        "context_parallel_size": actor.parallel.context,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": True,  # losses come as sums; Megatron divides by the tokens of the batch
        "variable_seq_lengths": True,  # packs differ in length from micro-batch to micro-batch
        "moe_token_dispatcher_type": "alltoall",  # required with variable lengths, in dense models too
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,  # every weight comes from the checkpoint
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,  # needs Apex
    } | RECOMPUTE[actor.recompute]
    settings |= _activation(geometry.activation)
    if geometry.unrotated_layers:
        settings["no_rope_freq"] = [
            int(layer in geometry.unrotated_layers) for layer in range(geometry.n_layers)
        ]
    if geometry.window is not None:
        within = set(geometry.window.layers)
        settings |= {
            # Megatron counts the tokens before and after the token itself.
            "window_size": (geometry.window.tokens - 1, 0),
            "window_attn_skip_freq": [int(layer in within) for layer in range(geometry.n_layers)],
        }
    settings |= chosen_fusions(geometry, layout.layer_spec, KernelSupport.present(), actor.megatron)
    if layout.pipeline > 1:
        settings |= _pipeline(layout, geometry.n_layers)
    if geometry.experts:
        settings |= _experts(geometry.experts, layout, geometry.n_layers)
    kind: type[TransformerConfig] = TransformerConfig
    if isinstance(geometry.attention, LatentAttention):
        kind = MLATransformerConfig
        settings |= _latent_attention(geometry.attention, geometry.rope)
    else:
        settings |= _grouped_attention(geometry.attention, geometry.rope)
    if geometry.delta_layers:
        # Megatron then stores every layer of a checkpoint under its own number, since layers are not alike.
        settings["linear_attention_freq"] = [
            int(geometry.delta_of(layer) is not None) for layer in range(geometry.n_layers)
        ]
    config = kind(**settings | fields_of(kind, actor.megatron))
    if kind is TransformerConfig and geometry.rope.kind == "yarn":
        # Megatron's attention reads the factor of its cosines and sines from attributes that are no fields.
        yarn = cast(Any, config)
        yarn.yarn_rotary_scaling_factor = geometry.rope.factor
        yarn.yarn_mscale = geometry.rope.magnitude
        yarn.yarn_mscale_all_dim = geometry.rope.magnitude_all
    return config


def _pipeline(layout: Layout, n_layers: int) -> Settings:
    parts = [["decoder"] * size for size in layout.part_sizes(n_layers)]
    parts[0] = ["embedding", *parts[0]]
    parts[-1] = [*parts[-1], "loss"]
    settings: Settings = {"pipeline_model_parallel_layout": parts}
    if layout.chunks > 1:
        settings |= {
            "virtual_pipeline_model_parallel_size": layout.chunks,
            # Batched, the sends in both directions between the same two stages would be mixed up.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return settings


def gelu_tanh(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def _activation(kind: Activation) -> Settings:
    match kind:
        case "swiglu":
            return {"activation_func": F.silu}
        case "geglu":
            return {"activation_func": gelu_tanh}
        case "squared_relu":
            return {"activation_func": squared_relu}
        case "clamped_swiglu":
            return {
                "activation_func": quick_gelu,
                "glu_linear_offset": 1.0,
                "activation_func_clamp_value": CLAMP,
            }


def _grouped_attention(attention: GroupedAttention, rope: Rope) -> Settings:
    return {
        "rotary_interleaved": rope.interleaved,
        "num_query_groups": attention.kv_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        "attention_output_gate": attention.gate,
        "softmax_scale": attention.scale,
        "softmax_type": "learnable" if attention.sinks else "vanilla",
    }


def _latent_attention(attention: LatentAttention, rope: Rope) -> Settings:
    settings: Settings = {
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.plain_dim,
        "qk_pos_emb_head_dim": attention.rotated_dim,
        "v_head_dim": attention.value_dim,
        "kv_channels": attention.plain_dim + attention.rotated_dim,
        "rope_type": "rope",
        "rotary_base": rope.theta,
        "rotary_scaling_factor": 1.0,
    }
    if rope.kind == "yarn":
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.factor,
            "original_max_position_embeddings": rope.original_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.magnitude,
            "mscale_all_dim": rope.magnitude_all or 0.0,
        }
    return settings


def _experts(experts: Experts, layout: Layout, n_layers: int) -> Settings:
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn_hidden,
        "moe_layer_freq": [int(layer not in experts.dense_layers) for layer in range(n_layers)],
        "moe_router_score_function": experts.score,
        # A normalized softmax over all experts is the softmax over the chosen ones. Megatron refuses to take
        # it over a single one (see ``router``).
        "moe_router_pre_softmax": experts.score == "softmax"
        and (not experts.normalized or experts.per_token == 1),
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_bias_update_rate": 0.0,  # reinforcement learning does not change the balance
        "moe_router_topk_scaling_factor": experts.scaling if experts.scaling != 1.0 else None,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.groups_per_token if experts.groups > 1 else None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": layout.layer_spec == "transformer_engine",
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.etp,
    }
