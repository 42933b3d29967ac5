"""Modules that Megatron's local layer spec lacks. Plain PyTorch, so they run on CPUs and GPUs alike.

They are packed attention, a norm that supports sequence parallelism, and the down projections of latent
attention.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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


def length_classes(cu_seqlens: list[int]) -> list[list[tuple[int, int]]]:
    """Return the segments of a pack as (start, end), grouped by powers of two of their length.

    Padding the segments of one class to the longest of them at most doubles their tokens.

    >>> length_classes([0, 3, 7, 20])
    [[(0, 3), (3, 7)], [(7, 20)]]
    """
    classes: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(cu_seqlens):
        if end > start:
            classes.setdefault(math.ceil(math.log2(end - start)), []).append((start, end))
    return list(classes.values())


@dataclass(frozen=True)
class _Unpacking:
    """Places of the tokens of one length class: N segments padded to L tokens."""

    gather_NL: Tensor
    """Index into the pack of every padded place; padding repeats the segment's last token."""
    inside_NL: Tensor
    """True if the place is a token of the segment."""


class _Unpackings(NamedTuple):
    classes: list[_Unpacking]
    order: Tensor
    """Order that restores the pack from the tokens of the classes."""


class _WithUnpackings(Protocol):
    slipstream_unpackings: _Unpackings


def _unpackings(packed: PackedSeqParams) -> _Unpackings:
    """Return the length classes of a pack. They are kept on the pack itself: every layer needs the same."""
    known: _Unpackings | None = getattr(packed, "slipstream_unpackings", None)
    if known is None:
        classes: list[_Unpacking] = []
        for segments in length_classes(packed.cu_seqlens_q.tolist()):
            starts, ends = torch.tensor(segments, device=packed.cu_seqlens_q.device).unbind(1)
            steps = torch.arange(int((ends - starts).max()), device=starts.device)
            place_NL = starts[:, None] + steps
            inside_NL = place_NL < ends[:, None]
            classes.append(_Unpacking(torch.minimum(place_NL, ends[:, None] - 1), inside_NL))
        order = torch.cat([u.gather_NL[u.inside_NL] for u in classes]).argsort()
        known = cast("_WithUnpackings", packed).slipstream_unpackings = _Unpackings(classes, order)
    return known


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
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only")
        grouped = query.shape[1] != key.shape[1]
        unpackings = _unpackings(packed_seq_params)
        attended: list[Tensor] = []
        for unpacking in unpackings.classes:
            shape = unpacking.gather_NL.shape
            flat = unpacking.gather_NL.flatten()
            # index_select, because the backward pass of fancy indexing is serial on a CPU
            q, k, v = (
                part.index_select(0, flat).unflatten(0, shape).transpose(1, 2) for part in (query, key, value)
            )
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
            )
            attended.append(output.transpose(1, 2)[unpacking.inside_NL])
        return torch.cat(attended).index_select(0, unpackings.order).flatten(1)
