"""What the trainer tells the driver; apart from the trainer, so that the driver imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What one training step did."""

    version: int
    """The version that the step produced."""
    metrics: dict[str, float]
    """By the tags of backend/monitor/tags.py."""
