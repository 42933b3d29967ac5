"""Megatron's router of experts, with auxiliary losses and single experts of its own.

Shapes: t tokens of this rank, E experts, k experts of a token.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class RouteReplay:
    """The experts of one router's tokens, kept in one pass and taken again in another.

    Takes the place of Megatron's ``RouterReplay``, which must be told which micro-batch a backward pass
    computes again. Only the choice is replayed: scores, and so gates and gradients, are those of the router's
    present weights.
    """

    def __init__(self) -> None:
        self.chosen_tk: Tensor | None = None
        """Experts of the tokens in the last pass, uint8 up to 256 experts, int16 beyond."""
        self._given_tk: Tensor | None = None
        self._trains = False
        self._again: list[Tensor | None] = []
        """Routes of the micro-batches whose activations the backward pass computes again, in its order."""

    def begin_update(self) -> None:
        """Forget what a pass has left that ended with an error."""
        self._again.clear()

    def begin(self, given_tk: Tensor | None, *, trains: bool) -> None:
        """Route the next micro-batch to ``given_tk``; None, and below 0: to experts that the router chooses.

        ``trains``: a backward pass follows, in which micro-batches come in the same order.
        """
        self._given_tk, self._trains = given_tk, trains

    def get_replay_topk(
        self,
        scores_tE: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of each token's experts, [t, k]. Megatron calls this method.

        Raises RuntimeError if the routes are of another number of tokens.
        """
        assert default_compute_topk is not None
        given_tk = self._given_tk
        if self._trains and not torch.is_grad_enabled():
            self._again.append(given_tk)  # a checkpoint: the backward pass calls the router again
        elif self._trains and self._again:
            given_tk = self._again.pop(0)
        scores_tk, index_tk = default_compute_topk(
            scores_tE, topk, num_groups=num_groups, group_topk=group_topk
        )
        if given_tk is not None:
            if given_tk.shape != index_tk.shape:
                raise RuntimeError(
                    f"routes of {tuple(given_tk.shape)} tokens and experts are replayed, expected "
                    f"{tuple(index_tk.shape)}: they are of another micro-batch"
                )
            index_tk = torch.where(given_tk < 0, index_tk, given_tk.long())
            scores_tk = scores_tE.gather(1, index_tk)
        self.chosen_tk = index_tk.to(torch.uint8 if scores_tE.shape[1] <= 256 else torch.int16)
        return scores_tk, index_tk


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
