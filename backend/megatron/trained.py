"""A model that is being trained, the policy or another one: wrapped in DDP, with an optimizer."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import model, optimizer_state
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
    """False: the update was skipped, because a gradient was not finite."""


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
        """Make one optimizer update at learning rate ``lr``. ``packed`` must run these parts."""
        for part in self.parts:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        results = packed.train(microbatches, heads)
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
        gradients = [
            buffer.grad_data
            for part in self.parts
            for buffer in [*cast("_Buffers", part).buffers, *part.expert_parallel_buffers]
        ]
        state = optimizer_state.held(self.optimizer)
        if keep_weights:
            shared = {weight.untyped_storage() for weight in weights}
            state = [tensor for tensor in state if tensor.untyped_storage() not in shared]
            weights = []
        resting.rest(gradients, keep=False)  # the next update begins by zeroing them
        resting.rest([*weights, *state])


class _Buffer(Protocol):
    grad_data: Tensor


class _Buffers(Protocol):
    buffers: list[_Buffer]
    """DDP's buffers of gradients, which replace the method of this name of torch's modules."""
