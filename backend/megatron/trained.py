"""A model that is being trained, the policy or another one: wrapped in DDP, with an optimizer."""

from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import finite, model, optimizer_state
from slipstream.backend.megatron.packed_model import LossHead, PackedModel
from slipstream.backend.megatron.resting import Resting
from slipstream.configs.schema import ActorConfig

R = TypeVar("R")


class Update(NamedTuple, Generic[R]):
    """One optimizer update."""

    results: list[R]
    """Result of each micro-batch's head on the last pipeline stage; empty elsewhere."""
    grad_norm: float
    """Norm of the gradient over all ranks, before clipping."""
    succeeded: bool
    """False: no rank has made the update, because a loss or a gradient of some rank is not finite."""


class Trained:
    """This rank's parts of a model in Megatron's DDP, and their optimizer.

    ``actor``: layout and settings of both.
    """

    def __init__(self, modules: list[GPTModel], actor: ActorConfig, dtype: torch.dtype) -> None:
        self.modules = modules
        self.parts = model.wrap_ddp(modules, actor)
        self.optimizer = model.build_optimizer(self.parts, actor, dtype)

    def update(
        self, packed: PackedModel, microbatches: Sequence[MicroBatch], heads: Sequence[LossHead[R]], lr: float
    ) -> Update[R]:
        """Make one optimizer update at learning rate ``lr``. ``packed`` must run these parts.

        If a loss or a gradient of any rank is not finite, no rank makes it: weights and optimizer state stay
        as they are on all of them. Collective over all ranks.
        """
        for part in self.parts:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        losses: list[Tensor] = []
        results = packed.train(microbatches, [partial(_noted, losses, head) for head in heads])
        if not finite.update_is_finite(self.parts, losses):
            return Update(results, float("nan"), False)
        succeeded, grad_norm, _ = cast("tuple[bool, float | Tensor | None, object]", self.optimizer.step())
        return Update(results, float("nan") if grad_norm is None else float(grad_norm), bool(succeeded))

    def gather(self) -> None:
        """Gather the weights that the distributed optimizer has updated.

        With ``overlap_param_gather`` the gathering would wait for the next forward pass; weights must not
        leave the trainer before.
        """
        for part in self.parts:
            if part.ddp_config.overlap_param_gather:
                part.start_param_sync(force_sync=True)

    def rest(self, resting: Resting, *, keep_weights: bool = False) -> None:
        """Give up the device memory of gradients, of the optimizer's state and, unless kept, of weights.

        Nothing may be computed with them until ``resting`` wakes.
        """
        self.optimizer.zero_grad()
        weights: list[Tensor] = [weight for module in self.modules for weight in module.parameters()]
        state = optimizer_state.held(self.optimizer)
        if keep_weights:
            shared = {weight.untyped_storage() for weight in weights}
            state = [tensor for tensor in state if tensor.untyped_storage() not in shared]
            weights = []
        # The next update begins by zeroing the gradients.
        resting.rest(finite.gradient_buffers(self.parts), keep=False)
        resting.rest([*weights, *state])


def _noted(losses: list[Tensor], head: LossHead[R], output: Tensor) -> tuple[Tensor, Tensor, R]:
    """Call ``head``, and add its loss to ``losses``."""
    loss, count, result = head(output)
    losses.append(loss.detach())
    return loss, count, result
