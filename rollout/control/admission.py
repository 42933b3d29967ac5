"""Admission policies: may one more group start? Pure."""

from typing import Protocol


class Occupancy(Protocol):
    """What an admission policy looks at: the control core. All counts are groups."""

    batch_size: int
    bound: int
    """rollout.max_head_offpolicyness"""
    step: int
    """Training steps done."""
    accepted: int
    """Ready, in training or trained, since the first step of the run."""
    capacity: int
    """(bound + 1) batches, less what the consumption policy keeps free, plus what is over-sampled."""

    @property
    def held(self) -> int:
        """Admitted and not ended; a batch in training is held until its version is published."""
        ...

    @property
    def open(self) -> int:
        """Those of them that are being generated or judged."""
        ...


class AdmissionPolicy(Protocol):
    def may_admit(self, now: Occupancy) -> bool: ...


class Slots:
    """(bound + 1) batches of slots, charged at admission and freed when the trained version is published."""

    def may_admit(self, now: Occupancy) -> bool:
        return now.held < now.capacity


class VolumeGate:
    """AReaL's gate (arXiv 2505.24298, eq. 3): a bound on all that was accepted, not on any age."""

    def may_admit(self, now: Occupancy) -> bool:
        return now.accepted + now.open < (now.bound + now.step + 1) * now.batch_size
