"""The one vocabulary of trainer shards and engine shards: regions of HF tensors. Imports no torch.

A ``Region`` is a rectangle of an HF tensor, whose rows or columns may have equal gaps between them, and the
place of its elements in a tensor of one rank. The trainer's regions follow from the mappings of the model's
family, an engine's from a trace of its own loader (``bridge.engine.loader_trace``). Where two regions meet,
elements move from one rank to the other: a ``Move``. Once all moves are known, no HF name is needed any more.

    trainer's regions ─┐
                       ├─ meet ──► Move ──► joined ──► Message (sent as one)
    engine's regions ──┘
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import gcd, lcm, prod
from typing import NamedTuple

from slipstream.bridge.model.mapping import Shape

Strides = tuple[int, ...]


class Region(NamedTuple):
    """A rectangle of an HF tensor, and where a rank has its elements.

    All counts are of elements. A dimension of length 1 has stride 0.
    """

    hf: str
    """Name of the HF tensor."""
    start: Shape
    size: Shape
    tensor: str
    """Name of the rank's own tensor."""
    offset: int
    """Place of the rectangle's first element in that tensor."""
    stride: Strides
    """Steps in that tensor along the HF tensor's dimensions."""
    step: Shape
    """Steps in the HF tensor from one element of the rectangle to the next, in each dimension: 1 without
    gaps, 2 for every other one."""


class Move(NamedTuple):
    """Elements of a sender's tensor that become elements of a receiver's, in the order of ``shape``."""

    source: str
    source_offset: int
    source_stride: Strides
    target: str
    target_offset: int
    target_stride: Strides
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_run(self) -> bool:
        """True if both sides have the elements one after another."""
        return len(self.shape) == 1 and self.source_stride == (1,) == self.target_stride


class Message(NamedTuple):
    """Elements that travel from one rank to another in one transfer."""

    moves: tuple[Move, ...]
    numel: int
    direct: bool
    """The message is a single run, which is sent from its place and received into its place uncopied."""


def contiguous(shape: Sequence[int]) -> Strides:
    """Return the strides of a tensor of this shape without gaps."""
    return tuple(reversed(list(accumulate(reversed(shape[1:]), int.__mul__, initial=1)))) if shape else ()


def meet(source: Region, target: Region) -> Move | None:
    """Return the elements of ``target`` that ``source`` has; None: they share none."""
    source_offset, target_offset = source.offset, target.offset
    # Length and the two strides, with as few dimensions as both sides allow.
    dims: list[tuple[int, int, int]] = []
    for start, size, stride, step, other_start, other_size, other_stride, other_step in zip(
        source.start,
        source.size,
        source.stride,
        source.step,
        target.start,
        target.size,
        target.stride,
        target.step,
        strict=True,
    ):
        if step == 1 == other_step:
            low, shared = max(start, other_start), 1
            length = min(start + size, other_start + other_size) - low
        else:
            low, shared, length = _common(start, size, step, other_start, other_size, other_step)
        if length <= 0:
            return None
        source_offset += (low - start) // step * stride
        target_offset += (low - other_start) // other_step * other_stride
        if length == 1:
            continue
        source_stride, target_stride = shared // step * stride, shared // other_step * other_stride
        if dims:
            before, before_source, before_target = dims[-1]
            if before_source == length * source_stride and before_target == length * target_stride:
                dims[-1] = (before * length, source_stride, target_stride)
                continue
        dims.append((length, source_stride, target_stride))
    lengths, source_strides, target_strides = zip(*(dims or [(1, 1, 1)]), strict=True)
    return Move(
        source.tensor, source_offset, source_strides, target.tensor, target_offset, target_strides, lengths
    )


def _common(
    start: int, size: int, step: int, other_start: int, other_size: int, other_step: int
) -> tuple[int, int, int]:
    """Return first element, step and length of what two sequences of equal steps have in common.

    The length is 0 or less if that is nothing.
    """
    between, divisor = other_start - start, gcd(step, other_step)
    if between % divisor:
        return 0, 1, 0
    # The element number n of the first sequence is in the second one, continued both ways, if n solves
    # n * step = between (mod other_step).
    modulus = other_step // divisor
    number = between // divisor * pow(step // divisor, -1, modulus) % modulus
    shared, low = lcm(step, other_step), start + number * step
    low += -((low - max(start, other_start)) // shared) * shared
    last = min(start + (size - 1) * step, other_start + (other_size - 1) * other_step)
    return low, shared, (last - low) // shared + 1


def joined(moves: Iterable[Move]) -> list[Move]:
    """Return the moves in the order of their targets. A run that goes on where the run before it ends, on
    both sides, becomes one with it: an expert's gate and up projection, for one.
    """
    result: list[Move] = []
    for move in sorted(moves, key=lambda move: (move.target, move.target_offset)):
        before = result[-1] if result else None
        if before is not None and before.is_run and move.is_run:
            length = before.shape[0]
            if (before.source, before.target) == (move.source, move.target) and (
                before.source_offset + length,
                before.target_offset + length,
            ) == (move.source_offset, move.target_offset):
                result[-1] = before._replace(shape=(length + move.shape[0],))
                continue
        result.append(move)
    return result


def messages(moves: Iterable[Move], *, packed: int, direct: int) -> list[Message]:
    """Divide moves into messages.

    ``packed``: largest number of elements that are packed into one message. ``direct``: length from which a
    run is a message of its own, which needs no packing.
    """
    result: list[Message] = []
    pending: list[Move] = []
    size = 0

    def close() -> None:
        nonlocal size
        if pending:
            result.append(Message(tuple(pending), size, len(pending) == 1 and pending[0].is_run))
        pending.clear()
        size = 0

    for whole in joined(moves):
        if whole.is_run and whole.numel >= direct:
            close()
            result.append(Message((whole,), whole.numel, direct=True))
            continue
        for move in _parts(whole, packed):
            if size + move.numel > packed:
                close()
            pending.append(move)
            size += move.numel
    close()
    return result


def _parts(move: Move, packed: int) -> Iterator[Move]:
    """Divide a move that is larger than a packed message along its first dimension."""
    length = move.shape[0]
    step = max(1, length * packed // move.numel) if move.numel > packed else length
    for first in range(0, length, step):
        yield move._replace(
            shape=(min(step, length - first), *move.shape[1:]),
            source_offset=move.source_offset + first * move.source_stride[0],
            target_offset=move.target_offset + first * move.target_stride[0],
        )
