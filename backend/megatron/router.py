"""Megatron's router of experts, with auxiliary losses and single experts of its own.

Shapes: t tokens of this rank, E experts.
"""

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """A router whose auxiliary losses are in proportion to the policy's loss in every layout.

    The load-balancing loss of a layer and a micro-batch of T tokens is coefficient * E * sum_e f_e P_e. Here
    f_e is the share of expert e in the T * k choices, and P_e is the mean of its probabilities (Switch
    Transformer, arXiv:2101.03961). The z-loss is the mean of log(sum_e exp(logit_e))^2 (ST-MoE,
    arXiv:2202.08906). Micro-batches count by their tokens.

    Megatron's own versions are not used. Gradients are divided by the number of tokens with loss, while
    Megatron multiplies these losses by the number of all tokens, prompts included, that a rank holds; until
    0.19, of one tensor-parallel rank alone.

    ``normalizes``: the weights of a token's experts sum to 1. Megatron sees to it for several experts only.
    """

    loss_share = 1.0
    """Tokens with loss for each token of the mini-batch, on this data-parallel rank."""

    def __init__(self, *args: object, normalizes: bool, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self._normalizes = normalizes

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        group = self.tp_cp_group
        chosen_E = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), group)
        share_E = chosen_E / (len(routing_map) * group.size() * self.topk)
        total = len(share_E) * (scores_for_aux_loss.sum(dim=0) * share_E).sum()
        return MoEAuxLossAutoScaler.apply(probs, coefficient * self.loss_share * total)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        total = torch.logsumexp(logits.float(), dim=-1).square().sum()
        return MoEAuxLossAutoScaler.apply(logits, coefficient * self.loss_share * total)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        probs_tE, chosen_tE = super().routing(logits, padding_mask)
        if self.topk == 1 and self._normalizes:
            scaling = self.config.moe_router_topk_scaling_factor or 1.0
            # The sum keeps the graph, by which auxiliary losses get their gradients.
            probs_tE = 0 * probs_tE + scaling * chosen_tE
        return probs_tE, chosen_tE
