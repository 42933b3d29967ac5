"""A micro-batch on the device: one buffer of pinned host memory, one copy, and views of it.

A copy from pageable memory makes the host wait for the device; a pinned one is queued after the kernels that
are under way. torch keeps pinned memory that a copy still reads, and uses it again afterwards.

Shapes: T tokens of the micro-batch, M of them with loss, N trajectories with loss; t and m for the part of
one context-parallel rank.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slipstream.backend.batch.context_parallel import ContextShare
from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import rotation
from slipstream.backend.megatron.tree_attention import PrefixTree, sees, subtree_ends


@dataclass(frozen=True)
class Unpacking:
    """Places of a pack's tokens in padded batches, one for each class of lengths."""

    shapes: tuple[tuple[int, int], ...]
    """(N, L) of each class."""
    gather: np.ndarray
    """int64: place in the pack of every padded place, one class after the other; padding repeats the last
    token of its segment."""
    restore_T: np.ndarray
    """int64: padded place of every token of the pack, those of branches after those of ``gather``."""
    end_T: np.ndarray
    """int32: end of the subtree of every token (``tree_attention``)."""
    branch_shapes: tuple[tuple[int, int, int, int], ...]
    """Segments that take tokens: (N, L, K, R) of each class, L their own tokens, K all of them, R the runs in
    which these stand in the pack."""
    branch_arrays: dict[str, np.ndarray]
    """int64, one class after the other: the place in the pack of every padded query (``queries``), the
    ``last`` place of each segment, and where each run begins among the N * K keys (``run_starts``) and by how
    much more than before the keys are shifted from there on (``run_shifts``). Empty without branches."""


def length_classes(segments: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the segments of a pack, (start, end), grouped by powers of two of their length.

    Padding the segments of one class to the longest of them at most doubles their tokens.

    >>> length_classes([(0, 3), (3, 7), (7, 20)])
    [[(0, 3), (3, 7)], [(7, 20)]]
    """
    classes: dict[int, list[tuple[int, int]]] = {}
    for start, end in segments:
        if end > start:
            classes.setdefault(math.ceil(math.log2(end - start)), []).append((start, end))
    return list(classes.values())


def unpacking_of(cu_seqlens: np.ndarray, taken_N: np.ndarray, taken_R3: np.ndarray) -> Unpacking:
    """Return the unpacking of a pack with these boundaries. taken_N, taken_R3: as in ``MicroBatch``."""
    shapes: list[tuple[int, int]] = []
    gathers: list[np.ndarray] = []
    restore_T = np.empty(int(cu_seqlens[-1]), np.int64)
    padded = 0
    is_branch_N = taken_N > 0
    whole = [
        pair for pair, branch in zip(pairwise(cu_seqlens.tolist()), is_branch_N, strict=True) if not branch
    ]
    for segments in length_classes(whole):
        start_N, end_N = np.array(segments, np.int64).T
        longest = int((end_N - start_N).max())
        place_NL = start_N[:, None] + np.arange(longest)
        inside_NL = place_NL < end_N[:, None]
        restore_T[place_NL[inside_NL]] = padded + np.flatnonzero(inside_NL)
        gathers.append(np.minimum(place_NL, end_N[:, None] - 1).ravel())
        shapes.append(place_NL.shape)
        padded += place_NL.size
    gather = np.concatenate(gathers) if gathers else np.empty(0, np.int64)
    branch_shapes, arrays = (), dict[str, np.ndarray]()
    if is_branch_N.any():
        branch_shapes, arrays = _branches(cu_seqlens, taken_N, taken_R3, restore_T, padded)
    end_T = subtree_ends(cu_seqlens, taken_N)
    return Unpacking(tuple(shapes), gather, restore_T, end_T, branch_shapes, arrays)


def _branches(
    cu_seqlens: np.ndarray, taken_N: np.ndarray, taken_R3: np.ndarray, restore_T: np.ndarray, padded: int
) -> tuple[tuple[tuple[int, int, int, int], ...], dict[str, np.ndarray]]:
    """Return ``branch_shapes`` and ``branch_arrays``, and fill ``restore_T``, from the place ``padded`` on.

    Segments are grouped by powers of two of their own length and of the whole. A class of them has no more
    keys than the pack has tokens, or is a single one: the memory of padded keys stays that of a pack.
    """
    first_N = np.searchsorted(taken_R3[:, 0], np.arange(len(taken_N) + 1))
    own_N = np.diff(cu_seqlens.astype(np.int64))
    classes: dict[tuple[int, int], list[int]] = {}
    for number in np.flatnonzero((taken_N > 0) & (own_N > 0)).tolist():
        own, taken = int(own_N[number]), int(taken_N[number])
        classes.setdefault((math.ceil(math.log2(own)), math.ceil(math.log2(own + taken))), []).append(number)
    shapes: list[tuple[int, int, int, int]] = []
    arrays: dict[str, list[np.ndarray]] = {
        name: [] for name in ("queries", "last", "run_starts", "run_shifts")
    }
    for (_, whole), numbers in classes.items():
        most = max(1, len(restore_T) >> whole)
        for chunk in (numbers[i : i + most] for i in range(0, len(numbers), most)):
            own_n, taken_n, last_n = own_N[chunk], taken_N[chunk], cu_seqlens[1:][chunk].astype(np.int64) - 1
            width, depth = int(own_n.max()), int((own_n + taken_n).max())
            query_nL = cu_seqlens[chunk][:, None] + np.arange(width)
            inside_nL = np.arange(width) < own_n[:, None]
            restore_T[query_nL[inside_nL]] = padded + np.flatnonzero(inside_nL)
            padded += len(chunk) * width
            runs = 0
            for row, number in enumerate(chunk):
                run_r3 = taken_R3[first_N[number] : first_N[number + 1]]
                start_r = np.append(run_r3[:, 1], taken_N[number])
                shift_r = np.append(run_r3[:, 2], cu_seqlens[number]) - start_r
                arrays["run_starts"].append(row * depth + start_r)
                arrays["run_shifts"].append(np.diff(shift_r, prepend=0))
                runs += len(start_r)
            shapes.append((len(chunk), width, depth, runs))
            arrays["queries"].append(np.minimum(query_nL, last_n[:, None]).ravel())
            arrays["last"].append(last_n)
    if not shapes:
        return (), {}
    return tuple(shapes), {name: np.concatenate(parts) for name, parts in arrays.items()}


ALIGNMENT = 16
"""Bytes. A view of another dtype must begin at a multiple of its element's size."""


class ArraySlot(NamedTuple):
    """The place of one array in a buffer."""

    start: int
    stop: int
    """Without the padding at its end."""
    dtype: np.dtype
    shape: tuple[int, ...]


def slots_of(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, ArraySlot], int]:
    """Return the slot of each array, and the size of the buffer in bytes.

    >>> slots, size = slots_of({"a": np.zeros(3, np.int32), "b": np.zeros((2, 2))})
    >>> slots["b"].start, slots["b"].stop, size
    (16, 48, 48)
    """
    slots: dict[str, ArraySlot] = {}
    size = 0
    for name, array in arrays.items():
        slots[name] = ArraySlot(size, size + array.nbytes, array.dtype, array.shape)
        size += array.nbytes + -array.nbytes % ALIGNMENT
    return slots, size


def fill(buffer: np.ndarray, slots: Mapping[str, ArraySlot], arrays: Mapping[str, np.ndarray]) -> None:
    """Copy the arrays into their slots of ``buffer``, which holds bytes (uint8)."""
    for name, array in arrays.items():
        slot = slots[name]
        buffer[slot.start : slot.stop].view(slot.dtype).reshape(slot.shape)[...] = array


@dataclass
class Branches:
    """Segments that take tokens from others, as one padded batch of N with L own tokens and K in all."""

    shape: tuple[int, int, int]
    query_place: Tensor
    last_N: Tensor
    run_start_R: Tensor
    run_shift_R: Tensor

    def blocks(self, pairs: int) -> list[tuple[int, int]]:
        """Return ranges of the L queries, each of which has ``pairs`` pairs with keys at most, or is one."""
        rows, own, every = self.shape
        size = max(1, pairs // (rows * every))
        return [(first, min(first + size, own)) for first in range(0, own, size)]

    def key_place(self) -> Tensor:
        """Return the places in the pack of the keys, int64 [N, K]; those of padding are after ``last_N``.

        They are found anew for each use: segments that take the same long prefix have a place of every token
        of it each, which together may be many times as many as the pack has tokens.
        """
        rows, _, every = self.shape
        shift_NK = self.run_shift_R.new_zeros(rows * every).index_put((self.run_start_R,), self.run_shift_R)
        return shift_NK.view(rows, every).cumsum(1) + torch.arange(every, device=shift_NK.device)

    def padded(self, query_T: Tensor, key_T: Tensor, value_T: Tensor, first: int, end: int) -> list[Tensor]:
        """Return queries [N, end - first, ...], keys and values [N, K, ...] of those of the pack."""
        rows, own, every = self.shape
        key_place = torch.minimum(self.key_place(), self.last_N[:, None]).flatten()
        query_place = self.query_place.view(rows, own)[:, first:end].flatten()
        return [
            query_T.index_select(0, query_place).unflatten(0, (rows, end - first)),
            *(part.index_select(0, key_place).unflatten(0, (rows, every)) for part in (key_T, value_T)),
        ]

    def mask(self, tree: PrefixTree, window: int | None, first: int, end: int) -> Tensor:
        """Return which keys the queries [first, end) attend to, bool [N, 1, end - first, K].

        window: of the layer, in tokens; None: it has none.
        """
        rows, own, _ = self.shape
        query_N1L1 = self.query_place.view(rows, 1, own, 1)[:, :, first:end]
        key_N11K, last_N111 = self.key_place()[:, None, None], self.last_N[:, None, None, None]
        places = query_N1L1, torch.minimum(key_N11K, last_N111)
        nothing = self.last_N  # batch and head
        seen = sees(tree.end_T, tree.position_T, window)(nothing, nothing, *places)
        return seen & (key_N11K <= last_N111)


@dataclass
class Unpacked:
    """The way from a pack to padded batches of its segments and back (``batch.unpacking``)."""

    shapes: tuple[tuple[int, int], ...]
    gather: Tensor
    restore_T: Tensor
    tree: PrefixTree
    branches: tuple[Branches, ...] = ()
    """Batches of the segments that take tokens, which are not in ``padded``."""

    def padded(self, part_T: Tensor) -> list[Tensor]:
        """Return the padded batches [N, L, ...] of [T, ...]."""
        # index_select, because the backward pass of fancy indexing is serial on a CPU, and a selection by a
        # mask makes the host wait for a GPU
        sizes = [rows * width for rows, width in self.shapes]
        parts = part_T.index_select(0, self.gather).split(sizes)
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass
class Pack(PackedSeqParams):
    """Megatron's description of a pack, and what the attention of the local layer spec needs besides."""

    unpacked: Unpacked | None = None
    """None for the layers of Transformer Engine, which take packs as they are."""
    chosen: dict[int, list[Tensor | None]] = field(default_factory=dict[int, list[Tensor | None]])
    """The tokens that each layer attends to, by its number, from its indexer to its attention."""


@dataclass(frozen=True)
class DeviceBatch:
    """The tensors of a micro-batch that one rank computes with."""

    pack: Pack
    tokens_t: Tensor
    position_t: Tensor
    index_m: Tensor
    target_m: Tensor
    count: Tensor
    """int32 scalar: tokens with loss that this rank predicts."""
    order_M: Tensor
    counts: tuple[int, ...]
    behaviour_logp_M: Tensor
    lag_M: Tensor
    owner_M: Tensor
    share_M: Tensor
    last_N: Tensor
    """Position of the last token of each trajectory."""
    trajectory_N: Tensor
    """Place of each trajectory in the batch."""
    trajectories: Tensor
    """int32 scalar: N."""
    routes_tW: Tensor | None = None
    """int16: the engine's experts, -1 where they are not known."""


def on_device(micro: MicroBatch, share: ContextShare, device: torch.device, *, unpacks: bool) -> DeviceBatch:
    """Copy a micro-batch, of which this rank has ``share``, to the device.

    unpacks: the layers are of the local spec, whose attention pads segments.
    """
    is_last_M = micro.is_last_M
    arrays = {
        "tokens_t": share.tokens_t,
        "position_t": share.position_t,
        "index_m": share.index_m,
        "target_m": share.target_m,
        "count": np.array(len(share.index_m), np.int32),
        "order_M": share.order_M,
        "behaviour_logp_M": micro.behaviour_logp_M,
        "lag_M": micro.lag_M,
        "owner_M": micro.owner_M,
        "share_M": micro.share_M,
        "last_N": micro.last_N,
        "trajectory_N": micro.trajectory_M[is_last_M],
        "trajectories": np.array(np.count_nonzero(is_last_M), np.int32),
    }
    if share.routes_tW is not None:
        arrays["routes_tW"] = share.routes_tW.view(np.int16)  # NO_ROUTE is -1
    unpacking = unpacking_of(micro.cu_seqlens, micro.taken_N, micro.taken_R3) if unpacks else None
    boundaries = _boundaries(micro.cu_seqlens, unpacking)
    tensors = copied(arrays | boundaries, device)
    pack = _pack(
        {name: tensors.pop(name) for name in boundaries},
        tensors["position_t"],
        longest=micro.longest,
        unpacking=unpacking,
        shared=len(share.counts) > 1,
    )
    return DeviceBatch(pack=pack, counts=share.counts, **tensors)


def pack(cu_seqlens: np.ndarray, device: torch.device, *, unpacks: bool = True) -> Pack:
    """Return the pack of segments with these boundaries, for a rank that holds all of their tokens."""
    cu_seqlens = cu_seqlens.astype(np.int32)
    length, nothing = np.diff(cu_seqlens), np.empty((0, 3), np.int64)
    unpacking = unpacking_of(cu_seqlens, np.zeros(len(length), np.int64), nothing) if unpacks else None
    boundaries = _boundaries(cu_seqlens, unpacking)
    position_T = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], length)
    tensors = copied({"position_T": position_T.astype(np.int64)} | boundaries, device)
    position = tensors.pop("position_T")
    return _pack(tensors, position, longest=int(length.max()), unpacking=unpacking, shared=False)


def copied(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays as tensors on ``device``: views of one buffer, which is copied once."""
    slots, size = slots_of(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    fill(host.numpy(), slots, arrays)
    buffer = host.to(device, non_blocking=True)
    tensors: dict[str, Tensor] = {}
    for name, slot in slots.items():
        dtype = torch.from_numpy(np.empty(0, slot.dtype)).dtype
        tensors[name] = buffer[slot.start : slot.stop].view(dtype).view(slot.shape)
    return tensors


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return ``tensors`` in float32 on ``device``; those that are on the host travel in one copy."""
    on_host = {
        str(number): tensor.float().numpy()
        for number, tensor in enumerate(tensors)
        if tensor.device.type == "cpu"
    }
    travelled = copied(on_host, device)
    return [travelled.get(str(number), tensor) for number, tensor in enumerate(tensors)]


def _boundaries(cu_seqlens: np.ndarray, unpacking: Unpacking | None) -> dict[str, np.ndarray]:
    arrays = {"cu_seqlens": cu_seqlens}
    if unpacking is None:
        return arrays
    arrays |= {"gather": unpacking.gather, "restore_T": unpacking.restore_T, "end_T": unpacking.end_T}
    return arrays | unpacking.branch_arrays


def _pack(
    tensors: Mapping[str, Tensor],
    position_t: Tensor,
    *,
    longest: int,
    unpacking: Unpacking | None,
    shared: bool,
) -> Pack:
    """shared: context-parallel ranks have parts of the pack."""
    cu_seqlens = tensors["cu_seqlens"]
    rotation.set_positions(cu_seqlens, position_t)
    made = Pack(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if shared:
        made.cu_seqlens_q_padded = made.cu_seqlens_kv_padded = cu_seqlens
    if unpacking is not None:
        made.unpacked = Unpacked(
            unpacking.shapes,
            tensors["gather"],
            tensors["restore_T"],
            PrefixTree(tensors["end_T"], position_t),
            _branch_batches(tensors, unpacking.branch_shapes),
        )
    return made


def _branch_batches(
    tensors: Mapping[str, Tensor], shapes: Sequence[tuple[int, int, int, int]]
) -> tuple[Branches, ...]:
    if not shapes:
        return ()
    rows, runs = [rows for rows, _, _, _ in shapes], [runs for *_, runs in shapes]
    parts = (
        tensors["queries"].split([rows * own for rows, own, _, _ in shapes]),
        tensors["last"].split(rows),
        tensors["run_starts"].split(runs),
        tensors["run_shifts"].split(runs),
    )
    return tuple(Branches(shape[:3], *each) for shape, *each in zip(shapes, *parts, strict=True))
