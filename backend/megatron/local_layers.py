"""Modules that Megatron's local layer spec lacks. Plain PyTorch, so they run on CPUs and GPUs alike.

They are packed attention, a norm that supports sequence parallelism, and the down projections of latent
attention.
"""

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slipstream.backend.megatron.device_batch import Pack
from slipstream.backend.megatron.marks import marks_of


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. Under sequence parallelism each rank norms its own tokens; the gradients of the
    weight are then summed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        marks_of(self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class DownProjection(torch.nn.Module):
    """A narrow projection of latent attention, whole on every tensor-parallel rank.

    Megatron's local layer spec splits it and gathers its output again. The last ``rotated`` outputs are
    shared by all heads, and the gather's backward pass would drop the gradients of the other ranks' heads.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, *, rotated: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism each rank projects its own tokens; the gradients are then summed.
        marks_of(self.weight).sequence_parallel = config.sequence_parallel
        self._rotated = 0 if config.sequence_parallel else rotated

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs], and no bias."""
        projected = self.project(hidden)
        if self._rotated:
            plain, rotated = projected.split([projected.shape[-1] - self._rotated, self._rotated], dim=-1)
            projected = torch.cat([plain, copied_to_ranks(rotated)], dim=-1)
        return projected, None

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def copied_to_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return ``tensor``, with its gradient summed over a tensor-parallel group; None: the model's group.

    Megatron sums the gradient in place, and loses the sum if the gradient is not contiguous.
    """
    copy = cast("Tensor", copy_to_tensor_model_parallel_region(tensor, group=group))
    if copy.requires_grad:
        copy.register_hook(Tensor.contiguous)
    return copy


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a pack (THD), by scaled_dot_product_attention.

    Segments of similar length form one padded batch; the causal mask hides padding on the right.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("the local layer spec has no context parallelism; use transformer_engine")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]."""
        unpacked = packed_seq_params.unpacked if isinstance(packed_seq_params, Pack) else None
        if unpacked is None:
            raise ValueError("PackedAttention takes packs that are made for the local layer spec only")
        grouped = query.shape[1] != key.shape[1]
        sizes = [rows * width for rows, width in unpacked.shapes]
        # index_select, because the backward pass of fancy indexing is serial on a CPU, and a selection by a
        # mask makes the host wait for a GPU
        by_class = zip(
            unpacked.shapes,
            *(part.index_select(0, unpacked.gather).split(sizes) for part in (query, key, value)),
            strict=True,
        )
        attended: list[Tensor] = []
        for shape, *padded in by_class:
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in padded)
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
            )
            attended.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(attended).index_select(0, unpacked.restore_T).flatten(1)
