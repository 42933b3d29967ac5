"""Execute an export plan: gather shards bucket by bucket and yield HF tensors on the sender.

Each part of an HF tensor travels from the rank that holds it straight to its place in the sender's flat
bucket. It is copied on the way only if it has to be: if the shard consists of runs (fused query, key and
value), if the destination is not contiguous (row-parallel weights), or if the part is so small that it
travels together with others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.shards.plan import SENDER, ExportPlan, TensorPart

Parameters = Sequence[Mapping[str, Tensor]]
"""Shards of one rank by name, for each of its model chunks."""

SMALL_BYTES = 1 << 18
"""Parts up to this size share a message, because each message has a fixed cost."""


class ExportError(RuntimeError):
    """A rank did not send or receive its parts; the message names the rank and the tensor."""


@torch.no_grad()
def export(
    plan: ExportPlan, parameters: Parameters, rank: int, group: dist.ProcessGroup | None = None
) -> Iterator[FlatBucket | None]:
    """Yield each bucket in the order of the plan: a FlatBucket on the sender, None on every other rank.

    All ranks must iterate to the end; a rank that holds nothing of a bucket does not wait for the others. The
    sender needs extra memory for the bucket in use, the bucket being made and the plan's staging memory.
    """
    if rank != SENDER:
        for bucket in plan.buckets:
            for parts in plan.rounds(bucket):
                _send([part for part in parts if part.owner == rank], parameters, group)
            yield None
        return
    template = next(iter(parameters[0].values()))
    spaces = [template.new_empty(0), template.new_empty(0)]
    staging = template.new_empty(0)
    for number, bucket in enumerate(plan.buckets):
        if bucket.float32:
            space = template.new_empty(bucket.numel, dtype=torch.float32)
        elif spaces[number % 2].numel() < bucket.numel:
            largest = max(b.numel for b in plan.buckets[number % 2 :: 2])
            spaces[number % 2] = space = template.new_empty(largest)
        else:
            space = spaces[number % 2]
        flat = space[: bucket.numel]
        for parts in plan.rounds(bucket):
            staging = _receive(parts, parameters, flat, staging, group)
        last = number == len(plan.buckets) - 1
        yield FlatBucket(bucket.hf_names, bucket.hf_shapes, flat, last)


def _send(parts: Sequence[TensorPart], parameters: Parameters, group: dist.ProcessGroup | None) -> None:
    """Send this rank's parts of one round."""
    messages: list[Tensor] = []
    small: list[Tensor] = []
    shard_of = _shards(parameters)
    for part in parts:
        values = part.piece.in_shard(shard_of(part.entry.chunk, part.entry.parameter))
        (small if _is_small(values) else messages).append(values.contiguous())
    if small:
        messages.append(torch.cat([values.flatten() for values in small]))
    operations = [dist.P2POp(dist.isend, values, SENDER, group) for values in messages]
    _wait(operations, _start(operations), parts)


def _receive(
    parts: Sequence[TensorPart],
    parameters: Parameters,
    flat: Tensor,
    staging: Tensor,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Receive the parts of one round into their places in ``flat``.

    Parts whose place is not contiguous arrive in ``staging``. Returns it, or a larger one, for the next
    round: allocating memory would cost more than the copies.
    """
    operations: list[dist.P2POp] = []
    staged: list[tuple[Tensor, Tensor]] = []
    local: list[tuple[Tensor, Tensor]] = []
    needed = sum(part.numel for part in parts if part.owner != SENDER and not part.in_place)
    if staging.numel() < needed or staging.dtype is not flat.dtype:
        staging = flat.new_empty(needed)
    used = 0
    small: dict[int, list[Tensor]] = {}
    shard_of = _shards(parameters)
    for part in parts:
        tensor = flat[part.offset : part.offset + prod(part.shape)].view(part.shape)
        place = part.piece.in_hf(tensor)
        if part.owner == SENDER:
            shard = shard_of(part.entry.chunk, part.entry.parameter)
            local.append((place, part.piece.in_shard(shard)))
        elif _is_small(place):
            small.setdefault(part.owner, []).append(place)
        elif part.in_place:
            operations.append(dist.P2POp(dist.irecv, place, part.owner, group))
        else:
            values = staging[used : used + part.numel].view(place.shape)
            used += part.numel
            staged.append((place, values))
            operations.append(dist.P2POp(dist.irecv, values, part.owner, group))
    for owner, places in small.items():
        sizes = [place.numel() for place in places]
        message = flat.new_empty(sum(sizes))
        operations.append(dist.P2POp(dist.irecv, message, owner, group))
        received = torch.split(message, sizes)
        staged += [(place, v.view(place.shape)) for place, v in zip(places, received, strict=True)]
    works = _start(operations)
    for place, values in local:
        place.copy_(values)
    _wait(operations, works, parts)
    for place, values in staged:
        place.copy_(values)
    return staging


def _shards(parameters: Parameters) -> Callable[[int, str], Tensor]:
    """Return a look-up of a rank's shards by chunk and name, for one round.

    It reads each shard once, because ``parameters`` may compute it on access.
    """

    @cache
    def shard_of(chunk: int, name: str) -> Tensor:
        return parameters[chunk][name].detach()

    return shard_of


def _is_small(values: Tensor) -> bool:
    return values.nbytes <= SMALL_BYTES


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(operations: list[dist.P2POp], works: list[dist.Work], parts: Sequence[TensorPart]) -> None:
    """Wait for each transfer, at most as long as the process group's time-out."""
    for number, work in enumerate(works):
        try:
            work.wait()
        except RuntimeError as error:
            # NCCL returns a single work for all operations.
            pending = operations[number : number + 1] if len(works) == len(operations) else operations
            ranks = ", ".join(str(rank) for rank in sorted({operation.peer for operation in pending}))
            first = parts[0].entry.hf_names[0]
            raise ExportError(
                f"rank {ranks} did not respond in the export of {first} and the tensors after it: {error}"
            ) from error
