"""Executes an export plan: gathers shards bucket by bucket and yields HF-named tensors on the sender.

Each part of an HF tensor goes from the rank that holds it straight to its place in the sender's flat bucket.
It is copied on the way only where it must be: where the shard is made of runs (fused query, key and value),
where the place is (row-parallel weights), and where parts are so small that they travel together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.bridge.plan import SENDER, ExportPlan, Part

Parameters = Sequence[Mapping[str, Tensor]]
"""A rank's shards by name, for each of its model chunks."""

SMALL_BYTES = 1 << 18
"""Parts up to this size travel together: a message has its price."""


class ExportError(RuntimeError):
    """A rank did not send or take its parts; the message says which one and what."""


@dataclass(frozen=True)
class FlatBucket:
    """The HF tensors of one bucket, back to back in a flat tensor that is used again for the next but one."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor
    last: bool
    """The version is complete with this bucket."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views into ``flat``, by HF name."""
        parts = self.flat.split([prod(shape) for shape in self.shapes])
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(shape)


@torch.no_grad()
def export(
    plan: ExportPlan, parameters: Parameters, rank: int, group: dist.ProcessGroup | None = None
) -> Iterator[FlatBucket | None]:
    """Yield each bucket in plan order: a FlatBucket on the sender, None on every other rank.

    Every rank iterates to the end, in step; one that holds nothing of a bucket waits for nobody. Extra memory
    on the sender: the bucket in hand, the one being made, and what the plan lets be staged.
    """
    if rank != SENDER:
        for bucket in plan.buckets:
            for parts in plan.rounds(bucket):
                _send([part for part in parts if part.owner == rank], parameters, group)
            yield None
        return
    some = next(iter(parameters[0].values()))
    spaces = [some.new_empty(0), some.new_empty(0)]
    staging = some.new_empty(0)
    for number, bucket in enumerate(plan.buckets):
        if bucket.float32:
            space = some.new_empty(bucket.numel, dtype=torch.float32)
        elif spaces[number % 2].numel() < bucket.numel:
            spaces[number % 2] = space = some.new_empty(max(b.numel for b in plan.buckets[number % 2 :: 2]))
        else:
            space = spaces[number % 2]
        flat = space[: bucket.numel]
        for parts in plan.rounds(bucket):
            staging = _receive(parts, parameters, flat, staging, group)
        last = number == len(plan.buckets) - 1
        yield FlatBucket(bucket.hf_names, bucket.hf_shapes, flat, last)


def _send(parts: Sequence[Part], parameters: Parameters, group: dist.ProcessGroup | None) -> None:
    """This rank's parts of one round."""
    large, small = [], []
    shard_of = _shards(parameters)
    for part in parts:
        values = part.piece.in_shard(shard_of(part.entry.chunk, part.entry.parameter))
        (small if _is_small(values) else large).append(values.contiguous())
    if small:
        large.append(torch.cat([values.flatten() for values in small]))
    operations = [dist.P2POp(dist.isend, values, SENDER, group) for values in large]
    _finish(operations, _begin(operations), parts)


def _receive(
    parts: Sequence[Part],
    parameters: Parameters,
    flat: Tensor,
    staging: Tensor,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The parts of one round into their places in ``flat``.

    ``staging`` is where parts arrive that have no place of one piece; it, or a larger one, is given back.
    Fresh memory would cost more than the copying.
    """
    operations, staged, own = [], [], []
    needed = sum(part.numel for part in parts if part.owner != SENDER and not part.in_place)
    if staging.numel() < needed or staging.dtype is not flat.dtype:
        staging = flat.new_empty(needed)
    taken = 0
    small: dict[int, list[Tensor]] = {}
    shard_of = _shards(parameters)
    for part in parts:
        tensor = flat[part.offset : part.offset + prod(part.shape)].view(part.shape)
        place = part.piece.in_hf(tensor)
        if part.owner == SENDER:
            shard = shard_of(part.entry.chunk, part.entry.parameter)
            own.append((place, part.piece.in_shard(shard)))
        elif _is_small(place):
            small.setdefault(part.owner, []).append(place)
        elif part.in_place:
            operations.append(dist.P2POp(dist.irecv, place, part.owner, group))
        else:
            values = staging[taken : taken + part.numel].view(place.shape)
            taken += part.numel
            staged.append((place, values))
            operations.append(dist.P2POp(dist.irecv, values, part.owner, group))
    for owner, places in small.items():
        together = flat.new_empty(sum(place.numel() for place in places))
        operations.append(dist.P2POp(dist.irecv, together, owner, group))
        values = together.split([place.numel() for place in places])
        staged += [(place, v.view(place.shape)) for place, v in zip(places, values, strict=True)]
    works = _begin(operations)
    for place, values in own:
        place.copy_(values)
    _finish(operations, works, parts)
    for place, values in staged:
        place.copy_(values)
    return staging


def _shards(parameters: Parameters) -> Callable[[int, str], Tensor]:
    """A rank's shards by chunk and name, for one round. Each is asked for once: it may be computed then."""
    return cache(lambda chunk, name: parameters[chunk][name].detach())


def _is_small(values: Tensor) -> bool:
    return values.nbytes <= SMALL_BYTES


def _begin(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(operations: list[dist.P2POp], works: list[dist.Work], parts: Sequence[Part]) -> None:
    """Wait, each time at most as long as the process group's time-out."""
    for number, work in enumerate(works):
        try:
            work.wait()
        except RuntimeError as error:
            # With NCCL there is one wait for all of them.
            own = operations[number : number + 1] if len(works) == len(operations) else operations
            ranks = ", ".join(str(rank) for rank in sorted({operation.peer for operation in own}))
            first = parts[0].entry.hf_names[0]
            raise ExportError(f"waited in vain for rank {ranks} to export {first} and on: {error}") from error
