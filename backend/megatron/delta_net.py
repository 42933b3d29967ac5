"""Linear attention with a gated delta rule (Yang et al., arXiv:2412.06464) within the segments of a pack.

Megatron's own module has these parameters under the same names, but it cannot be built without the package
flash-linear-attention, and in Megatron-Core 0.16 it takes no packs. This one is plain PyTorch, so it runs on
CPUs and GPUs alike.

Shapes: T tokens of a pack; N segments, padded to L tokens; H value heads of the rank; K dimensions of a key
and V of a value; C tokens of a chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from slipstream.backend.megatron.device_batch import Pack
from slipstream.backend.megatron.local_layers import copied_to_ranks
from slipstream.bridge.model.geometry import DeltaNet

CHUNK = 64
"""Tokens that the rule processes at a time."""

_EPSILON = 1e-6
"""Added to the squared length of queries and keys, as in transformers and flash-linear-attention."""


@dataclass
class DeltaNetSubmodules:
    """The linear layers of ``PackedDeltaNet``, which differ between Megatron's layer specs."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class PackedDeltaNet(MegatronModule):
    """A layer of linear attention. Tensor-parallel ranks share its key heads, each with its value heads."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        *,
        delta: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("linear attention has no context parallelism: set actor.parallel.context to 1")
        self._group = cast("dist.ProcessGroup", pg_collection.tp)
        ranks = self._group.size()
        self._delta = delta
        self._keys, self._values = delta.keys // ranks, delta.values // ranks
        self._heads = delta.value_heads // ranks
        linear = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "is_expert": False,
            "tp_group": self._group,
        }
        self.in_proj = cast(
            "ColumnParallelLinear",
            build_module(
                submodules.in_proj,
                config.hidden_size,
                2 * (delta.keys + delta.values + delta.value_heads),
                gather_output=False,
                skip_bias_add=False,
                tp_comm_buffer_name="fc1",
                **linear,
            ),
        )
        self.out_proj = cast(
            "RowParallelLinear",
            build_module(
                submodules.out_proj,
                delta.values,
                config.hidden_size,
                input_is_parallel=True,
                skip_bias_add=True,
                tp_comm_buffer_name="fc2",
                **linear,
            ),
        )
        channels = 2 * self._keys + self._values
        self.conv1d = torch.nn.Conv1d(channels, channels, delta.kernel, groups=channels, bias=False)
        self.dt_bias = torch.nn.Parameter(torch.empty(self._heads))
        self.A_log = torch.nn.Parameter(torch.empty(self._heads))
        self.out_norm = _GatedNorm(delta.value_dim, config.layernorm_epsilon)
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, hidden] -> the same, and no bias. Under sequence parallelism a rank has a part of T."""
        unpacked = packed_seq_params.unpacked if isinstance(packed_seq_params, Pack) else None
        if unpacked is None:
            raise ValueError("PackedDeltaNet takes packs with the way to padded segments only")
        projected = self.in_proj(hidden_states)[0][:, 0]
        mixed_T, gate_T, beta_T, alpha_T = projected.split(
            [2 * self._keys + self._values, self._values, self._heads, self._heads], dim=-1
        )
        decay_T = -self.A_log.exp() * F.softplus(alpha_T.float() + self.dt_bias)
        parts = (mixed_T, beta_T.sigmoid(), decay_T)
        sizes = [rows * width for rows, width in unpacked.shapes]
        by_class = zip(
            unpacked.shapes,
            *(part.index_select(0, unpacked.gather).split(sizes) for part in parts),
            strict=True,
        )
        results: list[Tensor] = []
        for shape, *padded in by_class:
            # Padding is on the right, where it affects nothing before it.
            mixed, beta, decay = (part.unflatten(0, shape) for part in padded)
            results.append(self._attend(mixed, beta, decay).flatten(0, 1))
        core_THV = torch.cat(results).index_select(0, unpacked.restore_T)
        normed_THV = self.out_norm(core_THV, gate_T.unflatten(-1, (self._heads, -1)))
        return self.out_proj(normed_THV.flatten(1)[:, None])

    def _attend(self, mixed: Tensor, beta_NLH: Tensor, decay_NLH: Tensor) -> Tensor:
        """Return [N, L, H, V] from queries, keys and values in ``mixed`` [N, L, channels]."""
        delta = self._delta
        before = F.pad(mixed.transpose(1, 2), (delta.kernel - 1, 0))
        mixed = F.silu(self.conv1d(before)).transpose(1, 2)
        query, key, value = mixed.split([self._keys, self._keys, self._values], dim=-1)
        repeats = delta.value_heads // delta.key_heads
        query_NLHK, key_NLHK = (
            _unit(part.unflatten(-1, (-1, delta.key_dim))).repeat_interleave(repeats, dim=2)
            for part in (query, key)
        )
        value_NLHV = value.unflatten(-1, (-1, delta.value_dim))
        return gated_delta_rule(query_NLHK, key_NLHK, value_NLHV, beta_NLH, decay_NLH)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the parameters as Megatron's own module stores them, so that any layout can load them.

        A rank's rows of the projection and of the convolution are queries, then keys and so on. In the files
        each of these sections is a tensor of its own.
        """
        assert metadata is not None
        groups = {"tp_group": self._group, "dp_cp_group": metadata["dp_cp_group"]}

        def split(tensors: dict[str, object], where: str) -> dict[str, object]:
            """Return tensors that are split over the ranks along their first dimension."""
            axes = dict.fromkeys(tensors, 0)
            return make_sharded_tensors_for_checkpoint(tensors, where, axes, sharded_offsets, **groups)

        state = split({"A_log": self.A_log, "dt_bias": self.dt_bias}, prefix)
        state |= split({"weight": self.conv1d.weight}, f"{prefix}conv1d.")
        norm = {"weight": self.out_norm.weight}
        state |= make_sharded_tensors_for_checkpoint(
            norm, f"{prefix}out_norm.", {}, sharded_offsets, **groups
        )
        state |= self.in_proj.sharded_state_dict(f"{prefix}in_proj.", sharded_offsets, metadata)
        state |= self.out_proj.sharded_state_dict(f"{prefix}out_proj.", sharded_offsets, metadata)
        convolved = {"query": self._keys, "key": self._keys, "value": self._values}
        projected = convolved | {"z": self._values, "beta": self._heads, "alpha": self._heads}
        for name, sections in {
            "conv1d.weight": convolved,
            "in_proj.weight": projected,
            "in_proj.lora_b": projected,
        }.items():
            tensor = state.get(f"{prefix}{name}")
            if isinstance(tensor, ShardedTensor):
                state[f"{prefix}{name}"] = _by_section(tensor, sections)
        return state


_Stored: TypeAlias = dict[str, object]
"""Tensors that a factory makes, as Megatron's annotation has them; a list will do as well."""


def _by_section(tensor: ShardedTensor, sections: Mapping[str, int]) -> ShardedTensorFactory:
    """Store sections of the rows of a shard, whose numbers of rows are given, as tensors of their own."""
    place, data = tensor.without_data(), tensor.data
    assert data is not None

    def build(key: str, data: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> _Stored:
        whole = replace(place, key=key, data=data, dtype=data.dtype, replica_id=replica_id)
        parts, start = list[ShardedTensor](), 0
        for name, rows in sections.items():
            parts += [replace(part, key=f"{key}.{name}") for part in whole.narrow(0, start, rows)]
            start += rows
        return cast("_Stored", parts)

    def merge(loaded: _Stored) -> Tensor:
        return torch.cat(cast("list[Tensor]", loaded))

    return ShardedTensorFactory(tensor.key, data, build, merge, tensor.replica_id)


class _GatedNorm(torch.nn.Module):
    """A norm of each head's output, multiplied by a gate. Its weight is never centered."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, core: Tensor, gate: Tensor) -> Tensor:
        # Each rank norms its own heads with the whole weight, so that the gradient is summed over ranks.
        weight = copied_to_ranks(self.weight)
        normed = F.rms_norm(core.float(), weight.shape, eps=self._epsilon).type_as(core)
        return (weight * normed * F.silu(gate.float())).type_as(core)


def gated_delta_rule(
    query_NLHK: Tensor,
    key_NLHK: Tensor,
    value_NLHV: Tensor,
    beta_NLH: Tensor,
    decay_NLH: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Return [N, L, H, V] of the values' dtype, computed in single precision or better.

    For every head, token by token, with queries and keys of length 1 and the logarithm ``decay`` of a factor:

        S = exp(decay) S;  S = S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)            S [K, V]

    This computes whole chunks of tokens at a time (section 3.3 of the paper): the updates of a chunk are the
    solution of a triangular system, which is linear in the state before the chunk.
    """
    length, dtype = query_NLHK.shape[1], value_NLHV.dtype
    chunk = min(chunk, length)
    missing = -length % chunk

    def chunked(part: Tensor) -> Tensor:
        """[N, L, H, ...] -> [N, H, chunks, C, ...], with zeros after the last token."""
        part = (part if dtype is torch.float64 else part.float()).transpose(1, 2)
        return F.pad(part, (0, 0) * (part.ndim - 3) + (0, missing)).unflatten(2, (-1, chunk))

    query, key, value, beta, decay = map(chunked, (query_NLHK, key_NLHK, value_NLHV, beta_NLH, decay_NLH))
    query = query * query.shape[-1] ** -0.5
    total = decay.cumsum(-1)
    between = _between(decay).exp()
    weighted = key * beta[..., None]
    system = (weighted @ key.transpose(-1, -2) * between).tril(-1)
    sides = torch.cat([value * beta[..., None], weighted * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    update, correction = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    scores = query @ key.transpose(-1, -2) * between
    decayed_query = query * total.exp()[..., None]
    decayed_key = key * between[..., -1, :, None]
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs: list[Tensor] = []
    for number in range(query.shape[2]):
        new = update[:, :, number] - correction[:, :, number] @ state
        outputs.append(decayed_query[:, :, number] @ state + scores[:, :, number] @ new)
        state = state * total[:, :, number, -1, None, None].exp()
        state = state + decayed_key[:, :, number].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2).to(dtype)


def _between(decay: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: the sum of ``decay`` over tokens j + 1 to i; minus infinity for i < j.

    A difference of sums from the first token on would lose the small decays that follow a large one.
    """
    tokens = decay.shape[-1]
    pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=decay.device)
    steps = decay[..., :, None].expand(*decay.shape, tokens).masked_fill(~pairs.tril(-1), 0.0)
    return steps.cumsum(-2).masked_fill(~pairs.tril(), -torch.inf)


def _unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPSILON)
