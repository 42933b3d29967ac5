"""The type that filters of groups return."""

from collections import Counter
from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Keep a rejected group if further prompts would have to be started for its place."""


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    is_needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not (output.keep or is_needed)


def call_dynamic_filter(fn, *args, **kwargs) -> DynamicFilterOutput:
    """Call a filter, which may be None. A boolean is an output without a reason."""
    output = True if fn is None else fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(output)


class MetricGatherer:
    """Counts why groups were dropped."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._reasons.items()}
