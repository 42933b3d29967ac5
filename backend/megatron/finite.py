"""Checks that numbers are finite on all ranks: before an update is made, before weights leave the trainer.

Each check reads the numbers once and reduces one number over all ranks. Names are only looked for when a
check fails.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.skipped import shortened
from slipstream.backend.megatron.marks import marks_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


class NotFinite(RuntimeError):
    """Numbers that would leave the trainer are not finite. Every rank raises it, with the names of all."""


def gradient_buffers(parts: Sequence["DistributedDataParallel"]) -> list[Tensor]:
    """Return the contiguous buffers that hold every gradient of this rank."""
    # DDP's ``buffers`` replaces the method of this name of torch's modules.
    views = cast("Sequence[Any]", parts)
    return [buffer.grad_data for view in views for buffer in [*view.buffers, *view.expert_parallel_buffers]]


@torch.no_grad()
def update_is_finite(parts: Sequence["DistributedDataParallel"], losses: Sequence[Tensor]) -> bool:
    """True if all losses and gradients of all ranks are finite. Collective over all ranks.

    Squared norms of the gradients and the losses are added up, over the ranks too: NaN and infinity survive
    every sum. In single precision the sum also overflows where Adam's second moment would.
    """
    total = next(parts[0].parameters()).new_zeros((), dtype=torch.float32)
    for buffer in gradient_buffers(parts):
        total += torch.linalg.vector_norm(buffer).square()
    for loss in losses:
        total += loss
    dist.all_reduce(total)
    return math.isfinite(total.item())


def gradient_names(parts: Sequence["DistributedDataParallel"]) -> list[str]:
    """Return the names of this rank's parameters whose gradients are not finite."""
    names: list[str] = []
    for part in parts:
        trained = {name: p for name, p in part.module.named_parameters() if p.requires_grad}
        names += not_finite_names({name: marks_of(p).main_grad for name, p in trained.items()})
    return names


@torch.no_grad()
def not_finite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors, all on one device, that hold NaN or infinity.

    A norm is finite unless a number is not, or the squares overflow; only then is every number looked at.
    ``tensors`` may compute a tensor on access: it is read a second time only in that case.
    """
    norms = {
        name: torch.linalg.vector_norm(tensor).float()
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    if not norms:
        return []
    is_finite = torch.stack(list(norms.values())).isfinite().tolist()
    suspects = [name for name, is_sure in zip(norms, is_finite, strict=True) if not is_sure]
    return [name for name in suspects if not bool(torch.isfinite(tensors[name]).all())]


def require_finite(what: str, parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> None:
    """Raise NotFinite on every rank unless the tensors of all ranks are finite. Collective over all ranks.

    ``what`` says in the error what the tensors are.
    """
    names = [name for part in parts for name in not_finite_names(part)]
    count = torch.tensor(len(names), device=device)
    dist.all_reduce(count)
    if not count.item():
        return
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, names)
    named = [f"rank {rank}: {shortened(of_rank, ', ')}" for rank, of_rank in enumerate(by_rank) if of_rank]
    raise NotFinite(
        f"{what} are not finite, and nothing was sent or written: {'; '.join(named)}. The last checkpoint is "
        "finite: resume from it with a lower learning rate or with actor.optimizer.clip_grad above 0, and "
        "look at train/grad_norm and train/skipped_updates in the steps before this one"
    )
