"""A Megatron GPTModel for an HF checkpoint: config, layer spec, weights, DDP wrapping, optimizer.

Megatron objects are constructed only here, so that a change of Megatron is a change here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from slipstream.backend.megatron import lora
from slipstream.backend.megatron.config import Settings, fields_of, transformer_config
from slipstream.backend.megatron.delta_net import PackedDeltaNet
from slipstream.backend.megatron.groups import groups
from slipstream.backend.megatron.head import ValueHead
from slipstream.backend.megatron.layer_spec import layer_spec
from slipstream.backend.megatron.layers import WindowRopeAttention, final_norm, layer_specs
from slipstream.backend.megatron.local_layers import DownProjection, RMSNorm
from slipstream.backend.megatron.lora import AdapterExport
from slipstream.backend.megatron.marks import marks_of
from slipstream.backend.megatron.sparse_attention import TokenIndexer
from slipstream.backend.megatron.supported import require_supported
from slipstream.bridge.model.geometry import Geometry, GroupedAttention
from slipstream.bridge.model.layout import LayerSpec, Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.load_hf import load_hf
from slipstream.configs.schema import ActorConfig

ModelProvider = Callable[[bool, bool, int | None], GPTModel]
"""Makes the part that has the embedding (or not), has the output layer (or not), and is of this virtual
pipeline stage (None: there are none). Its parameters have the names and shapes of the standard part's."""


def build_model(
    spec: ModelSpec,
    actor: ActorConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
    provider: ModelProvider | None = None,
) -> list[GPTModel]:
    """Return this rank's part of the model for each virtual pipeline stage, with the HF checkpoint's weights.

    ``seed``: for the adapters, which are not in the checkpoint. ``provider``: makes the parts in place of
    this module.
    """
    parts = empty_model(spec, actor, dtype, device, provider=provider)
    layout, rank = _layout(actor, dtype, spec.geometry), torch.distributed.get_rank()
    load_hf(spec, layout, rank, [named_shards(part) for part in parts])
    if actor.lora is not None:
        lora.adapt(parts, spec, layout, rank, actor.lora, seed)
    return parts


def empty_model(
    spec: ModelSpec,
    actor: ActorConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    provider: ModelProvider | None = None,
) -> list[GPTModel]:
    """Return the same parts with undefined weights and without adapters."""
    geometry, layout = spec.geometry, _layout(actor, dtype, spec.geometry)
    require_supported(geometry, layout, shares_prefixes=actor.share_prefixes == "auto")
    config = transformer_config(geometry, actor, layout, dtype)
    stage = groups.get_pipeline_model_parallel_rank()
    specs = layer_specs(geometry, layout.layer_spec)
    parts = [
        _build_part(spec, config, part_specs, stage, chunk, layout, provider).to(device=device, dtype=dtype)
        for chunk, part_specs in enumerate(_specs_of_stage(specs, layout, stage))
    ]
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, PackedDeltaNet):
            module.A_log.data = module.A_log.data.float()
        bias: Tensor | None = getattr(module, "expert_bias", None)
        if bias is not None:
            bias.data = bias.float()  # a tiny step in a bias decides a choice
        if isinstance(module, TokenIndexer):
            module.k_norm.float()
    if isinstance(geometry.attention, GroupedAttention) and geometry.attention.joint_qk_norm:
        # With this setting, which layers need while they are made, Megatron sums the gradients of all norms
        # of queries and keys over tensor-parallel ranks. Here every rank has its own part of such a norm.
        for part in parts:
            part.config.qk_layernorm = False
    return parts


def layer_spec_of(actor: ActorConfig, dtype: torch.dtype, geometry: Geometry) -> LayerSpec:
    """Return the layer spec of a model of this dtype."""
    return layer_spec(actor, str(dtype).removeprefix("torch."), geometry)


def _layout(actor: ActorConfig, dtype: torch.dtype, geometry: Geometry) -> Layout:
    return Layout.of(actor.parallel, layer_spec_of(actor, dtype, geometry))


def _specs_of_stage(specs: list[ModuleSpec], layout: Layout, stage: int) -> list[list[ModuleSpec]]:
    by_chunk: list[list[ModuleSpec]] = [[] for _ in range(layout.chunks)]
    for spec, place in zip(specs, layout.places(len(specs)), strict=True):
        if place.stage == stage:
            by_chunk[place.chunk].append(spec)
    return by_chunk


def _build_part(
    spec: ModelSpec,
    config: TransformerConfig,
    specs: list[ModuleSpec],
    stage: int,
    chunk: int,
    layout: Layout,
    provider: ModelProvider | None,
) -> GPTModel:
    pre_process = stage == 0 and chunk == 0
    post_process = stage == layout.pipeline - 1 and chunk == layout.chunks - 1
    vp_stage = chunk if layout.chunks > 1 else None
    if provider is None:
        part = _standard_part(spec, config, specs, layout, pre_process, post_process, vp_stage)
    else:
        part = provider(pre_process, post_process, vp_stage)
    _complete_part(spec, config, part)
    return part


def _standard_part(
    spec: ModelSpec,
    config: TransformerConfig,
    specs: list[ModuleSpec],
    layout: Layout,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    geometry = spec.geometry
    # Megatron takes submodules, classes and floats where its annotations say otherwise.
    norm = cast("ModuleSpec", final_norm(geometry, layout.layer_spec))
    layers = cast("ModuleSpec", TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm))
    return GPTModel(
        config,
        layers,
        vocab_size=geometry.padded_vocab(layout.tensor),
        max_sequence_length=geometry.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=geometry.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=geometry.rope.fraction,
        rotary_base=cast("int", geometry.rope.theta),
        vp_stage=vp_stage,
    )


def _complete_part(spec: ModelSpec, config: TransformerConfig, part: GPTModel) -> None:
    """Set what Megatron's own constructor leaves to its training loop, or cannot describe."""
    geometry = spec.geometry
    if spec.gives_values and part.post_process:
        part.output_layer = cast("ColumnParallelLinear", ValueHead(config))
    if part.pre_process and geometry.embedding_scale != 1.0:
        part.embedding.register_forward_hook(partial(_scaled, geometry.embedding_scale))
    if part.post_process and geometry.logit_scale != 1.0 and not spec.gives_values:
        norm = cast("torch.nn.Module", part.decoder.final_layernorm)
        norm.register_forward_hook(partial(_scaled, geometry.logit_scale))
    _share_rotary_embeddings(part)
    for module in list(part.modules()):
        if type(module) is RotaryEmbedding:
            frequencies = geometry.rope.frequencies(geometry.rotated_dim)
            module.inv_freq = torch.tensor(frequencies, dtype=torch.float32, device=module.inv_freq.device)
        if isinstance(module, MLASelfAttention):
            _complete(module)
        if isinstance(module, VocabParallelEmbedding | ColumnParallelLinear | RowParallelLinear):
            _mark(module)
        if isinstance(module, RowParallelLinear) and module.is_expert and geometry.linear_biases:
            # Megatron adds an expert's bias in place, which autograd forbids for the result of a
            # communication, even among one rank. Experts with biases are not shared by ranks, so there is
            # nothing to communicate.
            module.explicit_expert_comm = True
    for name, parameter in part.named_parameters():
        if ".mlp.experts." in name:
            # Megatron takes experts for dense layers if there is one expert-parallel rank: with
            # ``expert_tensor`` unlike ``tensor``, their gradients would be summed over the wrong ranks.
            marks_of(parameter).allreduce = False
            # It would also sum the gradients of their biases over tensor-parallel ranks, after the replicas.
            marks_of(parameter).sequence_parallel = False


def _scaled(scale: float, module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
    return output * torch.tensor(scale, dtype=output.dtype, device=output.device)


def _share_rotary_embeddings(part: GPTModel) -> None:
    """Let layers with rotary embeddings of their own share one, as other layers share the model's.

    Each would compute the same angles again for every micro-batch.
    """
    windowed = [module for module in part.modules() if isinstance(module, WindowRopeAttention)]
    for attention in windowed[1:]:
        attention.window_rotary = windowed[0].window_rotary
    attentions = [module for module in part.modules() if isinstance(module, MLASelfAttention)]
    for attention in attentions[1:]:
        attention.rotary_pos_emb = attentions[0].rotary_pos_emb


def _mark(module: VocabParallelEmbedding | ColumnParallelLinear | RowParallelLinear) -> None:
    """Mark a weight as split over tensor-parallel ranks.

    Before 0.19 Megatron marks shards only when it initializes weights; without marks, the norm of the
    gradient counts only the first rank's shards. Layers of Transformer Engine are always marked.
    """
    if module.weight is not None and not hasattr(module.weight, "partition_dim"):
        dim = int(isinstance(module, RowParallelLinear))
        set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def _complete(attention: MLASelfAttention) -> None:
    """Replace the down projections and norms of latent attention.

    Megatron's specs cannot describe those of all models: 0.19 has no norm of keys and values without one of
    queries.
    """
    config = attention.config
    rotated = config.qk_pos_emb_head_dim
    attention.linear_kv_down_proj = DownProjection(
        config, config.hidden_size, config.kv_lora_rank + rotated, rotated=rotated
    )
    attention.kv_layernorm = RMSNorm(config, config.kv_lora_rank, config.layernorm_epsilon)
    if config.q_lora_rank is not None:
        attention.linear_q_down_proj = DownProjection(config, config.hidden_size, config.q_lora_rank)
        attention.q_layernorm = RMSNorm(config, config.q_lora_rank, config.layernorm_epsilon)


def wrap_ddp(parts: Sequence[GPTModel], actor: ActorConfig) -> list[DistributedDataParallel]:
    """Wrap the parts in Megatron's DDP: contiguous float32 gradients, reduced once per optimizer update."""
    optimizer = actor.optimizer
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.distributed,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather,
    )
    wrapped = [
        # As in Megatron: the first chunk's backward passes hide the reduction of later chunks.
        DistributedDataParallel(part.config, config, part, disable_bucketing=chunk > 0)
        for chunk, part in enumerate(parts)
    ]
    for part in wrapped:
        part.broadcast_params()
        if optimizer.overlap_grad_reduce:
            # One function per chunk if there are several; Megatron's annotation lacks the list.
            transformer = cast(Any, part.config)
            transformer.no_sync_func = [p.no_sync for p in wrapped] if len(wrapped) > 1 else part.no_sync
    return wrapped


def build_optimizer(
    parts: Sequence[DistributedDataParallel], actor: ActorConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Build Megatron's Adam with float32 main parameters, and hook it into the model's config.

    Norms and biases, the parameters of one dimension, have no weight decay.
    """
    optimizer = actor.optimizer
    settings: Settings = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "use_distributed_optimizer": optimizer.distributed,
        "overlap_param_gather": optimizer.overlap_param_gather,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
    }
    config = OptimizerConfig(**settings | fields_of(OptimizerConfig, actor.megatron))
    chunks: list[MegatronModule] = [*parts]
    made = get_megatron_optimizer(config, chunks, config_overrides=get_standard_config_overrides(config))
    for group in made.param_groups:  # Megatron's own scheduler would do this; it is not used here
        group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
    for part in parts:
        part.config.grad_scale_func = made.scale_loss
        part.config.finalize_model_grads_func = finalize_model_grads
    return made


def adapter_export(parts: Sequence[GPTModel], spec: ModelSpec, actor: ActorConfig) -> AdapterExport:
    """Return the export of the adapter of ``parts``, which ``build_model`` has made."""
    assert actor.lora is not None
    layout = Layout.of(actor.parallel)  # adapted layers are of the local spec
    return AdapterExport(parts, spec, layout, actor.lora, torch.distributed.get_rank())


def named_shards(part: torch.nn.Module) -> Mapping[str, Tensor]:
    """Return this rank's shards of one part of the model, by the names that the bridge uses.

    They are the parameters, with adapters merged into their weights, and the bias that decides which experts
    are chosen.
    """
    biases = {name: tensor for name, tensor in part.named_buffers() if name.endswith("router.expert_bias")}
    return lora.MergedShards(part, dict(part.named_parameters()) | biases)
