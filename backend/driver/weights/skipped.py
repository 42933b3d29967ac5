"""Optimizer updates that the trainer has skipped: the user hears of each, and too many end the run."""

from collections.abc import Callable, Mapping, Sequence

from slipstream.backend.batch.skipped import COUNTERS, SkippedUpdate
from slipstream.backend.driver.ports import Trainer


class TooManySkippedUpdates(RuntimeError):
    """More updates were skipped than ``run.max_skipped_updates`` allows."""


async def skipped_in(trainer: Trainer, metrics: Mapping[str, float]) -> Sequence[SkippedUpdate]:
    """Return the updates that the last step, which gave these metrics, has skipped."""
    return await trainer.skipped_updates() if any(metrics.get(tag) for tag in COUNTERS) else ()


class SkippedUpdateLimit:
    """Ends a run whose process skips more updates than ``maximum``."""

    def __init__(self, maximum: int, note: Callable[[str], None]) -> None:
        self._maximum = maximum
        self._note = note
        self._count = 0

    def add(self, step: int, skipped: Sequence[SkippedUpdate]) -> None:
        """Tell the user of the updates that a step has skipped. Raises TooManySkippedUpdates."""
        for update in skipped:
            self._count += 1
            self._note(f"step {step}: {update}")
        if skipped and self._count > self._maximum:
            raise TooManySkippedUpdates(
                f"{self._count} optimizer updates were skipped, because a loss or a gradient is not finite; "
                f"run.max_skipped_updates allows {self._maximum}. The last one, of step {step}: "
                f"{skipped[-1]}. Look at the rewards and log-probs of the trajectories that are named. If "
                "none is, look at train/grad_norm, train/ratio_max and mismatch/logprob_abs_max in the steps "
                "before: a lower learning rate may help. No skipped update has changed a weight, so that "
                "--resume can go on from the last checkpoint"
            )
