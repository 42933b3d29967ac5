# pyright: basic
"""The softmax of blocks of logits as a pair of Triton kernels, each of which goes through a block once.

    add        logits -> running maximum, sum of exp, sum of exp * distance, logit of the target
    gradient   logits -> their gradient, in place

The products around them are cuBLAS's. Kernels that multiply too, so that logits never leave the registers,
were slower on an H100: their product ran at 550 TFLOP/s, cuBLAS's at 650, and reading or writing the logits
of 32k tokens costs 4 ms where a product takes 60. All arithmetic is in float32.

Triton runs these kernels on a GPU, or element by element on a CPU where TRITON_INTERPRET=1 was set before
this module is imported. Shapes: T tokens, K further choices, v columns of one block.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from slipstream.backend.objective.softmax import Scratch, Softmax

BLOCK = 4096
"""Most columns that a program holds at a time."""
WARPS = 8


@triton.jit
def add_kernel(
    logits,
    target,
    peak,
    total,
    weighted,
    chosen,
    first,
    columns,
    stride,
    temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Add the block's columns of one token to its sums."""
    row = tl.program_id(0).to(tl.int64)  # 16 k tokens times 152 k columns are more than 32 bits
    place = tl.arange(0, BLOCK)
    highest, summed = tl.load(peak + row), tl.load(total + row)
    spread = tl.load(weighted + row) if ENTROPY else 0.0
    for start in range(0, columns, BLOCK):
        inside = start + place < columns
        x = tl.load(logits + row * stride + start + place, mask=inside, other=0.0).to(tl.float32)
        # A finite floor, because the difference of two infinities is no number.
        x = tl.where(inside, x / temperature, -3.0e38)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        fallen = tl.maximum(highest - higher, -1.0e3)
        distance = tl.maximum(x - higher, -1.0e3)
        exp = tl.exp(distance)
        if ENTROPY:
            spread = (spread + fallen * summed) * tl.exp(fallen) + tl.sum(exp * distance, axis=0)
        summed = summed * tl.exp(fallen) + tl.sum(exp, axis=0)
        highest = higher
    tl.store(peak + row, highest)
    tl.store(total + row, summed)
    if ENTROPY:
        tl.store(weighted + row, spread)
    column = tl.load(target + row) - first
    is_here = (column >= 0) & (column < columns)
    x = tl.load(logits + row * stride + column, mask=is_here, other=0.0).to(tl.float32) / temperature
    tl.store(chosen + row, tl.load(chosen + row) + x)


@triton.jit
def gradient_kernel(
    logits,
    target,
    peak,
    log_total,
    entropy,
    grad,
    target_grad,
    entropy_grad,
    first,
    columns,
    stride,
    temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Overwrite logits of one token by their gradient.

    grad: factor of -p. target_grad: factor of onehot(target).
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    x = tl.load(logits + row * stride + place, mask=inside, other=0.0).to(tl.float32) / temperature
    # One after the other: their sum would lose the smaller of the two.
    log_p = tl.maximum(x - tl.load(peak + row) - tl.load(log_total + row), -1.0e3)
    scale = tl.load(grad + row)
    if ENTROPY:
        scale += tl.load(entropy_grad + row) * (log_p + tl.load(entropy + row))
    d = tl.where(place == tl.load(target + row) - first, tl.load(target_grad + row), 0.0)
    d = (d - tl.exp(log_p) * scale) / temperature
    tl.store(logits + row * stride + place, d.to(logits.dtype.element_ty), mask=inside)


class KernelSoftmax(Softmax):
    """A softmax whose blocks go through the kernels, without scratch memory."""

    def add(self, logits_Tv: Tensor, scratch: Scratch, first: int) -> None:
        """Add a block; ``first`` is its first column among this rank's."""
        tokens, columns = logits_Tv.shape
        if not tokens or not columns:
            return
        total_T, chosen_T = self._sums_kT[:2]
        block = _block(columns)
        add_kernel[(tokens,)](  # pyright: ignore[reportIndexIssue]
            logits_Tv,
            self.local_T,
            self._peak_T,
            total_T,
            self._sums_kT[-1],  # read and written for entropies alone
            chosen_T,
            first,
            columns,
            logits_Tv.stride(0),
            self._temperature,
            BLOCK=block,
            ENTROPY=self.has_entropy,
            num_warps=WARPS,
        )
        self._add_also(logits_Tv, first)

    def gradient(
        self,
        logits_Tv: Tensor,
        scratch: Scratch,
        first: int,
        grad_T: Tensor,
        entropy_grad_T: Tensor | None,
        also_grad_TK: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient with respect to the logits of a block, which it replaces."""
        tokens, columns = logits_Tv.shape
        if not tokens or not columns:
            return logits_Tv
        target_grad_T = grad_T.contiguous()
        # Each log-prob has its own -p.
        grad_T = target_grad_T if also_grad_TK is None else target_grad_T + also_grad_TK.sum(-1)
        block = _block(columns)
        gradient_kernel[tokens, -(-columns // block)](  # pyright: ignore[reportIndexIssue]
            logits_Tv,
            self.local_T,
            self._peak_T,
            self._log_total_T,
            self._entropy_T if entropy_grad_T is not None else grad_T,  # without entropies neither is read
            grad_T,
            target_grad_T,
            entropy_grad_T.contiguous() if entropy_grad_T is not None else grad_T,
            first,
            columns,
            logits_Tv.stride(0),
            self._temperature,
            BLOCK=block,
            ENTROPY=entropy_grad_T is not None,
            num_warps=WARPS,
        )
        return (
            logits_Tv if also_grad_TK is None else self._add_chosen_gradient(logits_Tv, first, also_grad_TK)
        )


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))
