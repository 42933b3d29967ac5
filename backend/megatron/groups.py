"""This rank's place in Megatron's process groups: a typed view of ``megatron.core.parallel_state``."""

from typing import Protocol, TypedDict, cast

import torch.distributed as dist
from megatron.core import parallel_state


class ProcessGroups(Protocol):
    """The part of ``parallel_state`` that the trainer uses; ``parallel.initialize`` makes the groups."""

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> dist.ProcessGroup: ...
    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int: ...
    def get_context_parallel_group(self) -> dist.ProcessGroup: ...
    def get_context_parallel_rank(self) -> int: ...
    def get_context_parallel_world_size(self) -> int: ...
    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup: ...
    def get_tensor_model_parallel_rank(self) -> int: ...
    def get_tensor_model_parallel_world_size(self) -> int: ...
    def get_pipeline_model_parallel_rank(self) -> int: ...
    def is_pipeline_last_stage(self) -> bool: ...
    def destroy_model_parallel(self) -> None: ...


class ShardingMetadata(TypedDict):
    """The metadata that Megatron passes to every module when it saves or loads a checkpoint."""

    dp_cp_group: dist.ProcessGroup


groups = cast("ProcessGroups", parallel_state)


def holds_results() -> bool:
    """True on one rank of each data-parallel shard: the first of its last stage, which has its results."""
    is_first = groups.get_tensor_model_parallel_rank() == 0 and groups.get_context_parallel_rank() == 0
    return groups.is_pipeline_last_stage() and is_first


def reports() -> bool:
    """True if this is the one rank whose results go to the driver: the first of the last stage."""
    first_of_tensor = groups.get_tensor_model_parallel_rank() == 0
    first_of_data = groups.get_data_parallel_rank(with_context_parallel=True) == 0
    return groups.is_pipeline_last_stage() and first_of_tensor and first_of_data
