"""Adam's state in the shape of the weights, whichever of Megatron's optimizers holds it.

The distributed optimizer gives each data-parallel rank a range of each flattened weight. Here such a range is
cut into rectangles of the weight, which are views of the rank's own state: nothing is gathered to save it,
and a checkpoint is read straight into place by any layout and by either kind of optimizer. (Megatron's own
``fully_reshardable`` gathers the whole state on every data-parallel rank, and mixes weights up when tied
embeddings meet pipeline stages, because it forgets the padding between gradient buckets.)
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.nn import Parameter

from slipstream.backend.checkpoint.errors import CheckpointError
from slipstream.backend.megatron.rectangles import rectangles


def allocate(optimizer: MegatronOptimizer) -> None:
    """Make the state that Adam makes at its first step, so that there is something to save or load."""
    for part in _parts(optimizer):
        config = part.config
        if config.optimizer != "adam" or config.use_precision_aware_optimizer or config.optimizer_cpu_offload:
            raise CheckpointError(
                "checkpoints know plain Adam only; take optimizer, use_precision_aware_optimizer and "
                "optimizer_cpu_offload out of actor.megatron, or set checkpoint.every: 0"
            )
        part.init_state_fn(part.optimizer, config)
        if _is_torch_adam(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def updates(optimizer: MegatronOptimizer) -> int:
    """How many updates Adam has done: its bias correction goes by that."""
    counts = {int(holder.get("step", 0)) for part in _parts(optimizer) for holder in _counting(part)}
    return max(counts, default=0)


def set_updates(optimizer: MegatronOptimizer, count: int) -> None:
    for part in _parts(optimizer):
        for holder in _counting(part):
            if torch.is_tensor(holder.get("step")):
                holder["step"].fill_(count)
            else:
                holder["step"] = count


def held(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Every tensor that the optimizer has on this rank. Some may be, or share memory with, the model's."""
    return [
        value
        for part in _parts(optimizer)
        for tensors in (
            *(group["params"] for group in part.optimizer.param_groups),
            *(state.values() for state in part.optimizer.state.values()),
        )
        for value in tensors
        if torch.is_tensor(value)
    ]


def sharded_state(optimizer: MegatronOptimizer, model: dict[str, Any]) -> dict[str, list[ShardedTensor]]:
    """Views of the moments and float32 main parameters, placed like the weights in ``model``.

    ``model`` is the model's sharded state dict; the names are those of Megatron's plain optimizers.
    """
    weights = {id(weight.data): (name, weight) for name, weight in model.items() if _is_weight(weight)}
    found: dict[str, list[ShardedTensor]] = {}
    for part in _parts(optimizer):
        for parameter, shard, start in _shards(part):
            name, weight = weights[id(parameter)]
            tensors = {key: part.optimizer.state[shard][key] for key in ("exp_avg", "exp_avg_sq")}
            if shard.dtype != parameter.dtype:
                tensors["fp32_param"] = shard
            distributed = isinstance(part, DistributedOptimizer)
            for key, tensor in tensors.items():
                found[f"{name}.{key}"] = [
                    piece
                    for leaf in _leaves(weight)
                    for piece in _pieces(leaf, parameter, key, tensor.detach().view(-1), start, distributed)
                ]
    return found


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers behind Megatron's chain (a mixture of experts has two) that have parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def _is_torch_adam(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _counting(part: MegatronOptimizer) -> list[dict[str, Any]]:
    """Where ``step`` is kept: by torch for each parameter, by Transformer Engine for each group."""
    return list(part.optimizer.state.values()) if _is_torch_adam(part) else part.optimizer.param_groups


def _shards(part: MegatronOptimizer) -> Iterator[tuple[Parameter, Tensor, int]]:
    """A parameter of the model, what Adam updates for it on this rank, and where that begins in it."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            shard = part.optimizer.param_groups[group]["params"][order]
            yield parameter, shard, part._get_model_param_range_map(parameter)["param"].start
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, main, 0
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    for parameters in groups:
        for parameter in parameters:
            yield parameter, parameter, 0


def _is_weight(value: Any) -> bool:
    return isinstance(value, ShardedTensor | ShardedTensorFactory)


def _leaves(weight: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """The tensors that a weight is stored as: two for fused gate and up projections."""
    return list(nested_values(weight.build())) if isinstance(weight, ShardedTensorFactory) else [weight]


def _pieces(
    leaf: ShardedTensor, parameter: Parameter, key: str, shard: Tensor, start: int, distributed: bool
) -> Iterator[ShardedTensor]:
    """The part of ``leaf`` that is in ``shard``, which begins at element ``start`` of ``parameter``."""
    ndim, lead = leaf.data.ndim, leaf.prepend_axis_num
    if ndim > 2 or not leaf.data.is_contiguous():
        raise NotImplementedError(f"{leaf.key} is neither a vector nor whole rows of a matrix")
    begin = leaf.data.storage_offset() - parameter.storage_offset()
    first = max(start, begin)
    last = min(start + shard.numel(), begin + leaf.data.numel())
    columns = leaf.local_shape[-1]
    for piece in rectangles(first - begin, last - begin, columns):
        place, shape = (piece.row, piece.column)[-ndim:], (piece.rows, piece.columns)[-ndim:]
        at = begin + piece.row * columns + piece.column - start
        data = shard[at : at + piece.rows * piece.columns].view((1,) * lead + shape)
        corner = [offset + inside for offset, inside in zip(leaf.global_offset[lead:], place, strict=True)]
        yield ShardedTensor(
            key=f"optimizer.state.{key}.{leaf.key}",
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_shape=leaf.global_shape,
            global_offset=(*leaf.global_offset[:lead], *corner),
            axis_fragmentations=None,  # the pieces form no grid
            # The last number is the data-parallel rank: those of a distributed optimizer are no replicas.
            replica_id=(*leaf.replica_id[:-1], 0) if distributed else leaf.replica_id,
            allow_shape_mismatch=leaf.allow_shape_mismatch,
        )
