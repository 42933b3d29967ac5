"""Modules that Megatron's local layer spec lacks. Plain PyTorch, so they run on CPUs and GPUs alike.

They are packed attention, norms that support sequence parallelism, a norm over all heads, and the down
projections of latent attention.
"""

from functools import partial
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.backend.batch.prefixes import MASK_PAIRS
from slipstream.backend.megatron.device_batch import Branches, Pack, Unpacked
from slipstream.backend.megatron.groups import ShardingMetadata, groups
from slipstream.backend.megatron.marks import marks_of
from slipstream.backend.megatron.tree_attention import PrefixTree, attend

WINDOW_CHUNK = 128
"""Queries that attend to their window together, if the window has fewer tokens."""


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. Under sequence parallelism each rank norms its own tokens; the gradients of the
    weight are then summed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self._is_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        marks_of(self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        if self._is_centered:  # in single precision, where adding 1 to a small weight loses nothing
            weight = 1 + self.weight.float()
            return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).type_as(hidden)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    """Norm that subtracts the mean, with a bias; otherwise as ``RMSNorm``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self._is_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            marks_of(parameter).sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        weight = 1 + self.weight if self._is_centered else self.weight
        return F.layer_norm(hidden, weight.shape, weight, self.bias, self.eps)


class JointHeadsNorm(torch.nn.Module):
    """Root-mean-square norm over the queries, or keys, of all heads together.

    A tensor-parallel rank holds some of the heads and their part of the weight, so the mean of the squares is
    computed over the ranks. Megatron makes queries and keys for all tokens on every rank, whatever
    sequence parallelism does outside of attention.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int, **_: object
    ) -> None:
        """``hidden_size``: dimensions of a head. ``heads``: number of heads of all ranks."""
        super().__init__()
        self.eps, self.size = eps, heads * hidden_size
        of_rank = self.size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(of_rank, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads_: Tensor) -> Tensor:
        """[..., heads of the rank, d] -> the same."""
        flat = heads_.flatten(-2).float()
        squares = cast("Tensor", reduce_from_tensor_model_parallel_region(flat.square().sum(-1, True)))
        # Each rank uses the sum for its own heads, so the sum's gradients are summed as well.
        normed = flat * torch.rsqrt(copied_to_ranks(squares) / self.size + self.eps)
        return (self.weight * normed.type_as(heads_)).view_as(heads_)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: ShardingMetadata | None = None,
    ) -> dict[str, object]:
        """Return the weight as a shard; Megatron takes weights of unknown modules for whole ones."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=groups.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


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


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the number of tokens that a token of a layer attends to; None: all before it."""
    size, layers = config.window_size, config.window_attn_skip_freq
    if size is None or (layers is not None and not is_layer_window_attention(size, layers, layer_number)):
        return None
    return size[0] + 1  # Megatron does not count the token itself


class PackedAttention(MegatronModule):
    """Causal attention within each segment of a pack (THD), by scaled_dot_product_attention.

    Segments of similar length form one padded batch; the causal mask hides padding on the right. Segments
    that take tokens attend to these as well. Megatron's ``window_size`` limits the tokens that a token
    attends to, and a learnable ``softmax_type`` adds a sink to each head: a logit that takes part in the
    softmax and has no value.
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
        self.layer_number = layer_number
        self.window = _window(config, layer_number)
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

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
        pack = packed_seq_params
        if not isinstance(pack, Pack) or pack.unpacked is None:
            raise ValueError("PackedAttention takes packs that are made for the local layer spec only")
        unpacked = pack.unpacked
        if query.is_cuda and self._needs_mask(unpacked):
            mask = unpacked.tree.block_mask(self.window)
            return attend(query, key, value, mask, scale=self._scale(query), sinks=self.softmax_offset)
        masks = self.masks(pack, unpacked)
        attended: list[Tensor] = []
        for q, k, v, mask in zip(*map(unpacked.padded, (query, key, value)), masks, strict=True):
            output = self._attend_whole(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
            attended.append(output.transpose(1, 2).flatten(0, 1))
        attended += [
            self._attend_branches(branches, unpacked.tree, query, key, value)
            for branches in unpacked.branches
        ]
        return torch.cat(attended).index_select(0, unpacked.restore_T).flatten(1)

    def _needs_mask(self, unpacked: Unpacked) -> bool:
        """Return whether a causal kernel is not enough."""
        longest = max((length for _, length in unpacked.shapes), default=0)
        return bool(unpacked.branches) or (self.window is not None and longest > self.window)

    def _scale(self, query: Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def _attend_branches(
        self, branches: Branches, tree: PrefixTree, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return the results of the segments' own tokens, [N * L, heads, d].

        Taken keys are repeated for each segment. They are gathered again in the backward pass, because kept
        for all layers they would take the memory of the pack without sharing. Queries come in blocks, because
        the mask of all of them would grow with the square of their number.
        """

        def attended(query: Tensor, key: Tensor, value: Tensor, first: int, end: int) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in branches.padded(query, key, value, first, end))
            return self._attend(q, k, v, branches.mask(tree, self.window, first, end)).transpose(1, 2)

        blocks = branches.blocks(MASK_PAIRS)
        run = attended
        if torch.is_grad_enabled() and (self.config.recompute_granularity is None or len(blocks) > 1):
            run = partial(checkpoint, attended, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([run(query, key, value, *block) for block in blocks], dim=1).flatten(0, 1)

    def masks(self, pack: Pack, unpacked: Unpacked) -> list[Tensor | None]:
        """Return for each padded batch what its queries attend to, bool [..., L, L].

        None: they attend to all keys up to their own, within the window of the layer.
        """
        return [None] * len(unpacked.shapes)

    def _attend_whole(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the results of whole segments, as ``_attend``.

        In a layer with a window, chunks of queries attend to their own chunk of keys and to the one before
        it. A mask of all pairs would grow with the square of the length.
        """
        length, window = query.shape[2], self.window
        if mask is not None or window is None or length <= window:
            return self._attend(query, key, value, mask)
        size = max(window, WINDOW_CHUNK)
        most = min(length, 2 * size)
        within = torch.ones(most, most, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        if length == most:
            return self._attend(query, key, value, within)
        chunks = -(-length // size)
        first = self._attend(query[:, :, :size], key[:, :, :size], value[:, :, :size], within[:size, :size])
        q, k, v = (
            F.pad(part, (0, 0, 0, chunks * size - length)).unflatten(2, (chunks, size))
            for part in (query, key, value)
        )
        k, v = (torch.cat([part[:, :, :-1], part[:, :, 1:]], dim=3) for part in (k, v))
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q[:, :, 1:], k, v))
        later = self._attend(q, k, v, within[size:]).unflatten(0, (-1, chunks - 1))
        return torch.cat([first, later.transpose(1, 2).flatten(2, 3)[:, :, : length - size]], dim=2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """query [N, heads, L, d], key and value [N, groups, K, d], mask [..., L, K] -> [N, heads, L, d]."""
        scale = self._scale(query)
        if self.softmax_offset is not None:
            # A sink is a key before all others, whose product with any query is the head's logit, and whose
            # value is zero: one more dimension holds the logit in the queries and 1 in that key. A query
            # before all others keeps the mask causal. No kernel has to know of sinks.
            logit = (self.softmax_offset / scale)[:, None, None]
            rows = (query.shape[0], -1, query.shape[2] + 1, 1)
            query = torch.cat([F.pad(query, (0, 0, 1, 0)), logit.expand(rows)], dim=-1)
            key, value = F.pad(key, (0, 1, 1, 0)), F.pad(value, (0, 1, 1, 0))
            key[:, :, 0, -1] = 1
            mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output if self.softmax_offset is None else output[:, :, 1:, :-1]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: ShardingMetadata | None = None,
    ) -> dict[str, object]:
        """Return the sinks as a shard; Megatron takes the parameters of unknown modules for whole ones."""
        if self.softmax_offset is None:
            return {}
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=groups.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
