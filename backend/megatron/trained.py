"""A model that is being trained, the policy or another one: wrapped, with an optimizer, updated."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from backend.batching import MicroBatch
from backend.megatron import model
from backend.megatron.packed_model import Head, PackedModel
from configs.schema import ActorConfig


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
