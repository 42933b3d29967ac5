# pyright: basic
"""The softmax of the LM head as a pair of Triton kernels, in which logits never leave the registers.

    partials   tile = hidden @ weight.T     -> maximum, sum of exp, sum of exp * distance, logit of the target
    gradient   the same tile once more      -> its gradient, rounded to the dtype of the hidden states

A tile has BLOCK_T tokens and BLOCK_V columns of the vocabulary. A program of ``partials`` goes through the
tiles of SPLIT columns; the splits are combined afterwards (``Softmax.add_partials``), and so are the ranks of
a vocabulary that is split over them. All arithmetic is in float32.

Triton runs these kernels on a GPU, or element by element on a CPU where TRITON_INTERPRET=1 was set before
this module is imported. Shapes: T tokens, H hidden, V columns of this rank, v columns of one slice, S splits.
"""

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


class Tiles(NamedTuple):
    """Sizes of the tiles and of what one program does."""

    tokens: int
    columns: int
    width: int
    """Hidden dimensions that one product takes at a time."""
    split: int
    """Columns that one program of ``partials`` goes through: a multiple of ``columns``."""
    warps: int = 8
    stages: int = 3
    """Loads that are under way at a time. Tokens, columns, width and stages decide the shared memory: 96 KiB
    of the 227 KiB of an H100's multiprocessor."""


TILES = {2: Tiles(128, 128, 64, 8192), 4: Tiles(64, 64, 64, 8192, warps=4)}
"""By the bytes of an element of the hidden states."""


class Partials(NamedTuple):
    """Sums over the columns of each split, float32 [S, T]."""

    peak: Tensor
    total: Tensor
    """Sum of exp(x - peak)."""
    weighted: Tensor
    """Sum of exp(x - peak) * (x - peak); 0 unless entropies are asked for."""
    chosen: Tensor
    """x of the target, 0 where the target is in no column of the split."""


@triton.jit
def _logits(
    hidden,
    weight,
    row,
    column,
    tokens,
    columns,
    width,
    hidden_stride,
    weight_stride,
    temperature,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Return a tile of logits / temperature, float32 [BLOCK_T, BLOCK_V]."""
    place = tl.arange(0, BLOCK_H)
    # 152 k columns times 16 k dimensions are more than 32 bits.
    hidden_at = hidden + row.to(tl.int64)[:, None] * hidden_stride + place[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * weight_stride + place[:, None]
    here = (row < tokens)[:, None]
    held = (column < columns)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, BLOCK_H):
        inside = place < width - start
        a = tl.load(hidden_at + start, mask=here & inside[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=held & inside[:, None], other=0.0)
        if WIDENED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if ROUNDED:
        total = total.to(hidden.dtype.element_ty).to(tl.float32)
    return total / temperature


@triton.jit
def partials_kernel(
    hidden,
    weight,
    target,
    peak_out,
    total_out,
    weighted_out,
    chosen_out,
    tokens,
    columns,
    width,
    hidden_stride,
    weight_stride,
    temperature,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLIT: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Write the partials of BLOCK_T tokens over SPLIT columns."""
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    here = row < tokens
    wanted = tl.load(target + row, mask=here, other=-1)
    # A finite floor, because the difference of two infinities is no number.
    peak = tl.full((BLOCK_T,), -3.0e38, dtype=tl.float32)
    total = tl.zeros((BLOCK_T,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_T,), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for tile in range(0, SPLIT, BLOCK_V):
        column = split * SPLIT + tile + tl.arange(0, BLOCK_V)
        x = _logits(
            hidden,
            weight,
            row,
            column,
            tokens,
            columns,
            width,
            hidden_stride,
            weight_stride,
            temperature,
            BLOCK_T,
            BLOCK_V,
            BLOCK_H,
            ROUNDED,
            PRECISION,
            WIDENED,
        )
        held = (column < columns)[None, :]
        chosen += tl.sum(tl.where((column[None, :] == wanted[:, None]) & held, x, 0.0), axis=1)
        x = tl.where(held, x, -3.0e38)
        higher = tl.maximum(peak, tl.max(x, axis=1))
        fallen = peak - higher
        shrink = tl.exp(fallen)
        distance = x - higher[:, None]
        exp = tl.where(held, tl.exp(distance), 0.0)
        if ENTROPY:
            weighted = (weighted + tl.maximum(fallen, -1.0e3) * total) * shrink
            weighted += tl.sum(exp * tl.maximum(distance, -1.0e3), axis=1)
        total = total * shrink + tl.sum(exp, axis=1)
        peak = higher
    place = split.to(tl.int64) * tokens + row
    tl.store(peak_out + place, peak, mask=here)
    tl.store(total_out + place, total, mask=here)
    tl.store(chosen_out + place, chosen, mask=here)
    if ENTROPY:
        tl.store(weighted_out + place, weighted, mask=here)


@triton.jit
def gradient_kernel(
    hidden,
    weight,
    target,
    peak,
    log_total,
    entropy,
    grad,
    entropy_grad,
    out,
    tokens,
    first,
    stop,
    width,
    hidden_stride,
    weight_stride,
    temperature,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
):
    """Write a tile of the gradient with respect to the logits of the columns ``first`` to ``stop``.

    d logp / dx = onehot(target) - p        d entropy / dx = -p (log p + entropy)
    """
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = first + tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    here = row < tokens
    x = _logits(
        hidden,
        weight,
        row,
        column,
        tokens,
        stop,
        width,
        hidden_stride,
        weight_stride,
        temperature,
        BLOCK_T,
        BLOCK_V,
        BLOCK_H,
        ROUNDED,
        PRECISION,
        WIDENED,
    )
    # One after the other: their sum would lose the smaller of the two.
    x -= tl.load(peak + row, mask=here, other=0.0)[:, None]
    log_p = x - tl.load(log_total + row, mask=here, other=0.0)[:, None]
    p = tl.exp(log_p)
    scale = tl.load(grad + row, mask=here, other=0.0)[:, None]
    d = tl.where(column[None, :] == tl.load(target + row, mask=here, other=-1)[:, None], scale, 0.0)
    if ENTROPY:
        surprise = tl.maximum(log_p, -1.0e3) + tl.load(entropy + row, mask=here, other=0.0)[:, None]
        scale += tl.load(entropy_grad + row, mask=here, other=0.0)[:, None] * surprise
    d -= p * scale
    place = row.to(tl.int64)[:, None] * (stop - first) + (column - first)[None, :]
    inside = here[:, None] & (column < stop)[None, :]
    tl.store(out + place, (d / temperature).to(out.dtype.element_ty), mask=inside)


class HeadKernels:
    """Both kernels on one head's operands.

    weight_VH: rows of the head whose first ``columns`` are tokens of the vocabulary, the others padding.
    local_T: the targets as columns of this rank; outside 0 to ``columns`` for a target of another rank.
    rounded: round the logits to the dtype of the operands.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        local_T: Tensor,
        *,
        columns: int,
        temperature: float,
        rounded: bool,
        tiles: Tiles | None = None,
    ) -> None:
        if hidden_TH.dtype is not weight_VH.dtype or hidden_TH.itemsize not in TILES:
            raise ValueError(
                f"the kernels of the LM head take hidden states and a weight of one dtype of 2 or 4 bytes; "
                f"they are {hidden_TH.dtype} and {weight_VH.dtype}: set actor.lm_head to chunked"
            )
        self._hidden_TH, self._weight_VH = hidden_TH.contiguous(), weight_VH.contiguous()
        self._local_T = local_T
        self._columns, self._temperature, self._rounded = columns, temperature, rounded
        self._tiles = tiles or TILES[hidden_TH.itemsize]

    def partials(self, *, entropy: bool) -> Partials:
        """Return the partials of all splits; none if there are no tokens or no columns."""
        tokens, tiles = len(self._hidden_TH), self._tiles
        splits = -(-self._columns // tiles.split) if tokens else 0
        sums = self._hidden_TH.new_zeros(4, splits, tokens, dtype=torch.float32)
        partials = Partials(*sums)
        if splits:
            grid = -(-tokens // tiles.tokens), splits
            partials_kernel[grid](  # pyright: ignore[reportIndexIssue]
                self._hidden_TH,
                self._weight_VH,
                self._local_T,
                *partials,
                tokens,
                self._columns,
                *self._sizes(),
                SPLIT=tiles.split,
                ENTROPY=entropy,
                **self._options(),
            )
        return partials

    def gradient(
        self,
        columns: slice,
        peak_T: Tensor,
        log_total_T: Tensor,
        grad_T: Tensor,
        entropy: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Return the gradient with respect to the logits of a slice, [T, v], in the dtype of the operands.

        peak_T, log_total_T: the largest of the logits / temperature over the whole vocabulary, and the
        logarithm of the sum of exp of the distances to it. entropy: entropies, and the gradients of them.
        """
        entropy_T, entropy_grad_T = entropy or (grad_T, grad_T)  # the kernel reads neither without entropy
        tokens, tiles = len(self._hidden_TH), self._tiles
        d_Tv = self._hidden_TH.new_empty(tokens, columns.stop - columns.start)
        grid = -(-tokens // tiles.tokens), -(-d_Tv.shape[1] // tiles.columns)
        gradient_kernel[grid](  # pyright: ignore[reportIndexIssue]
            self._hidden_TH,
            self._weight_VH,
            self._local_T,
            peak_T,
            log_total_T,
            entropy_T,
            grad_T.contiguous(),
            entropy_grad_T.contiguous(),
            d_Tv,
            tokens,
            columns.start,
            columns.stop,
            *self._sizes(),
            ENTROPY=entropy is not None,
            **self._options(),
        )
        return d_Tv

    def _sizes(self) -> tuple[int, int, int, float]:
        hidden_TH, weight_VH = self._hidden_TH, self._weight_VH
        return hidden_TH.shape[1], hidden_TH.stride(0), weight_VH.stride(0), self._temperature

    def _options(self) -> dict[str, object]:
        tiles = self._tiles
        return {
            "BLOCK_T": tiles.tokens,
            "BLOCK_V": tiles.columns,
            "BLOCK_H": tiles.width,
            "ROUNDED": self._rounded,
            # Without effect on 16 bits; float32 must not be cut to TF32.
            "PRECISION": "ieee",
            # The interpreter multiplies the bits of bfloat16 as integers.
            "WIDENED": self._hidden_TH.device.type == "cpu",
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
