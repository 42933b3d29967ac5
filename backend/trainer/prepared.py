"""A micro-batch with everything that is computed before it is trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch


@dataclass(frozen=True)
class Scores:
    """Outputs of models for the M tokens with loss, float32 [M] each.

    None: the recipe does not ask for the model, or this is not the last pipeline stage.
    """

    proximal_M: Tensor | None
    """Log-probs under the policy that the step starts from. Also None where the training pass gives them: in
    the first mini-batch, unless advantages depend on them."""
    reference_M: Tensor | None
    teacher_M: Tensor | None
    """Log-probs under a teacher that the trainer holds."""
    value_M: Tensor | None
    """Values by the critic."""


@dataclass(frozen=True)
class Targets:
    """Targets of the policy and the critic for the M tokens with loss."""

    advantage_M: Tensor
    return_M: Tensor | None
    """Returns that the critic learns; None without a critic."""
    measured: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Values whose token means the step reports, by metric: ``advantage/`` and this name."""


@dataclass(frozen=True)
class PreparedMicroBatch:
    """A micro-batch, its scores, and its targets, which only the last pipeline stage has."""

    micro: MicroBatch
    scores: Scores
    targets: Targets | None


def prepared(
    minibatches: Sequence[Sequence[MicroBatch]],
    scores: Sequence[Scores],
    targets: Sequence[Targets | None],
) -> list[list[PreparedMicroBatch]]:
    """Join micro-batches, by mini-batch, with their scores and targets, which come as flat lists."""
    remaining = iter(zip(scores, targets, strict=True))
    return [[PreparedMicroBatch(micro, *next(remaining)) for micro in minibatch] for minibatch in minibatches]
