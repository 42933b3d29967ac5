"""What must hold between the settings of the optimizer and of Megatron's model (``rules.RULES``)."""

from collections.abc import Iterator

from configs.schema import RunConfig
from configs.violations import Violation


def decay_goes_down(config: RunConfig) -> Iterator[Violation]:
    optimizer = config.actor.optimizer
    if optimizer.decay.type == "constant":
        return
    min_lr, steps = optimizer.decay.min_lr, optimizer.decay.steps
    if min_lr >= optimizer.lr:
        reason = f"expected less than actor.optimizer.lr ({optimizer.lr:g}), from where it comes down"
        yield Violation("actor.optimizer.decay.min_lr", min_lr, reason)
    if steps is not None and steps <= optimizer.warmup_steps:
        reason = (
            f"expected more than actor.optimizer.warmup_steps ({optimizer.warmup_steps}), which it includes, "
            "or null: run.steps"
        )
        yield Violation("actor.optimizer.decay.steps", steps, reason)
