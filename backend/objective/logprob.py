"""Log-prob and entropy of chosen tokens over a vocabulary that is split over ranks, in float32.

    x = logits / temperature        logp = x[target] - logsumexp(x)        entropy = logsumexp(x) - E[x]

Two ways in, with the same arithmetic. ``fused_logprob`` takes hidden states and the weight of the LM head,
and works through the vocabulary a slice [T, columns] at a time:

    forward    slice = hidden @ weight[columns].T    -> running maximum, sum of exp, sum of exp * x
    backward   slice again -> its gradient d         -> grad_weight[columns] = d.T @ hidden, complete
                                                     -> grad_hidden += d @ weight[columns]

Slices of the vocabulary and not of the tokens: then the ranks exchange two small tensors per call and not per
slice, each row of the weight's gradient is one product, summed in float32 by the product itself, and the
weight is read once. Making the logits a second time is the price, a fourth product besides the three of a
plain head. It is saved for as many slices as ``KEPT_BYTES`` hold.

``vocab_parallel_logprob`` takes logits that are there, and works through them a few rows at a time.

Shapes: T tokens, H hidden, V columns of the vocabulary on this rank; t and v for a part of them.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

SLICE_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
"""Logits looked at together, in float32 and twice over: on a CPU what its caches hold (8 MB), on a GPU enough
to keep it busy (256 MB)."""
MIN_COLUMNS = 512
"""However many tokens there are: products of narrower matrices are slow."""
KEPT_BYTES = 192 * 2**20
"""Logits that wait for the backward pass at most: two thirds of those of 1,024 tokens in bfloat16 with a
vocabulary of 152 k."""
FLOOR = -1e3
"""Stands for a distance of minus infinity to the largest logit: exp of it is 0 and 0 times it is 0."""


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
    """Log-probs (differentiable) and entropies of ``target_T`` at ``temperature``, float32 [T].

    The logits hidden @ weight.T are never there as a whole, neither forward nor backward.

    weight_VH: this rank's rows of the LM head, of the dtype of ``hidden_TH``. ``vocab``: the true size of the
    vocabulary; rows past it are padding, have probability 0 and no gradient. ``group``: the tensor-parallel
    group, None when the weight is whole. The gradient of ``hidden_TH`` is this rank's part, to be summed over
    the group by whoever has spread the hidden states (Megatron's regions do).

    float32_logits: do not round the logits to the dtype of the operands. What the backward pass multiplies is
    of that dtype either way. ``entropy_gradient``: the entropies are differentiable too.
    weight_grad [V, H]: gets the weight's gradient added, and autograd sees none; so no tensor of the weight's
    size is made.
    """
    waits = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    head = _Head(
        temperature=temperature,
        own=_own_columns(weight_VH.shape[0], vocab, group),
        logits_dtype=torch.float32 if float32_logits else hidden_TH.dtype,
        kept_bytes=KEPT_BYTES if waits else 0,
    )
    return _FusedLogProb.apply(hidden_TH, weight_VH, target_T, head, group, entropy_gradient, weight_grad)


def vocab_parallel_logprob(
    logits_TV: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup | None = None,
    entropy_gradient: bool = False,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same from logits: this rank's columns, any float type.

    overwrite: the backward pass puts the gradient into the memory of the logits, which nobody else may need.
    """
    own = _own_columns(logits_TV.shape[-1], vocab, group)
    return _LogitsLogProb.apply(logits_TV, target_T, temperature, own, group, entropy_gradient, overwrite)


def _own_columns(columns: int, vocab: int, group: dist.ProcessGroup | None) -> range:
    """What this rank has of the vocabulary, without padding."""
    first = columns * (dist.get_rank(group) if group is not None else 0)
    return range(first, max(first, min(first + columns, vocab)))


class _Softmax:
    """The softmax of every token, from blocks of its logits.

    ``add`` every block, ``reduce`` once, then ask for results and for gradients of blocks.
    """

    def __init__(self, target_T: Tensor, own: range, temperature: float) -> None:
        self._temperature = temperature
        self._local_T = target_T - own.start
        self._mine_T = (self._local_T >= 0) & (self._local_T < len(own))
        self._peak_T = target_T.new_full(target_T.shape, torch.finfo(torch.float32).min, dtype=torch.float32)
        self._sums_3T = self._peak_T.new_zeros(
            3, len(target_T)
        )  # exp, exp * distance to the peak, the target's x

    def add(self, logits_tv: Tensor, scratch: "_Scratch", rows: slice, first: int) -> None:
        """``rows`` are those of the block among all tokens, ``first`` its first column among this rank's."""
        x_tv = self._scaled(logits_tv, scratch)
        total_t, weighted_t, chosen_t = self._sums_3T[:, rows]
        column_t, here_t = self._places(rows, first, x_tv.shape[-1])
        chosen_t += torch.where(here_t, x_tv.gather(-1, column_t[:, None])[:, 0], 0.0)
        peak_t = torch.maximum(self._peak_T[rows], x_tv.amax(-1))
        self._move_peak(peak_t, rows)
        x_tv.sub_(peak_t[:, None]).clamp_(min=FLOOR)
        exp_tv = torch.exp(x_tv, out=scratch.second(x_tv.shape))
        total_t += exp_tv.sum(-1)
        weighted_t += exp_tv.mul_(x_tv).sum(-1)

    def _move_peak(self, peak_t: Tensor, rows: slice) -> None:
        total_t, weighted_t, _ = self._sums_3T[:, rows]
        lower_t = (self._peak_T[rows] - peak_t).clamp_(min=FLOOR)
        weighted_t.add_(lower_t * total_t).mul_(lower_t.exp())
        total_t.mul_(lower_t.exp())
        self._peak_T[rows] = peak_t

    def reduce(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, over the columns of all ranks: one MAX and one SUM."""
        if group is not None:
            peak_T = self._peak_T.clone()
            dist.all_reduce(peak_T, dist.ReduceOp.MAX, group)
            self._move_peak(peak_T, slice(None))
            dist.all_reduce(self._sums_3T, dist.ReduceOp.SUM, group)
        total_T, weighted_T, chosen_T = self._sums_3T
        self._log_total_T = total_T.log()
        self._entropy_T = self._log_total_T - weighted_T / total_T
        return chosen_T - self._peak_T - self._log_total_T, self._entropy_T.clone()

    def gradient(
        self,
        logits_tv: Tensor,
        scratch: "_Scratch",
        rows: slice,
        first: int,
        grad_T: Tensor,
        entropy_grad_T: Tensor | None,
    ) -> Tensor:
        """By the logits of a block, in float32 and in scratch memory.

        d logp / dx = onehot(target) - p        d entropy / dx = -p (log p + entropy)
        """
        grad_t = grad_T[rows] / self._temperature
        x_tv = self._scaled(logits_tv, scratch).sub_(self._peak_T[rows, None]).clamp_(min=FLOOR)
        scale_t = -1 / self._sums_3T[0, rows]
        if entropy_grad_T is None:
            d_tv = x_tv.exp_().mul_((scale_t * grad_t)[:, None])
        else:
            entropy_grad_t = entropy_grad_T[rows] / self._temperature
            exp_tv = torch.exp(x_tv, out=scratch.second(x_tv.shape)).mul_(scale_t[:, None])
            offset_t = self._entropy_T[rows] - self._log_total_T[rows]
            d_tv = (
                x_tv.add_(offset_t[:, None]).mul_(entropy_grad_t[:, None]).add_(grad_t[:, None]).mul_(exp_tv)
            )
        column_t, here_t = self._places(rows, first, d_tv.shape[-1])
        return d_tv.scatter_add_(-1, column_t[:, None], (grad_t * here_t)[:, None])

    def _scaled(self, logits_tv: Tensor, scratch: "_Scratch") -> Tensor:
        x_tv = scratch.first(logits_tv.shape).copy_(logits_tv)
        return x_tv if self._temperature == 1.0 else x_tv.div_(self._temperature)

    def _places(self, rows: slice, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """The targets' columns in a block, and which of them really are in it."""
        column_t = self._local_T[rows] - first
        return column_t.clamp(0, columns - 1), self._mine_T[rows] & (column_t >= 0) & (column_t < columns)


class _Scratch:
    """Two float32 blocks, made once and used for every one."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._two = torch.empty(2, elements, dtype=torch.float32, device=device)

    def first(self, shape: torch.Size) -> Tensor:
        return self._two[0, : shape.numel()].view(shape)

    def second(self, shape: torch.Size) -> Tensor:
        return self._two[1, : shape.numel()].view(shape)


class _Head:
    """The logits of hidden states, in slices of the vocabulary."""

    def __init__(self, *, temperature: float, own: range, logits_dtype: torch.dtype, kept_bytes: int) -> None:
        self.temperature = temperature
        self.own = own
        self._dtype = logits_dtype
        self._room = kept_bytes
        self._kept: dict[int, Tensor] = {}

    def slices(self, hidden_TH: Tensor) -> list[slice]:
        tokens = len(hidden_TH)
        if not tokens:
            return []
        columns = max(MIN_COLUMNS, SLICE_ELEMENTS[hidden_TH.device.type] // tokens)
        count = -(-len(self.own) // columns)
        return [slice(i * columns, min((i + 1) * columns, len(self.own))) for i in range(count)]

    def logits(self, hidden_TH: Tensor, weight_VH: Tensor, columns: slice) -> Tensor:
        """The first time they are kept if there is room, the second time they are given away."""
        kept = self._kept.pop(columns.start, None)
        if kept is not None:
            return kept
        found = _product(hidden_TH, weight_VH[columns].T, self._dtype)
        if found.nbytes <= self._room:
            self._room -= found.nbytes
            self._kept[columns.start] = found
        return found


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed in float32 and rounded to ``dtype``."""
    if a.dtype is dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class _FusedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, target_T, head: _Head, group, entropy_gradient, weight_grad):
        softmax = _Softmax(target_T, head.own, head.temperature)
        slices = head.slices(hidden_TH)
        scratch = _scratch_for(slices, hidden_TH)
        for columns in slices:
            logits_Tv = head.logits(hidden_TH, weight_VH, columns)
            softmax.add(logits_Tv, scratch, slice(None), columns.start)
        logp_T, entropy_T = softmax.reduce(group)
        ctx.save_for_backward(hidden_TH, weight_VH)
        ctx.softmax, ctx.head, ctx.entropy_gradient, ctx.weight_grad = (
            softmax,
            head,
            entropy_gradient,
            weight_grad,
        )
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T: Tensor, entropy_grad_T: Tensor):
        hidden_TH, weight_VH = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        hidden_grad = hidden_TH.new_zeros(hidden_TH.shape, dtype=torch.float32) if for_hidden else None
        weight_grad = ctx.weight_grad
        if for_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight_VH)
        slices = ctx.head.slices(hidden_TH)
        scratch = _scratch_for(slices, hidden_TH)
        for columns in slices:
            logits_Tv = ctx.head.logits(hidden_TH, weight_VH, columns)
            entropy_grad = entropy_grad_T if ctx.entropy_gradient else None
            d_Tv = ctx.softmax.gradient(
                logits_Tv, scratch, slice(None), columns.start, grad_T, entropy_grad
            ).to(hidden_TH.dtype)
            if hidden_grad is not None:
                _add_product(hidden_grad, d_Tv, weight_VH[columns])
            if for_weight:
                _add_product(weight_grad[columns], d_Tv.T, hidden_TH)
        if hidden_grad is not None:
            hidden_grad = hidden_grad.to(hidden_TH.dtype)
        return hidden_grad, weight_grad if ctx.weight_grad is None else None, None, None, None, None, None


def _scratch_for(slices: list[slice], hidden_TH: Tensor) -> _Scratch:
    widest = max((s.stop - s.start for s in slices), default=0)
    return _Scratch(len(hidden_TH) * widest, hidden_TH.device)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b"""
    if total.dtype is a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a @ b


class _LogitsLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, target_T, temperature, own: range, group, entropy_gradient, overwrite):
        softmax = _Softmax(target_T, own, temperature)
        if len(own):
            for rows, scratch in _row_blocks(logits_TV, len(own)):
                softmax.add(logits_TV[rows, : len(own)], scratch, rows, 0)
        logp_T, entropy_T = softmax.reduce(group)
        ctx.save_for_backward(logits_TV)
        ctx.softmax, ctx.own, ctx.entropy_gradient, ctx.overwrite = softmax, own, entropy_gradient, overwrite
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T: Tensor, entropy_grad_T: Tensor):
        (logits_TV,) = ctx.saved_tensors
        columns = len(ctx.own)
        grad_TV = logits_TV.detach() if ctx.overwrite else torch.empty_like(logits_TV)
        entropy_grad = entropy_grad_T if ctx.entropy_gradient else None
        if columns:
            for rows, scratch in _row_blocks(logits_TV, columns):
                logits_tv = logits_TV[rows, :columns]
                d_tv = ctx.softmax.gradient(logits_tv, scratch, rows, 0, grad_T, entropy_grad)
                grad_TV[rows, :columns] = d_tv
        grad_TV[:, columns:] = 0
        return grad_TV, None, None, None, None, None, None


def _row_blocks(logits_TV: Tensor, columns: int) -> Iterator[tuple[slice, _Scratch]]:
    rows = max(1, SLICE_ELEMENTS[logits_TV.device.type] // columns)
    scratch = _Scratch(min(rows, len(logits_TV)) * columns, logits_TV.device)
    for start in range(0, len(logits_TV), rows):
        yield slice(start, min(start + rows, len(logits_TV))), scratch
