"""Admission policies, which decide whether one more group may start. Pure."""

from collections.abc import Callable
from typing import Protocol


class Occupancy(Protocol):
    """The part of the control core that an admission policy sees. All counts are groups."""

    batch_size: int
    bound: int
    """``rollout.max_head_offpolicyness``."""
    step: int
    """Training steps done."""
    accepted: int
    """Groups that are ready and not withheld, in training or trained, since the first step of the run."""
    capacity: int
    """Slots: (bound + 1) batches, minus the reserve of the consumption policy, plus over-sampling."""

    @property
    def held(self) -> int:
        """Groups that hold a slot; a batch in training holds its slots until its version is published, and a
        withheld group holds none."""
        ...

    @property
    def open(self) -> int:
        """Groups that are admitted, being generated or being judged."""
        ...


AdmissionPolicy = Callable[[Occupancy], bool]
"""Returns True if one more group may start."""


def by_slots(now: Occupancy) -> bool:
    """(bound + 1) batches of slots, charged at admission and freed when the trained version is published."""
    return now.held < now.capacity


def by_volume(now: Occupancy) -> bool:
    """AReaL's gate (arXiv 2505.24298, eq. 3): bounds the number of accepted groups, but not their lag."""
    return now.accepted + now.open < (now.bound + now.step + 1) * now.batch_size
