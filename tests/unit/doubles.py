"""Small stand-ins that several unit tests share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.rollout.control.core import Loss
from slipstream.rollout.trajectory import Prompt, Trajectory


@dataclass
class Policy:
    """An owner of the policy version."""

    version: int = 0

    def published(self, version: int) -> None:
        assert version == self.version + 1
        self.version = version


@dataclass
class Listener:
    """Remembers what collection reports."""

    losses: list[tuple[Loss, tuple[Trajectory, ...]]] = field(default_factory=list)
    failures: list[tuple[int, int, str]] = field(default_factory=list)

    def lost(self, loss: Loss, trajectories: Sequence[Trajectory]) -> None:
        self.losses.append((loss, tuple(trajectories)))

    def episode_failed(self, prompt: Prompt, attempt: int, error: Exception) -> None:
        self.failures.append((prompt.id, attempt, str(error)))
