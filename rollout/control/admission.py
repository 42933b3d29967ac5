"""Admission policies: may one more group start? Pure."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What an admission policy looks at; all counts are groups."""

    batch_size: int
    bound: int
    """rollout.max_head_offpolicyness"""
    step: int
    """Training steps done."""
    held: int
    """Admitted and not ended; a batch in training is held until its version is published."""
    open: int
    """Those of them that are being generated or judged."""
    accepted: int
    """Ready, in training or trained, since the first step of the run."""
    reserve: int
    """Slots that the consumption policy keeps free, so that some groups may be trained out of order."""
    surplus: int
    """Groups over the bound that may be admitted, because they will be given up in time (over-sampling)."""


class Admission(Protocol):
    def may_admit(self, now: Occupancy) -> bool: ...


class Slots:
    """(bound + 1) batches of slots, charged at admission and freed when the trained version is published."""

    def may_admit(self, now: Occupancy) -> bool:
        return now.held < (now.bound + 1) * now.batch_size - now.reserve + now.surplus


class VolumeGate:
    """AReaL's gate (arXiv 2505.24298, eq. 3): a bound on all that was accepted, not on any age."""

    def may_admit(self, now: Occupancy) -> bool:
        return now.accepted + now.open < (now.bound + now.step + 1) * now.batch_size
