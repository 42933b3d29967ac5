"""The end of the model: from hidden states to log-probs, without logits in between; or to values.

Megatron's GPTModel ends in its output layer. Here that layer passes hidden states on, the loss picks the
tokens that it is about, and only those are multiplied with the LM head.
"""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slipstream.backend.megatron.local_layers import copied_to_ranks
from slipstream.backend.objective.logprob import fused_logprob


class _WithGradient(torch.autograd.Function):
    """The weight, which gets a gradient of zero where it has none.

    That of the head goes straight to where DDP collects it. A DDP that reduces gradients during the backward
    pass has to be told by autograd as well that there is one.
    """

    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _PassOn(ColumnParallelLinear):
    def forward(self, input_: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        return input_, None


def pass_on_hidden_states(parts: list[GPTModel]) -> None:
    """From now on the last part gives [1, T, H] in the place of logits, under sequence parallelism its share.

    The output layer keeps its place, its weight and its name in checkpoints.
    """
    for part in parts:
        if part.post_process:
            part.output_layer.__class__ = _PassOn


class ValueHead(torch.nn.Module):
    """One value per token, float32 [T, 1, 1], whole on every tensor-parallel rank. At first all are 0."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self._gathers = config.sequence_parallel

    def forward(self, hidden_T1H: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        if self._gathers:  # then every rank has all tokens, and the same gradient
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return torch.nn.functional.linear(hidden_T1H.float(), self.weight.float()), None


def logprob_and_entropy(
    part: GPTModel,
    hidden_1TH: Tensor,
    index_M: Tensor,
    target_M: Tensor,
    *,
    temperature: float,
    vocab: int,
    float32_logits: bool,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of ``target_M`` after the tokens at ``index_M``: ``fused_logprob``.

    part: the last one of the model. Its head's gradient goes straight to where Megatron's DDP collects it.
    """
    layer = part.output_layer
    tied = part.share_embeddings_and_output_weights
    weight_VH = part.shared_embedding_or_output_weight() if tied else layer.weight
    weight_grad = getattr(weight_VH, "main_grad", None) if torch.is_grad_enabled() else None
    if weight_grad is not None and part.config.no_sync_func is not None:
        weight_VH = _WithGradient.apply(weight_VH)
    group = layer.tp_group if layer.tp_group.size() > 1 else None
    hidden_TH = hidden_1TH[0]
    if group is not None and layer.sequence_parallel:
        hidden_TH = gather_from_sequence_parallel_region(
            hidden_TH, group=group
        )  # sums gradients on the way back
    hidden_MH = hidden_TH.index_select(0, index_M)
    if group is not None and not layer.sequence_parallel:
        hidden_MH = copied_to_ranks(hidden_MH, group)
    return fused_logprob(
        hidden_MH,
        weight_VH,
        target_M,
        temperature=temperature,
        vocab=vocab,
        group=group,
        float32_logits=float32_logits,
        entropy_gradient=entropy_gradient,
        weight_grad=weight_grad,
    )
