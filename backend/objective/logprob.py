"""Log-prob and entropy of chosen tokens from hidden states, without the logits as a whole, in float32.

``fused_logprob`` takes hidden states and the weight of the LM head, whose vocabulary may be split over ranks,
and works through the vocabulary one slice [T, columns] at a time:

    forward    slice = hidden @ weight[columns].T    -> running maximum, sum of exp, sum of exp * x
    backward   slice again -> its gradient d         -> grad_weight[columns] = d.T @ hidden, complete
                                                     -> grad_hidden += d @ weight[columns]

The slices cut the vocabulary, not the tokens. The ranks then exchange two small tensors per call instead of
per slice, each row of the weight's gradient is one product, summed in float32 by the product itself, and the
weight is read once. The price is computing the logits a second time: a fourth product besides the three of a
plain head. As many slices as fit into ``KEPT_BYTES`` are kept instead.

Shapes: T tokens, H hidden, V columns of the vocabulary on this rank, v columns of one slice.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.objective.softmax import Scratch, Softmax

SLICE_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
"""Logits per slice; they are held in float32 and twice over. On a CPU they fit its caches (8 MB), on a GPU
they keep it busy (256 MB)."""
MIN_COLUMNS = 512
"""Fewest columns of a slice, however many tokens there are: products of narrower matrices are slow."""
KEPT_BYTES = 192 * 2**20
"""Most bytes of logits that wait for the backward pass: two thirds of the logits of 1,024 tokens in bfloat16
with a vocabulary of 152 k."""


def fused_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup | None = None,
    float32_logits: bool = False,
    entropy_gradient: bool = False,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs (differentiable) and entropies of ``target_T`` at ``temperature``, float32 [T].

    The logits hidden @ weight.T never exist as a whole, neither forward nor backward.

    weight_VH: this rank's rows of the LM head, of the dtype of ``hidden_TH``. vocab: the true size of the
    vocabulary; rows past it are padding, with probability 0 and no gradient. group: the tensor-parallel
    group, None if the weight is whole. The gradient of ``hidden_TH`` is this rank's part; the code that
    spread the hidden states (Megatron's regions) sums it over the group.

    float32_logits: do not round the logits to the dtype of the operands. The products of the backward pass
    have that dtype either way. entropy_gradient: make the entropies differentiable too.
    weight_grad [V, H]: buffer to which the gradient of the weight is added; autograd then gets none for the
    weight, and no tensor of the weight's size is allocated.
    """
    waits = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    head = _Head(
        temperature=temperature,
        held=columns_of_rank(weight_VH.shape[0], vocab, group),
        logits_dtype=torch.float32 if float32_logits else hidden_TH.dtype,
        kept_bytes=KEPT_BYTES if waits else 0,
    )
    return _fused.apply(hidden_TH, weight_VH, target_T, head, group, entropy_gradient, weight_grad)


def columns_of_rank(columns: int, vocab: int, group: dist.ProcessGroup | None) -> range:
    """Return the part of the vocabulary that this rank holds in ``columns`` columns, without padding."""
    first = columns * (dist.get_rank(group) if group is not None else 0)
    return range(first, max(first, min(first + columns, vocab)))


class _Head:
    """The logits of hidden states, in slices of the vocabulary."""

    def __init__(
        self, *, temperature: float, held: range, logits_dtype: torch.dtype, kept_bytes: int
    ) -> None:
        self.temperature = temperature
        self.held = held
        self._dtype = logits_dtype
        self._room = kept_bytes
        self._kept: dict[int, Tensor] = {}

    def slices(self, hidden_TH: Tensor) -> list[slice]:
        tokens = len(hidden_TH)
        if not tokens:
            return []
        columns = max(MIN_COLUMNS, SLICE_ELEMENTS[hidden_TH.device.type] // tokens)
        count = -(-len(self.held) // columns)
        return [slice(i * columns, min((i + 1) * columns, len(self.held))) for i in range(count)]

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor, columns: slice) -> Tensor:
        """Return the logits of a slice, [T, v]. Kept after the first call if there is room, given away after
        the second.
        """
        kept = self._kept.pop(columns.start, None)
        if kept is not None:
            return kept
        logits_Tv = _product(hidden_TH, weight_VH[columns].T, self._dtype)
        if logits_Tv.nbytes <= self._room:
            self._room -= logits_Tv.nbytes
            self._kept[columns.start] = logits_Tv
        return logits_Tv


class _Context(Protocol):
    """The state that the forward pass leaves to the backward pass; the first four members are torch's."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    softmax: Softmax
    head: _Head
    entropy_gradient: bool
    weight_grad: Tensor | None


class _FusedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        head: _Head,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        softmax = Softmax(target_T, head.held, head.temperature)
        slices = head.slices(hidden_TH)
        scratch = _scratch_for(slices, hidden_TH)
        for columns in slices:
            softmax.add(head.logits(hidden_TH, weight_VH, columns), scratch, columns.start)
        logp_T, entropy_T = softmax.reduce(group)
        ctx.save_for_backward(hidden_TH, weight_VH)
        ctx.softmax, ctx.head = softmax, head
        ctx.entropy_gradient, ctx.weight_grad = entropy_gradient, weight_grad
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH = ctx.saved_tensors
        grad_T, entropy_grad_T = grads
        for_hidden, for_weight, *_ = ctx.needs_input_grad
        hidden_grad = hidden_TH.new_zeros(hidden_TH.shape, dtype=torch.float32) if for_hidden else None
        weight_grad = ctx.weight_grad
        if for_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight_VH)
        slices = ctx.head.slices(hidden_TH)
        scratch = _scratch_for(slices, hidden_TH)
        for columns in slices:
            logits_Tv = ctx.head.logits(hidden_TH, weight_VH, columns)
            entropy_grad = entropy_grad_T if ctx.entropy_gradient else None
            d_Tv = ctx.softmax.gradient(logits_Tv, scratch, columns.start, grad_T, entropy_grad)
            d_Tv = d_Tv.to(hidden_TH.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, d_Tv, weight_VH[columns])
            if for_weight and weight_grad is not None:
                _add_product(weight_grad[columns], d_Tv.T, hidden_TH)
        if hidden_grad is not None:
            hidden_grad = hidden_grad.to(hidden_TH.dtype)
        return hidden_grad, weight_grad if ctx.weight_grad is None else None, None, None, None, None, None


class _Fused(Protocol):
    """A typed view of ``_FusedLogProb``: torch's ``apply`` has no types."""

    @staticmethod
    def apply(
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        head: _Head,
        group: dist.ProcessGroup | None,
        entropy_gradient: bool,
        weight_grad: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


_fused: _Fused = _FusedLogProb


def _scratch_for(slices: list[slice], hidden_TH: Tensor) -> Scratch:
    widest = max((s.stop - s.start for s in slices), default=0)
    return Scratch(len(hidden_TH) * widest, hidden_TH.device)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, summed in float32 and rounded to ``dtype``."""
    if a.dtype is dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` in place."""
    if total.dtype is a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a @ b
