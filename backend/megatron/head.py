"""The end of a model: from hidden states to log-probs without logits in between, or to values.

Megatron's GPTModel ends in its output layer. Here that layer passes hidden states on, the loss selects the
tokens that it is about, and only those are multiplied with the LM head.

Shapes: T tokens of a micro-batch, M of them with loss, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slipstream.backend.megatron.local_layers import copied_to_ranks
from slipstream.backend.objective.logprob import HeadOptions, Implementation


class _WithGradient(torch.autograd.Function):
    """The weight, with a gradient of zero where autograd would see none.

    The gradient of the head goes straight into DDP's buffer. A DDP that reduces gradients during the backward
    pass starts when autograd reports the gradient, so autograd must see one.
    """

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return grad


class _PassOn(ColumnParallelLinear):
    def forward(self, input_: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        return input_, None


def pass_on_hidden_states(parts: Sequence[GPTModel]) -> None:
    """Make the last part return hidden states [1, T, H] instead of logits, under sequence parallelism its
    share of them.

    The output layer keeps its place, its weight and its name in checkpoints.
    """
    for part in parts:
        if part.post_process:
            part.output_layer.__class__ = _PassOn


class ValueHead(torch.nn.Module):
    """One value per token, float32 [T, 1, 1], whole on every tensor-parallel rank. Values start at 0."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._gathers = config.sequence_parallel

    def forward(self, hidden_T1H: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        if self._gathers:  # afterwards every rank has all tokens, and the same gradient
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden_T1H.float(), self.weight.float()), None


class HeadInputs(NamedTuple):
    """Operands of the LM head: hidden states and targets of the tokens with loss, and its weight."""

    hidden_MH: Tensor
    weight_VH: Tensor
    target_M: Tensor
    options: HeadOptions


def head_inputs(
    part: GPTModel,
    hidden_1TH: Tensor,
    index_M: Tensor,
    target_M: Tensor,
    *,
    temperature: float,
    vocab: int,
    float32_logits: bool,
    implementation: Implementation,
) -> HeadInputs:
    """Return what ``fused_logprob`` takes for ``target_M`` after the tokens at ``index_M``.

    part: the last part of the model. The gradient of its head goes straight into the buffer of DDP.
    """
    layer, weight_VH = part.output_layer, _head_weight(part)
    weight_grad = getattr(weight_VH, "main_grad", None) if torch.is_grad_enabled() else None
    if weight_grad is not None and part.config.no_sync_func is not None:
        weight_VH = cast("Tensor", _WithGradient.apply(weight_VH))
    tensor_group = cast("dist.ProcessGroup", layer.tp_group)
    group = tensor_group if tensor_group.size() > 1 else None
    hidden_TH = hidden_1TH[0]
    if group is not None and layer.sequence_parallel:
        # Sums gradients on the way back.
        hidden_TH = gather_from_sequence_parallel_region(hidden_TH, group=group)
    hidden_MH = hidden_TH.index_select(0, index_M)
    if group is not None and not layer.sequence_parallel:
        hidden_MH = copied_to_ranks(hidden_MH, group)
    options = HeadOptions(temperature, vocab, group, float32_logits, weight_grad, implementation)
    return HeadInputs(hidden_MH, weight_VH, target_M, options)


PADDING_LOGIT = -1e30
"""Logit of a row of the LM head past the vocabulary: probability 0, and a finite product with it."""


def logits(part: GPTModel, hidden_1TH: Tensor, *, vocab: int, float32_logits: bool) -> Tensor:
    """Return this tensor-parallel rank's logits of all tokens, float32 [1, T, V], with gradient.

    They are as large as the vocabulary: only for losses that are not about chosen tokens. ``part``: the last
    part of the model. ``vocab``: the true size of the vocabulary.
    """
    layer, weight_VH = part.output_layer, _head_weight(part)
    tensor_group = cast("dist.ProcessGroup", layer.tp_group)
    hidden_TH = hidden_1TH[0]
    first = 0
    if tensor_group.size() > 1:
        first = tensor_group.rank() * weight_VH.shape[0]
        if layer.sequence_parallel:
            hidden_TH = gather_from_sequence_parallel_region(hidden_TH, group=tensor_group)
        else:
            hidden_TH = copied_to_ranks(hidden_TH, tensor_group)
    if float32_logits:
        hidden_TH, weight_VH = hidden_TH.float(), weight_VH.float()
    logits_TV = torch.nn.functional.linear(hidden_TH, weight_VH).float()
    is_padding_V = torch.arange(first, first + weight_VH.shape[0], device=logits_TV.device) >= vocab
    return logits_TV.masked_fill(is_padding_V, PADDING_LOGIT)[None]


def _head_weight(part: GPTModel) -> Tensor:
    tied = part.share_embeddings_and_output_weights
    return cast("Tensor", part.shared_embedding_or_output_weight() if tied else part.output_layer.weight)
