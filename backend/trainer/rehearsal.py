"""A forward and a backward pass at the largest micro-batch, before an engine measures the free memory.

An engine on the trainer's GPU sizes its KV cache once, at its start. What the trainer's first step takes and
never gives back (NCCL groups that have not been used yet, workspaces, loaded kernels) would be missing when
the engine takes its memory back. A micro-batch that does not fit ends the run here, and not after the
engines have started.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.configs.schema import ActorConfig
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span, TrajectoryBuilder

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.packed_model import LanguageModel, LossHead, PackedModel, ValueModel
    from slipstream.backend.megatron.trained import Trained


def largest_microbatches(
    actor: ActorConfig, new_tokens: int, *, positions: int, vocab: int
) -> list[MicroBatch]:
    """Return as many micro-batches of the largest size as a pipeline has in flight.

    ``new_tokens``: of the longest completion. ``positions``: of the model's context. All of its tokens but
    the first of each trajectory carry loss.
    """
    parallel = actor.parallel
    total = max(actor.largest_microbatch(new_tokens), 2)
    lengths = [positions] * (total // positions) + ([total % positions] if total % positions > 1 else [])
    draw = np.random.default_rng(0)  # equal tokens would all go to the same experts
    trajectories = []
    for length in lengths:
        first, *rest = draw.integers(vocab, size=length).tolist()
        n = len(rest)
        text = TrajectoryBuilder([first])
        text.add_completion(Completion(tuple(rest), (0.0,) * n, (Span(0, 0, n),), Finish.LENGTH))
        trajectories.append(text.build())
    batch = TrainBatch(0, tuple(trajectories), np.arange(len(lengths)))
    micro = assemble(
        batch,
        list(range(len(lengths))),
        parallel.length_multiple,
        trajectory_multiple=parallel.trajectory_multiple,
    )
    return [micro] * (parallel.pipeline * (2 if parallel.virtual_pipeline > 1 else 1))


def rehearse_policy(
    trained: "Trained", policy: "LanguageModel", microbatches: Sequence[MicroBatch], *, entropy: bool
) -> None:
    """Run the policy over ``microbatches``. ``entropy``: the loss has a term of it. Collective."""

    def head(output: Tensor) -> tuple[Tensor, Tensor, None]:
        micro = microbatches[0]
        logp_M, entropy_M = policy.logprob_and_entropy(micro, output, 1.0, entropy_gradient=entropy)
        return -(logp_M.sum() + (entropy_M.sum() if entropy else 0)), policy.on_device(micro).count, None

    _rehearse(trained, policy, microbatches, head)


def rehearse_critic(trained: "Trained", critic: "ValueModel", microbatches: Sequence[MicroBatch]) -> None:
    """Run the critic over ``microbatches``. Collective."""

    def head(output: Tensor) -> tuple[Tensor, Tensor, None]:
        micro = microbatches[0]
        return critic.values_of(micro, output).sum(), critic.on_device(micro).count, None

    _rehearse(trained, critic, microbatches, head)


def _rehearse(
    trained: "Trained", packed: "PackedModel", microbatches: Sequence[MicroBatch], head: "LossHead[None]"
) -> None:
    with _unchanged(trained.modules):
        for part in trained.parts:
            part.zero_grad_buffer()
        packed.train(microbatches, [head] * len(microbatches))
        for part in trained.parts:
            part.zero_grad_buffer()


@contextmanager
def _unchanged(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore what a pass without an update changes: buffers, such as the biases of routers, and the states
    of random numbers."""
    from slipstream.backend.megatron import random_state

    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    states = random_state.capture()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        random_state.restore(states)
