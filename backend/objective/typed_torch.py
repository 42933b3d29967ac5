"""Typed views of torch functions whose own annotations leave their results unknown."""

from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class _TypedTorch(Protocol):
    def unique(
        self, input: Tensor, *, return_inverse: Literal[True], return_counts: Literal[True]
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def broadcast_tensors(self, *tensors: Tensor) -> tuple[Tensor, ...]: ...


class _TypedDistributed(Protocol):
    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> object: ...

    def all_gather_object(
        self, object_list: list[list[str]], obj: list[str], group: dist.ProcessGroup
    ) -> None: ...


typed_torch: _TypedTorch = torch
typed_dist: _TypedDistributed = dist
