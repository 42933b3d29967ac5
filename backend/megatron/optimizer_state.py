"""Adam's state in the shape of the weights, whichever of Megatron's optimizers holds it.

The distributed optimizer gives each data-parallel rank a range of each flattened weight. Here such a range is
cut into rectangles of the weight, which are views of the rank's own state: nothing is gathered to save it,
and any layout and either kind of optimizer reads a checkpoint straight into place. (Megatron's own
``fully_reshardable`` format gathers the whole state on every data-parallel rank. It also mixes weights up if
tied embeddings meet pipeline stages, because it ignores the padding between gradient buckets.)
"""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from math import prod
from typing import NamedTuple, Protocol, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.nn import Parameter


class Rectangle(NamedTuple):
    """Rows ``row`` to ``row + rows`` and columns ``column`` to ``column + columns`` of a matrix."""

    row: int
    column: int
    rows: int
    columns: int


def rectangles(start: int, end: int, columns: int) -> Iterator[Rectangle]:
    """Split elements ``start`` to ``end`` of a row-major matrix of ``columns`` columns into rectangles.

    There are at most three, in the order of the elements: the rest of a row, whole rows, the start of a row.

    >>> [tuple(r) for r in rectangles(2, 11, columns=4)]
    [(0, 2, 1, 2), (1, 0, 1, 4), (2, 0, 1, 3)]
    """
    while start < end:
        row, column = divmod(start, columns)
        rows = (end - start) // columns if column == 0 else 0
        if rows:
            piece = Rectangle(row, 0, rows, columns)
        else:
            piece = Rectangle(row, column, 1, min(columns - column, end - start))
        yield piece
        start += piece.rows * piece.columns


class _Adam(Protocol):
    """The optimizer that Megatron wraps: torch's Adam or Transformer Engine's."""

    param_groups: list[dict[str, object]]
    state: dict[Tensor, dict[str, object]]


def allocate(optimizer: MegatronOptimizer) -> None:
    """Make the state that Adam makes at its first step, so that it can be saved or loaded."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _is_torch_adam(part):
            for state in _adam(part).state.values():
                state.setdefault("step", torch.tensor(0.0))


def updates(optimizer: MegatronOptimizer) -> int:
    """Return the number of updates Adam has made, by which it corrects its bias."""
    steps = [cast("Tensor | int", holder.get("step", 0)) for holder in _counters(optimizer)]
    return max(map(int, steps), default=0)


def set_updates(optimizer: MegatronOptimizer, count: int) -> None:
    """Set the number of updates that Adam has made."""
    for holder in _counters(optimizer):
        step = holder.get("step")
        if isinstance(step, Tensor):
            step.fill_(count)
        else:
            holder["step"] = count


def held(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return every tensor of the optimizer on this rank; some may be, or share memory with, the model's."""
    return [
        value
        for part in _parts(optimizer)
        for tensors in (
            *(_params(group) for group in _adam(part).param_groups),
            *(state.values() for state in _adam(part).state.values()),
        )
        for value in tensors
        if isinstance(value, Tensor)
    ]


def sharded_state(
    optimizer: MegatronOptimizer, model: Mapping[str, object]
) -> dict[str, list[ShardedTensor]]:
    """Return views of the moments and float32 main parameters, placed like the weights in ``model``.

    ``model`` is the model's sharded state dict; the names are those of Megatron's plain optimizers.
    """
    weights = {
        id(weight.data): (name, weight)
        for name, weight in model.items()
        if isinstance(weight, ShardedTensor | ShardedTensorFactory)
    }
    state: dict[str, list[ShardedTensor]] = {}
    for part in _parts(optimizer):
        for parameter, shard, start in _shards(part):
            name, weight = weights[id(parameter)]
            of_shard = cast("dict[str, Tensor]", _adam(part).state[shard])
            tensors = {key: of_shard[key] for key in ("exp_avg", "exp_avg_sq")}
            if shard.dtype != parameter.dtype:
                tensors["fp32_param"] = shard
            distributed = isinstance(part, DistributedOptimizer)
            for key, tensor in tensors.items():
                state[f"{name}.{key}"] = [
                    piece
                    for leaf in _leaves(weight)
                    for piece in _pieces(leaf, parameter, key, tensor.detach().view(-1), start, distributed)
                ]
    return state


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers in Megatron's chain (a mixture of experts has two) that have parameters."""
    parts: list[MegatronOptimizer] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def _adam(part: MegatronOptimizer) -> _Adam:
    return cast("_Adam", part.optimizer)


def _is_torch_adam(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _params(group: Mapping[str, object]) -> Sequence[Tensor]:
    return cast("Sequence[Tensor]", group["params"])


def _counters(optimizer: MegatronOptimizer) -> Iterator[MutableMapping[str, object]]:
    """Yield the dicts that hold ``step``: torch's one per parameter, Transformer Engine's one per group."""
    for part in _parts(optimizer):
        yield from _adam(part).state.values() if _is_torch_adam(part) else _adam(part).param_groups


def _shards(part: MegatronOptimizer) -> Iterator[tuple[Parameter, Tensor, int]]:
    """Yield each parameter of the model, the tensor that Adam updates for it on this rank, and the element of
    the parameter at which that tensor begins.
    """
    if isinstance(part, DistributedOptimizer):
        # Megatron's index of parameters has another order than Adam's groups if their precisions are mixed.
        for models, mains in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameters, shards in zip(models, mains, strict=True):
                for parameter, shard in zip(parameters, shards, strict=True):
                    yield parameter, shard, part._get_model_param_range_map(parameter)["param"].start
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, main, 0
        groups = part.fp32_from_fp32_groups
    else:
        groups = [_params(group) for group in _adam(part).param_groups]
    for parameters in groups:
        for parameter in cast("Sequence[Parameter]", parameters):
            yield parameter, parameter, 0


def _leaves(weight: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors that a weight is stored as: two for fused gate and up projections."""
    return list(nested_values(weight.build())) if isinstance(weight, ShardedTensorFactory) else [weight]


def _pieces(
    leaf: ShardedTensor, parameter: Parameter, key: str, shard: Tensor, start: int, distributed: bool
) -> Iterator[ShardedTensor]:
    """Yield the parts of ``leaf`` in ``shard``, which begins at element ``start`` of ``parameter``."""
    weight = leaf.data
    assert weight is not None
    ndim, lead = weight.ndim, leaf.prepend_axis_num
    if prod(weight.shape[1:-1]) != 1 or not weight.is_contiguous():
        raise NotImplementedError(f"{leaf.key} is neither a vector nor whole rows of a matrix")
    middle = ndim - 2  # the kernel of a convolution by channel has a dimension of length 1 between the two
    begin = int(weight.storage_offset()) - int(parameter.storage_offset())
    first = max(start, begin)
    last = min(start + shard.numel(), begin + weight.numel())
    columns = leaf.local_shape[-1]
    for piece in rectangles(first - begin, last - begin, columns):
        place = (piece.row, *(0,) * middle, piece.column)[-ndim:]
        shape = (piece.rows, *(1,) * middle, piece.columns)[-ndim:]
        offset = begin + piece.row * columns + piece.column - start
        data = shard[offset : offset + piece.rows * piece.columns].view((1,) * lead + shape)
        corner = [outer + inner for outer, inner in zip(leaf.global_offset[lead:], place, strict=True)]
        # The last number of a replica is its data-parallel rank; a distributed optimizer has no replicas.
        replica = cast("tuple[int, ...]", leaf.replica_id)
        yield ShardedTensor(
            key=f"optimizer.state.{key}.{leaf.key}",
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=leaf.global_shape,
            global_offset=(*leaf.global_offset[:lead], *corner),
            axis_fragmentations=None,  # the pieces form no grid
            replica_id=(*replica[:-1], 0) if distributed else leaf.replica_id,
            allow_shape_mismatch=leaf.allow_shape_mismatch,
        )
