"""The learning rate of a training step. Pure: there is no scheduler with a state to save.

A checkpoint has the number of its step (``CheckpointedRank.step``), so a resumed run continues where the
checkpoint stopped, by the settings of the recipe that it resumes with.
"""

import math

from slipstream.configs.schema import ConstantRate, LinearDecay, OptimizerConfig


def learning_rate(optimizer: OptimizerConfig, step: int, *, run_steps: int) -> float:
    """Return the learning rate of training step ``step``, counted from 0.

        lr * (step + 1) / warmup                        step < warmup
        lr                                              then, step < start
        min_lr + (lr - min_lr) * f(progress)            then; progress = (step - start) / (end - start)

    with f(p) = 1 - p (linear) or (1 + cos(pi p)) / 2 (cosine), and min_lr from step ``end`` on. The rate is
    above 0 in the first step and in the last step of the decay. ``run_steps``: the end of a decay that does
    not set its own.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    decay = optimizer.decay
    if isinstance(decay, ConstantRate):
        return optimizer.lr
    end = run_steps if decay.steps is None else decay.steps
    if step >= end:
        return decay.min_lr
    start = max(optimizer.warmup_steps, decay.start)
    if step < start:
        return optimizer.lr
    progress = (step - start) / (end - start)
    left = 1 - progress if isinstance(decay, LinearDecay) else (1 + math.cos(math.pi * progress)) / 2
    return decay.min_lr + (optimizer.lr - decay.min_lr) * left
