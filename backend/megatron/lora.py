"""Low-rank adapters on Megatron's linear layers (LoRA, arXiv:2106.09685).

    y = W x + alpha / rank * B (A x)        W [outputs, inputs], A [rank, inputs], B [outputs, rank]

W is frozen. An adapted layer keeps its place and the name of its weight, and gets ``lora_a`` and ``lora_b``.
Of the two, the one on the side along which W is split over tensor-parallel ranks is split with it, and the
other one is whole on each of them:

    column parallel   A whole, B by rows      [T, rank] is what ranks exchange: gathered or summed as the base
    row parallel      A by columns, B whole   layer does it with its much wider inputs or outputs

Experts exchange nothing inside of their layers, because the token dispatcher does: there the gradient of the
whole one is summed instead.

What leaves the trainer is W + alpha / rank * B A (``MergedShards``): neither the bridge nor the engines know
of adapters.
"""

import hashlib
from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from slipstream.backend.megatron.local_layers import DownProjection, copied_to_ranks
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import Columns
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries, entries_of
from slipstream.configs.schema import LoraConfig


def adapt(
    parts: list[torch.nn.Module], spec: ModelSpec, layout: Layout, rank: int, lora: LoraConfig, seed: int
) -> None:
    """Freeze ``parts``, this rank's of the model, and add adapters to them, which change nothing yet.

    A layer's A is drawn from the seed and the layer's name in HF, and so is the same in every layout.
    Raises ValueError when the model has no layer of a name in ``lora.targets``.
    """
    has = {_layer(entry.parameter) for entry in entries(spec, layout)} - {None}
    if missing := set(lora.targets or ()) - has:
        raise ValueError(
            f"actor.lora.targets has {', '.join(sorted(missing))}; the linear layers of {spec.path} are "
            f"{', '.join(sorted(has))}"
        )
    for part in parts:
        part.requires_grad_(False)
        if part.pre_process and part.config.recompute_granularity:
            # What is recomputed gets a gradient only if its input asks for one.
            part.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    for entry, shard in entries_of(spec, layout, rank):
        if _layer(entry.parameter) in (lora.targets or has):
            module = parts[entry.chunk].get_submodule(entry.parameter.removesuffix(".weight"))
            a = _drawn(lora.rank, entry.hf_shapes[0][1], f"{seed} {entry.hf_names[0]}")
            if isinstance(entry.split, Columns):
                start, stop = shard.range_of(a.shape[1], "inputs")
                a = a[:, start:stop]
            _add(module, a, lora.alpha / lora.rank)


class MergedShards(Mapping[str, Tensor]):
    """Shards by the names of the model without adapters. Adapted weights are merged each time they are
    asked for, so that no second copy of the model exists.
    """

    def __init__(self, part: torch.nn.Module, shards: Mapping[str, Tensor]) -> None:
        self._adapted = {
            f"{name}.weight": module for name, module in part.named_modules() if isinstance(module, _Adapted)
        }
        own = {f"{name.removesuffix('weight')}lora_{which}" for name in self._adapted for which in ("a", "b")}
        self._shards = {name: shard for name, shard in shards.items() if name not in own}

    def __getitem__(self, name: str) -> Tensor:
        adapted = self._adapted.get(name)
        return self._shards[name] if adapted is None else adapted.merged()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _layer(parameter: str) -> str | None:
    """``linear_fc1`` for its weight; None when it is not that of a linear layer of the decoder.

    >>> _layer("decoder.layers.0.mlp.linear_fc1.weight")
    'linear_fc1'
    """
    module, _, kind = parameter.rpartition(".")
    layer = module.rpartition(".")[2]
    return layer if kind == "weight" and layer.startswith("linear_") else None


def _drawn(rank: int, inputs: int, name: str) -> Tensor:
    """As peft and torch.nn.Linear do it: kaiming_uniform with a = sqrt(5)."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    bound = 1 / sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


def _add(module: torch.nn.Module, a: Tensor, scale: float) -> None:
    kind = _ADAPTED.get(type(module))
    if kind is None:
        raise ValueError(
            f"there are no adapters for a {type(module).__name__}, but for "
            f"{', '.join(base.__name__ for base in _ADAPTED)}: leave it out of actor.lora.targets"
        )
    module.__class__ = kind  # in place, as the names and the state of the base layer are to stay
    weight = module.weight
    module.lora_scale = scale
    module.lora_a = Parameter(a.to(weight).contiguous())
    module.lora_b = Parameter(weight.new_zeros(weight.shape[0], len(a)))
    for parameter in (module.lora_a, module.lora_b):
        parameter.allreduce = getattr(weight, "allreduce", True)  # False: it is one of an expert's
    module.tell_megatron()


class _Adapted:
    weight: Parameter
    lora_a: Parameter
    lora_b: Parameter
    lora_scale: float

    def merged(self) -> Tensor:
        """The weight to use without the adapter: computed in single precision, rounded once."""
        with torch.no_grad():
            product = (self.weight.float(), self.lora_b.float(), self.lora_a.float())
            return torch.addmm(*product, alpha=self.lora_scale).to(self.weight.dtype)


class _AdaptedParallel(_Adapted):
    """One of the two factors is split over the ranks of ``tp_group``."""

    split: str
    whole: str
    axis: int
    """Along which ``split`` is."""

    def tell_megatron(self) -> None:
        """Which gradients are to be summed over tensor-parallel ranks, and counted in their norm once."""
        whole = getattr(self, self.whole)
        set_tensor_model_parallel_attributes(getattr(self, self.split), True, self.axis, 1)
        # Different ranks of the model's tensor-parallel group may hold different experts.
        counted = self.is_expert and self.tp_group.rank() == 0
        set_tensor_model_parallel_attributes(whole, counted, -1, 1)
        whole.sequence_parallel = self.sequence_parallel and not self.is_expert and not self._alone

    @property
    def _alone(self) -> bool:
        """The caller does the communication around this layer, which does none."""
        return self.explicit_expert_comm

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        key = f"{prefix}{self.split}"
        found[key] = make_tp_sharded_tensor_for_checkpoint(
            getattr(self, self.split),
            key,
            self.axis,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if key.endswith("linear_fc1.lora_b"):  # each rank has its rows of gate over those of up
            found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets)
        return found


class _AdaptedColumn(_AdaptedParallel, ColumnParallelLinear):
    split, whole, axis = "lora_b", "lora_a", 0

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **options)
        if self._alone:
            inner = F.linear(input_, copied_to_ranks(self.lora_a, self.tp_group))
        elif self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(F.linear(input_, self.lora_a), group=self.tp_group)
        else:
            inner = copied_to_ranks(F.linear(input_, self.lora_a), self.tp_group)
        return output + F.linear(self.lora_scale * inner, self.lora_b), bias


class _AdaptedRow(_AdaptedParallel, RowParallelLinear):
    split, whole, axis = "lora_a", "lora_b", 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        inner, b = F.linear(input_, self.lora_a), self.lora_b
        if self._alone:
            b = copied_to_ranks(b, self.tp_group)
        elif self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + F.linear(self.lora_scale * inner, b), bias


class _AdaptedDown(_Adapted, DownProjection):
    """Whole on every tensor-parallel rank, and so are both factors."""

    def tell_megatron(self) -> None:
        for parameter in (self.lora_a, self.lora_b):
            parameter.sequence_parallel = self.weight.sequence_parallel

    def project(self, hidden: Tensor) -> Tensor:
        inner = self.lora_scale * F.linear(hidden, self.lora_a)
        return super().project(hidden) + F.linear(inner, self.lora_b)


_ADAPTED: dict[type[torch.nn.Module], type[_Adapted]] = {
    ColumnParallelLinear: _AdaptedColumn,
    RowParallelLinear: _AdaptedRow,
    DownProjection: _AdaptedDown,
}
