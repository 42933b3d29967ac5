"""Modules for Megatron's local layer spec, which lacks them: packed attention, a norm that knows sequence
parallelism, the down projections of latent attention. Plain PyTorch, so they run on CPUs and GPUs alike.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Under sequence parallelism each rank norms its own tokens; the weight's gradient is then summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class DownProjection(torch.nn.Module):
    """A narrow projection of latent attention, whole on every tensor-parallel rank.

    Megatron's local layer spec splits it and gathers its output again. The ``rotated`` last outputs are every
    head's, and the gather's backward leaves out what the other ranks' heads have to say about them.
    """

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, *, rotated: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism each rank projects its own tokens; the gradient is then summed.
        self.weight.sequence_parallel = config.sequence_parallel
        self._rotated = 0 if config.sequence_parallel else rotated

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs], and no bias."""
        found = self.project(hidden)
        if self._rotated:
            plain, rotated = found.split([found.shape[-1] - self._rotated, self._rotated], dim=-1)
            found = torch.cat([plain, copied_to_ranks(rotated)], dim=-1)
        return found, None

    def project(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def copied_to_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """``tensor``, with its gradient summed over a tensor-parallel group; None: the model's.

    Megatron sums a gradient in place, and loses the sum of one that is not contiguous.
    """
    copy = copy_to_tensor_model_parallel_region(tensor, group=group)
    if copy.requires_grad:
        copy.register_hook(Tensor.contiguous)
    return copy


def length_classes(cu_seqlens: list[int]) -> list[list[tuple[int, int]]]:
    """The segments of a pack, as (start, end), by powers of two of their length.

    Segments of one class are padded to the longest of them: at most twice their tokens.

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
    """Where the tokens of one length class are, N segments padded to L tokens."""

    gather_NL: Tensor
    """Index into the pack of every padded place; padding repeats the segment's last token."""
    inside_NL: Tensor
    """True where the place is a token of the segment."""


def _unpackings(packed: PackedSeqParams) -> tuple[list[_Unpacking], Tensor]:
    """The length classes of a pack, and the order that restores the pack from their tokens.

    Kept on the pack itself: every layer asks for the same.
    """
    known = getattr(packed, "slipstream_unpackings", None)
    if known is None:
        found = []
        for segments in length_classes(packed.cu_seqlens_q.tolist()):
            starts, ends = torch.tensor(segments, device=packed.cu_seqlens_q.device).unbind(1)
            steps = torch.arange(int((ends - starts).max()), device=starts.device)
            place_NL = starts[:, None] + steps
            inside_NL = place_NL < ends[:, None]
            found.append(_Unpacking(torch.minimum(place_NL, ends[:, None] - 1), inside_NL))
        order = torch.cat([u.gather_NL[u.inside_NL] for u in found]).argsort()
        known = packed.slipstream_unpackings = (found, order)
    return known


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a pack (THD), by scaled_dot_product_attention.

    Segments of similar length are put into one padded batch; right padding cannot be seen by a causal mask.
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
        unpackings, order = _unpackings(packed_seq_params)
        attended = []
        for unpacking in unpackings:
            shape = unpacking.gather_NL.shape
            flat = unpacking.gather_NL.flatten()
            # index_select, because the backward of fancy indexing is serial on a CPU
            q, k, v = (
                part.index_select(0, flat).unflatten(0, shape).transpose(1, 2) for part in (query, key, value)
            )
            output = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
            )
            attended.append(output.transpose(1, 2)[unpacking.inside_NL])
        return torch.cat(attended).index_select(0, order).flatten(1)
