"""What must hold between the settings of the optimizer and of Megatron's model (``rules.RULES``)."""

from collections.abc import Iterator

from configs.schema import RunConfig
from configs.violations import Violation


def decay_goes_down(config: RunConfig, path: str) -> Iterator[Violation]:
    """``path``: the optimizer's."""
    of = config.actor if path == "actor.optimizer" else config.critic
    if of is None or of.optimizer.decay.type == "constant":
        return
    optimizer = of.optimizer
    min_lr, steps = optimizer.decay.min_lr, optimizer.decay.steps
    if min_lr >= optimizer.lr:
        reason = f"expected less than {path}.lr ({optimizer.lr:g}), from where it comes down"
        yield Violation(f"{path}.decay.min_lr", min_lr, reason)
    for name, start in (("warmup_steps", optimizer.warmup_steps), ("decay.start", optimizer.decay.start)):
        if steps is not None and steps <= start:
            reason = f"expected more than {path}.{name} ({start}), which it includes, or null: run.steps"
            yield Violation(f"{path}.decay.steps", steps, reason)
            return
