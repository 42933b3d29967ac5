"""A model that is being trained, the policy or another one: wrapped, with an optimizer, updated."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import model, optimizer_state
from slipstream.backend.megatron.packed_model import Head, PackedModel
from slipstream.backend.megatron.resting import Resting
from slipstream.configs.schema import ActorConfig


class Update(NamedTuple):
    results: list[Any]
    """What each micro-batch's head gave; None but on the last pipeline stage."""
    grad_norm: float
    """Of all ranks, before clipping."""
    succeeded: bool
    """False: left out, as a gradient was not finite."""


class Trained:
    """This rank's parts in Megatron's DDP, and their optimizer. ``actor``: layout and settings of both."""

    def __init__(self, modules: list[GPTModel], actor: ActorConfig, dtype: torch.dtype) -> None:
        self.modules = modules
        self.parts = model.wrap_ddp(modules, actor)
        self.optimizer = model.build_optimizer(self.parts, actor, dtype)

    def update(
        self, packed: PackedModel, microbatches: Sequence[MicroBatch], heads: Sequence[Head], lr: float
    ) -> Update:
        """One optimizer update of ``packed``, which is of these parts, at learning rate ``lr``."""
        for part in self.parts:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        results = packed.run(microbatches, heads, forward_only=False)
        succeeded, grad_norm, _ = self.optimizer.step()
        return Update(results, float("nan") if grad_norm is None else float(grad_norm), bool(succeeded))

    def gather(self) -> None:
        """Bring together what the distributed optimizer has updated, where that would wait for the next
        forward pass (``overlap_param_gather``). Weights must not leave the trainer before.
        """
        for part in self.parts:
            if part.ddp_config.overlap_param_gather:
                part.start_param_sync(force_sync=True)

    def rest(self, resting: Resting, *, keep_weights: bool = False) -> None:
        """Give up the device's memory: gradients, the optimizer's state and, unless kept there, weights.

        Not for what is computed with it before ``resting`` wakes again.
        """
        self.optimizer.zero_grad()
        weights = [weight for module in self.modules for weight in module.parameters()]
        gradients = [
            buffer.grad_data for part in self.parts for buffer in part.buffers + part.expert_parallel_buffers
        ]
        held = optimizer_state.held(self.optimizer)
        if keep_weights:
            shared = {weight.untyped_storage() for weight in weights}
            held = [tensor for tensor in held if tensor.untyped_storage() not in shared]
            weights = []
        resting.rest(gradients, keep=False)  # the next update begins by setting them to zero
        resting.rest([*weights, *held])
