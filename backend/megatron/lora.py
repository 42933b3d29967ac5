"""Low-rank adapters on Megatron's linear layers (LoRA, arXiv:2106.09685).

    y = W x + alpha / rank * B (A x)        W [outputs, inputs], A [rank, inputs], B [outputs, rank]

W is frozen. An adapted layer keeps its place and the name of its weight, and gets ``lora_a`` and ``lora_b``.
The factor on the side along which W is split over tensor-parallel ranks is split with it; the other factor is
whole on each of them:

    column parallel   A whole, B by rows      Ranks exchange [T, rank]: gathered or summed as the base layer
    row parallel      A by columns, B whole   does with its much wider inputs or outputs

Experts exchange nothing inside of their layers, because the token dispatcher does: there the gradient of the
whole factor is summed instead.

``MergedShards`` are the weights W + alpha / rank * B A of a model without adapters. The factors themselves
leave the trainer under their own names (``bridge.shards.adapter``).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import sqrt
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
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

from slipstream.backend.megatron.groups import ShardingMetadata
from slipstream.backend.megatron.local_layers import DownProjection, copied_to_ranks
from slipstream.backend.megatron.marks import marks_of
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.peft import PeftFolder, write_peft
from slipstream.bridge.model.layout import Layout, Shard
from slipstream.bridge.model.mapping import Split, copy_in
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.adapter import (
    AdapterSpec,
    adapter_spec,
    check_peft,
    factor_splits,
    is_adapted,
    linear_layer,
    modules_of,
    peft_config_of,
)
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.factors import peft_tensors, read_factors
from slipstream.bridge.shards.plan import entries, entries_of, make_plan, pieces_of
from slipstream.configs.schema import LoraConfig


def adapt(
    parts: Sequence[GPTModel], spec: ModelSpec, layout: Layout, rank: int, lora: LoraConfig, seed: int
) -> None:
    """Freeze ``parts``, this rank's parts of the model, and add the adapter of ``lora.path``, or a new one.

    The product of a new one is 0. A layer's A is drawn from the seed and the layer's name in HF, so it is the
    same in every layout. Raises ValueError if the model has no layer of a name in ``lora.targets``, and
    PeftError if the adapter does not fit.
    """
    layers = {
        layer for entry in entries(spec, layout) if (layer := linear_layer(entry.parameter)) is not None
    }
    targets: set[str] = set(lora.targets or layers)
    if missing := targets - layers:
        raise ValueError(
            f"actor.lora.targets has {', '.join(sorted(missing))}; the linear layers of {spec.path} are "
            f"{', '.join(sorted(layers))}"
        )
    for part in parts:
        part.requires_grad_(False)
        if part.pre_process and part.config.recompute_granularity:
            # A recomputed layer gets a gradient only if its input requires one.
            part.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    with nullcontext() if lora.path is None else PeftFolder(lora.path) as folder:
        if folder is not None:
            check_peft(folder, adapter_of(spec, lora))
        for entry, shard in entries_of(spec, layout, rank):
            if is_adapted(entry.parameter, targets):
                module = parts[entry.chunk].get_submodule(entry.parameter.removesuffix(".weight"))
                a = _drawn(lora.rank, entry.hf_shapes[0][1], f"{seed} {entry.hf_names[0]}")
                b = None
                if folder is not None:
                    rows = [rows for rows, _ in entry.hf_shapes]
                    a, b = read_factors(folder, modules_of(entry.hf_names), rows, a, lora.alpha / lora.rank)
                _add(module, entry.split, shard, a, b, lora.alpha / lora.rank)


def adapter_of(spec: ModelSpec, lora: LoraConfig) -> AdapterSpec:
    """Return the adapter of a recipe as the bridge sees it."""
    return adapter_spec(spec, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def factors(part: torch.nn.Module) -> dict[str, Tensor]:
    """Return this rank's factors of one part of the model, by their names in it."""
    return {
        f"{name}.{factor}": getattr(module, factor)
        for name, module in part.named_modules()
        if isinstance(module, _Adapted)
        for factor in ("lora_a", "lora_b")
    }


class MergedShards(Mapping[str, Tensor]):
    """Shards by their names in the model without adapters.

    Adapted weights are merged at each access, so that no second copy of the model exists.
    """

    def __init__(self, part: torch.nn.Module, shards: Mapping[str, Tensor]) -> None:
        self._adapted = {
            f"{name}.weight": module for name, module in part.named_modules() if isinstance(module, _Adapted)
        }
        factors = {
            f"{name.removesuffix('weight')}lora_{factor}" for name in self._adapted for factor in ("a", "b")
        }
        self._shards = {name: shard for name, shard in shards.items() if name not in factors}

    def __getitem__(self, name: str) -> Tensor:
        adapted = self._adapted.get(name)
        return self._shards[name] if adapted is None else adapted.merged()

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _drawn(rank: int, inputs: int, name: str) -> Tensor:
    """Draw A as peft and torch.nn.Linear do: kaiming_uniform with a = sqrt(5)."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    bound = 1 / sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def _add(
    module: torch.nn.Module, split: Split, shard: Shard, a: Tensor, b: Sequence[Tensor] | None, scale: float
) -> None:
    """Turn ``module`` into its adapted kind in place: names and state of the base layer must stay.

    ``a`` is whole, and so is ``b``, in parts by HF module; None: B is 0. The module gets its shards of them.
    """
    kind = _ADAPTED.get(type(module))
    if kind is None:
        raise ValueError(
            f"there are no adapters for a {type(module).__name__}, only for "
            f"{', '.join(base.__name__ for base in _ADAPTED)}: leave it out of actor.lora.targets"
        )
    module.__class__ = kind
    adapted = cast("_Adapted", module)
    weight = adapted.weight
    a_split, b_split = factor_splits(split, len(a))
    adapted.lora_scale = scale
    adapted.lora_a = Parameter(weight.new_empty(a_split.shard_shape(shard.size)))
    copy_in(adapted.lora_a, [a], pieces_of(a_split, shard))
    adapted.lora_b = Parameter(weight.new_zeros(b_split.shard_shape(shard.size)))
    if b is not None:
        copy_in(adapted.lora_b, b, pieces_of(b_split, shard))
    for factor in (adapted.lora_a, adapted.lora_b):
        marks_of(factor).allreduce = getattr(weight, "allreduce", True)  # False for an expert
    adapted.mark_factors()


class _Adapted:
    weight: Parameter
    lora_a: Parameter
    lora_b: Parameter
    lora_scale: float

    def merged(self) -> Tensor:
        """Return the weight that equals layer and adapter: computed in single precision, rounded once."""
        with torch.no_grad():
            product = (self.weight.float(), self.lora_b.float(), self.lora_a.float())
            return torch.addmm(*product, alpha=self.lora_scale).to(self.weight.dtype)

    def mark_factors(self) -> None:
        """Set the attributes of the factors by which Megatron reduces and counts their gradients."""
        raise NotImplementedError


class _AdaptedParallel(_Adapted):
    """An adapted layer with one factor split over the ranks of ``tp_group``."""

    split: Literal["lora_a", "lora_b"]
    whole: Literal["lora_a", "lora_b"]
    axis: int
    """Axis along which ``split`` is split."""

    # Attributes of Megatron's parallel layers.
    is_expert: bool
    sequence_parallel: bool
    explicit_expert_comm: bool
    tp_group: dist.ProcessGroup

    def mark_factors(self) -> None:
        split, whole = self._factor(self.split), self._factor(self.whole)
        set_tensor_model_parallel_attributes(split, True, self.axis, 1)
        # Different ranks of the model's tensor-parallel group may hold different experts.
        counted = self.is_expert and self.tp_group.rank() == 0
        set_tensor_model_parallel_attributes(whole, counted, -1, 1)
        summed = self.sequence_parallel and not self.is_expert and not self._without_communication
        marks_of(whole).sequence_parallel = summed

    def _factor(self, name: Literal["lora_a", "lora_b"]) -> Parameter:
        return self.lora_a if name == "lora_a" else self.lora_b

    @property
    def _without_communication(self) -> bool:
        """True if the caller communicates around this layer, which then does not."""
        return self.explicit_expert_comm

    def _with_split_factor(
        self,
        state: dict[str, object],
        prefix: str,
        offsets: tuple[object, ...],
        metadata: ShardingMetadata | None,
    ) -> dict[str, object]:
        """Return the sharded state dict of the base layer with the split factor as a shard of the whole."""
        assert metadata is not None
        key = f"{prefix}{self.split}"
        sharded = make_tp_sharded_tensor_for_checkpoint(
            self._factor(self.split),
            key,
            self.axis,
            prepend_offsets=offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if key.endswith("linear_fc1.lora_b"):  # each rank has its rows of gate above those of up
            sharded = apply_swiglu_sharded_factory(sharded, offsets)
        return state | {key: sharded}


class _AdaptedColumn(_AdaptedParallel, ColumnParallelLinear):
    split, whole, axis = "lora_b", "lora_a", 0

    def forward(self, input_: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor | None]:
        base_forward = cast("Callable[..., tuple[Tensor, Tensor | None]]", super().forward)
        output, bias = base_forward(input_, *args, **options)
        if self._without_communication:
            inner = F.linear(input_, copied_to_ranks(self.lora_a, self.tp_group))
        elif self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(F.linear(input_, self.lora_a), group=self.tp_group)
        else:
            inner = copied_to_ranks(F.linear(input_, self.lora_a), self.tp_group)
        return output + F.linear(self.lora_scale * inner, self.lora_b), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[object, ...] = (),
        metadata: ShardingMetadata | None = None,
    ) -> dict[str, object]:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self._with_split_factor(state, prefix, sharded_offsets, metadata)


class _AdaptedRow(_AdaptedParallel, RowParallelLinear):
    split, whole, axis = "lora_a", "lora_b", 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        inner, b = F.linear(input_, self.lora_a), self.lora_b
        if self._without_communication:
            b = copied_to_ranks(b, self.tp_group)
        elif self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + F.linear(self.lora_scale * inner, b), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[object, ...] = (),
        metadata: ShardingMetadata | None = None,
    ) -> dict[str, object]:
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return self._with_split_factor(state, prefix, sharded_offsets, metadata)


class _AdaptedDown(_Adapted, DownProjection):
    """A layer that is whole on every tensor-parallel rank, as are both factors."""

    def mark_factors(self) -> None:
        for factor in (self.lora_a, self.lora_b):
            marks_of(factor).sequence_parallel = marks_of(self.weight).sequence_parallel

    def project(self, hidden: Tensor) -> Tensor:
        inner = self.lora_scale * F.linear(hidden, self.lora_a)
        return super().project(hidden) + F.linear(inner, self.lora_b)


_ADAPTED: dict[type[torch.nn.Module], type[_AdaptedColumn | _AdaptedRow | _AdaptedDown]] = {
    ColumnParallelLinear: _AdaptedColumn,
    RowParallelLinear: _AdaptedRow,
    DownProjection: _AdaptedDown,
}


BUCKET_BYTES = 2**28


class AdapterExport:
    """Exports the adapter of this rank's parts of a model, as often as it is asked to. Collective."""

    def __init__(
        self, parts: Sequence[GPTModel], spec: ModelSpec, layout: Layout, lora: LoraConfig, rank: int
    ) -> None:
        """``layout``: that of the ranks, with the local layer spec, of which adapted layers are."""
        self.adapter = adapter_of(spec, lora)
        self.parameters: Sequence[Mapping[str, Tensor]] = [factors(part) for part in parts]
        self._base = spec.path
        self._rank = rank
        itemsize = next(iter(self.parameters[0].values())).itemsize
        self._plan = make_plan(self.adapter.factors, layout, BUCKET_BYTES, itemsize)

    def buckets(self) -> Iterator[FlatBucket | None]:
        """Yield the factors as ``bridge.shards.export`` does."""
        return export(self._plan, self.parameters, self._rank)

    def write(self, folder: Path) -> None:
        """Write the adapter in PEFT's format. The sender writes."""
        tensors = peft_tensors(self.buckets(), self.adapter)
        if tensors:
            write_peft(tensors, peft_config_of(self.adapter, str(self._base)), folder)
