"""A Megatron GPTModel for an HF checkpoint: config, layer spec, DDP wrapping, weights, optimizer.

The one place that constructs Megatron objects, so that a change of Megatron is a change here.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from backend.megatron.local_layers import PackedAttention, RMSNorm
from bridge.families import ModelSpec
from bridge.geometry import Geometry
from bridge.layout import Layout
from bridge.load import load_hf
from configs.schema import ActorConfig


def _fields_of(config_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a recipe's ``actor.megatron`` that belongs to one of Megatron's configs."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in names}


def transformer_config(geometry: Geometry, actor: ActorConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config of the model; the recipe's ``actor.megatron`` goes over it."""
    on_gpu = torch.cuda.is_available()
    parallel = actor.parallel
    settings = {
        "num_layers": geometry.n_layers,
        "hidden_size": geometry.hidden,
        "ffn_hidden_size": geometry.ffn_hidden,
        "num_attention_heads": geometry.n_heads,
        "num_query_groups": geometry.n_kv_heads,
        "kv_channels": geometry.head_dim,
        "layernorm_epsilon": geometry.norm_eps,
        "init_method_std": geometry.init_std,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": geometry.qkv_bias,
        "qk_layernorm": geometry.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "sequence_parallel": parallel.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "calculate_per_token_loss": True,  # losses come as sums; Megatron divides by the tokens of the batch
        "variable_seq_lengths": True,  # packs differ in length from micro-batch to micro-batch
        "moe_token_dispatcher_type": "alltoall",  # asked for with variable lengths, in dense models too
        "use_cpu_initialization": not on_gpu,
        "perform_initialization": False,  # every weight comes from the checkpoint
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,  # needs Apex
    }
    return TransformerConfig(**settings | _fields_of(TransformerConfig, actor.megatron))


def layer_spec(geometry: Geometry) -> ModuleSpec:
    """Megatron's local layer spec with packed attention and norms that know sequence parallelism."""
    spec = get_gpt_layer_local_spec(qk_layernorm=geometry.qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if geometry.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def build_model(spec: ModelSpec, actor: ActorConfig, dtype: torch.dtype, device: torch.device) -> GPTModel:
    """This rank's part of the model, with the weights of the HF checkpoint."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    geometry = spec.geometry
    layout = Layout(actor.parallel.tensor, actor.parallel.pipeline)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    block = TransformerBlockSubmodules(
        layer_specs=[layer_spec(geometry)] * len(layout.layers_of(stage, geometry.n_layers)),
        layer_norm=RMSNorm,
    )
    model = GPTModel(
        transformer_config(geometry, actor, dtype),
        block,
        vocab_size=geometry.padded_vocab(layout.tensor),
        max_sequence_length=geometry.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=geometry.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=geometry.rope_theta,
    ).to(device=device, dtype=dtype)
    load_hf(
        spec, layout, stage, parallel_state.get_tensor_model_parallel_rank(), dict(model.named_parameters())
    )
    return model


def wrap_ddp(model: GPTModel, actor: ActorConfig) -> DistributedDataParallel:
    """Megatron's DDP: contiguous float32 gradients, reduced once per optimizer update."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=actor.optimizer.distributed,
        overlap_grad_reduce=False,
    )
    ddp = DistributedDataParallel(model.config, config, model)
    ddp.broadcast_params()
    return ddp


def build_optimizer(
    ddp: DistributedDataParallel, actor: ActorConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Megatron's Adam with float32 main parameters; hooks loss scaling and finalization into the model."""
    optimizer = actor.optimizer
    settings = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "use_distributed_optimizer": optimizer.distributed,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
    }
    config = OptimizerConfig(**settings | _fields_of(OptimizerConfig, actor.megatron))
    made = get_megatron_optimizer(config, [ddp])
    ddp.config.grad_scale_func = made.scale_loss
    ddp.config.finalize_model_grads_func = finalize_model_grads
    return made


def learning_rate(actor: ActorConfig, step: int) -> float:
    """The learning rate of training step ``step`` (from 0): linear warm-up, then constant."""
    warmup = actor.optimizer.warmup_steps
    return actor.optimizer.lr * min(1.0, (step + 1) / warmup if warmup else 1.0)


def named_shards(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """This rank's parameters by the names that the bridge uses."""
    return dict(ddp.module.named_parameters())
