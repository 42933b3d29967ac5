"""Log-prob and entropy of chosen tokens from hidden states, without the logits as a whole, in float32.

``fused_logprob`` takes hidden states and the weight of the LM head, whose vocabulary may be split over ranks,
and works through the vocabulary one slice [T, columns] at a time. With the implementation ``chunked``:

    forward    slice = hidden @ weight[columns].T    -> running maximum, sum of exp, sum of exp * x
    backward   slice again -> its gradient d         -> grad_weight[columns] = d.T @ hidden, complete
                                                     -> grad_hidden += d @ weight[columns]

The slices cut the vocabulary, not the tokens. The ranks then exchange two small tensors per call instead of
per slice, each row of the weight's gradient is one product, summed in float32 by the product itself, and the
weight is read once. The price is computing the logits a second time: a fourth product besides the three of a
plain head. As many slices as fit into ``KEPT_BYTES`` are kept instead.

Shapes: T tokens, K further choices at each, H hidden, V columns of the vocabulary on this rank, v columns of
one slice.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.objective.softmax import Scratch, Softmax

Implementation = Literal["chunked", "triton"]
"""Ways through the logits of a slice. ``chunked``: PyTorch's element-wise operations, in scratch memory.
``triton``: one kernel forward and one backward, in place (``head_kernels``)."""

SLICE_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
"""Logits per slice; they are held in float32 and twice over. On a CPU they fit its caches (8 MB), on a GPU
they keep it busy (256 MB)."""
MIN_COLUMNS = 512
"""Fewest columns of a slice, however many tokens there are: products of narrower matrices are slow."""
ALIGNMENT = 128
"""Slices of more columns have a multiple of it: tensor cores want rows of multiples of 16 bytes."""
KEPT_BYTES = 192 * 2**20
"""Most bytes of logits that wait for the backward pass: two thirds of the logits of 1,024 tokens in bfloat16
with a vocabulary of 152 k."""


@dataclass(frozen=True)
class HeadOptions:
    """Settings of a head that its tokens share.

    vocab: the true size of the vocabulary; rows of the weight past it are padding, with probability 0 and no
    gradient. group: the tensor-parallel group, None if the weight is whole. float32_logits: do not round the
    logits to the dtype of the operands; the products of the backward pass have that dtype either way.
    weight_grad [V, H]: buffer to which the gradient of the weight is added; autograd then gets none for the
    weight, and no tensor of the weight's size is allocated.
    """

    temperature: float
    vocab: int
    group: dist.ProcessGroup | None = None
    float32_logits: bool = False
    weight_grad: Tensor | None = None
    implementation: Implementation = "chunked"


def fused_logprob(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, options: HeadOptions) -> Tensor:
    """Return log-probs (differentiable) of ``target_T`` at the options' temperature, float32 [T].

    The logits hidden @ weight.T never exist as a whole, neither forward nor backward.

    weight_VH: this rank's rows of the LM head, of the dtype of ``hidden_TH``. The gradient of ``hidden_TH``
    is this rank's part; the code that spread the hidden states (Megatron's regions) sums it over the group.
    """
    return _apply(hidden_TH, weight_VH, target_T, options, "none")[0]


def fused_logprob_and_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    options: HeadOptions,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs as ``fused_logprob`` does, and entropies, float32 [T].

    entropy_gradient: make the entropies differentiable too.
    """
    entropy = "gradient" if entropy_gradient else "value"
    logp_T, entropy_T, _ = _apply(hidden_TH, weight_VH, target_T, options, entropy)
    assert entropy_T is not None
    return logp_T, entropy_T


def fused_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    also_TK: Tensor,
    options: HeadOptions,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``fused_logprob_and_entropy`` does, and log-probs (differentiable) of ``also_TK``, [T, K].

    also_TK (int64): further token ids at each place. The log-prob of an id outside the vocabulary means
    nothing, and must get no gradient.
    """
    entropy = "gradient" if entropy_gradient else "value"
    logp_T, entropy_T, also_logp_TK = _apply(hidden_TH, weight_VH, target_T, options, entropy, also_TK)
    assert entropy_T is not None
    assert also_logp_TK is not None
    return logp_T, entropy_T, also_logp_TK


_Entropy = Literal["none", "value", "gradient"]


def _apply(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    options: HeadOptions,
    entropy: _Entropy,
    also_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    held = columns_of_rank(weight_VH.shape[0], options.vocab, options.group)
    softmax = _softmax_class(options)(
        target_T, held, options.temperature, entropy=entropy != "none", also_TK=also_TK
    )
    waits = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    head = _Head(
        softmax,
        columns=len(held),
        logits_dtype=torch.float32 if options.float32_logits else hidden_TH.dtype,
        blocks=0 if options.implementation == "triton" else 1 if entropy == "none" else 2,
        kept_bytes=KEPT_BYTES if waits else 0,
    )
    return _fused.apply(hidden_TH, weight_VH, _Call(softmax, head, options, entropy))


def _softmax_class(options: HeadOptions) -> type[Softmax]:
    if options.implementation == "chunked":
        return Softmax
    # Triton is only installed where it can be used.
    from slipstream.backend.objective.head_kernels import KernelSoftmax

    return KernelSoftmax


def columns_of_rank(columns: int, vocab: int, group: dist.ProcessGroup | None) -> range:
    """Return the part of the vocabulary that this rank holds in ``columns`` columns, without padding."""
    first = columns * (dist.get_rank(group) if group is not None else 0)
    return range(first, max(first, min(first + columns, vocab)))


def _slices(hidden_TH: Tensor, columns: int) -> list[slice]:
    tokens = len(hidden_TH)
    if not tokens:
        return []
    width = max(MIN_COLUMNS, SLICE_ELEMENTS[hidden_TH.device.type] // tokens)
    if width > ALIGNMENT:
        width -= width % ALIGNMENT
    return [slice(first, min(first + width, columns)) for first in range(0, columns, width)]


@dataclass
class _Head:
    """The logits of hidden states, in slices of the vocabulary."""

    softmax: Softmax
    columns: int
    logits_dtype: torch.dtype
    blocks: int
    """Blocks of scratch memory of the forward pass; none for kernels."""
    kept_bytes: int
    """Room for logits that wait for the backward pass."""
    _kept: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _scratch: Scratch | None = None

    def slices(self, hidden_TH: Tensor) -> list[slice]:
        return _slices(hidden_TH, self.columns)

    def accumulate(self, hidden_TH: Tensor, weight_VH: Tensor) -> None:
        """Add all logits to the softmax."""
        slices = self.slices(hidden_TH)
        scratch = _scratch_for(slices, hidden_TH, self.blocks)
        for columns in slices:
            self.softmax.add(self._logits(hidden_TH, weight_VH, columns), scratch, columns.start)

    def gradient(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        columns: slice,
        grad_T: Tensor,
        entropy_grad_T: Tensor | None,
        also_grad_TK: Tensor | None,
    ) -> Tensor:
        """Return the gradient with respect to the logits of a slice, [T, v], in the dtype of the operands."""
        logits_Tv = self._logits(hidden_TH, weight_VH, columns)
        slices = self.slices(hidden_TH)
        if self._scratch is None:
            self._scratch = _scratch_for(
                slices, hidden_TH, min(self.blocks, 1 if entropy_grad_T is None else 2)
            )
        d_Tv = self.softmax.gradient(
            logits_Tv, self._scratch, columns.start, grad_T, entropy_grad_T, also_grad_TK
        )
        if columns == slices[-1]:
            self._scratch = None
        return d_Tv.to(hidden_TH.dtype)

    def _logits(self, hidden_TH: Tensor, weight_VH: Tensor, columns: slice) -> Tensor:
        """Return the logits of a slice, [T, v]. Kept after the first call if there is room, given away after
        the second.
        """
        kept = self._kept.pop(columns.start, None)
        if kept is not None:
            return kept
        logits_Tv = _product(hidden_TH, weight_VH[columns].T, self.logits_dtype)
        if logits_Tv.nbytes <= self.kept_bytes:
            self.kept_bytes -= logits_Tv.nbytes
            self._kept[columns.start] = logits_Tv
        return logits_Tv


@dataclass(frozen=True)
class _Call:
    """One call of the head, without the tensors that autograd follows."""

    softmax: Softmax
    head: _Head
    options: HeadOptions
    entropy: _Entropy


class _Context(Protocol):
    """The state that the forward pass leaves to the backward pass; the first four members are torch's."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    call: _Call


class _FusedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, hidden_TH: Tensor, weight_VH: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        call.head.accumulate(hidden_TH, weight_VH)
        logp_T, entropy_T, also_TK = call.softmax.reduce(call.options.group)
        ctx.save_for_backward(hidden_TH, weight_VH)
        ctx.call = call
        if entropy_T is not None and call.entropy != "gradient":
            ctx.mark_non_differentiable(entropy_T)
        return logp_T, entropy_T, also_TK

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH = ctx.saved_tensors
        grad_T, entropy_grad_T, also_grad_TK = grads
        call, head = ctx.call, ctx.call.head
        for_hidden, for_weight, *_ = ctx.needs_input_grad
        hidden_grad = hidden_TH.new_zeros(hidden_TH.shape, dtype=torch.float32) if for_hidden else None
        weight_grad = call.options.weight_grad
        if for_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight_VH)
        for columns in head.slices(hidden_TH):
            entropy_grad = entropy_grad_T if call.entropy == "gradient" else None
            also_grad = also_grad_TK if call.softmax.also_local_TK is not None else None
            d_Tv = head.gradient(hidden_TH, weight_VH, columns, grad_T, entropy_grad, also_grad)
            if hidden_grad is not None:
                _add_product(hidden_grad, d_Tv, weight_VH[columns])
            if for_weight and weight_grad is not None:
                _add_product(weight_grad[columns], d_Tv.T, hidden_TH)
        if hidden_grad is not None:
            hidden_grad = hidden_grad.to(hidden_TH.dtype)
        return hidden_grad, weight_grad if call.options.weight_grad is None else None, None


class _Fused(Protocol):
    """A typed view of ``_FusedLogProb``: torch's ``apply`` has no types."""

    @staticmethod
    def apply(
        hidden_TH: Tensor, weight_VH: Tensor, call: _Call, /
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


_fused: _Fused = _FusedLogProb


def _scratch_for(slices: list[slice], hidden_TH: Tensor, blocks: int) -> Scratch:
    widest = max((s.stop - s.start for s in slices), default=0)
    return Scratch(len(hidden_TH) * widest, hidden_TH.device, blocks)


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
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
