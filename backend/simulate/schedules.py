"""The ways to schedule generation and training that are compared."""

from dataclasses import dataclass
from typing import Any

from slipstream.bridge.publish.endpoint import Interrupt
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import (
    FifoConsumption,
    ReadyFirstConsumption,
    RolloutConfig,
    VolumeAdmission,
    WindowedConsumption,
)
from slipstream.rollout.control.admission import Slots, VolumeGate
from slipstream.rollout.control.consumption import ConsumptionPolicy, OnStale, ReadyFirst
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.policies import consumption_policy

BOUNDS = (1, 2, 4, 8)
"""Values of rollout.max_head_offpolicyness that are compared."""

ONE_STEP_OFF = "one step off"

INTERRUPTS: tuple[Interrupt, ...] = ("retract", "in_place", "abort", "drain")


@dataclass(frozen=True)
class Schedule:
    """When groups may start, which are trained, and what an update does to running requests."""

    name: str
    bound: int
    consumption: Any
    """A section of the recipe; None: AReaL's volume gate, with whatever is ready, and no bound kept."""
    interrupt: Interrupt = "retract"
    over_sampling: float = 1.0
    volume: bool = False
    """AReaL's gate admits."""
    shared: bool = False
    """Trainer and engines take turns on all GPUs."""

    @property
    def title(self) -> str:
        return f"{self.name}, eta {self.bound}, {self.interrupt}"

    def control(self, rollout: RolloutConfig, steps: int) -> RolloutControl:
        """A fresh core for a run of ``steps`` steps."""
        if self.consumption is None:
            policy: ConsumptionPolicy = ReadyFirst(OnStale.TRAIN)
        else:
            policy = consumption_policy(rollout.model_copy(update={"consumption": self.consumption}))
        return RolloutControl(
            rollout.batch_size,
            self.bound,
            VolumeGate() if self.volume else Slots(),
            policy,
            self.over_sampling,
            last_step=steps,
        )


def own_schedule(config: RunConfig) -> Schedule:
    """What the recipe asks for."""
    rollout = config.rollout
    return Schedule(
        "this recipe",
        rollout.max_head_offpolicyness,
        rollout.consumption,
        config.weights.interrupt,
        rollout.over_sampling,
        isinstance(rollout.admission, VolumeAdmission),
    )


def synchronous(interrupt: Interrupt = "retract", *, shared: bool = False) -> Schedule:
    name = "synchronous, shared GPUs" if shared else "synchronous"
    return Schedule(name, 0, FifoConsumption(), interrupt, shared=shared)


def volume_gate(bound: int, interrupt: Interrupt = "retract") -> Schedule:
    return Schedule("volume gate", bound, None, interrupt, volume=True)


def policies(fractions: tuple[float, ...] = (0.25,)) -> dict[str, Any]:
    """Every consumption policy by name; ``windowed`` with each of ``fractions``."""
    return {
        "fifo": FifoConsumption(),
        **{f"windowed {fraction:g}": WindowedConsumption(fraction=fraction) for fraction in fractions},
        **{
            f"ready_first {on_stale}": ReadyFirstConsumption(on_stale=on_stale)
            for on_stale in ("mask", "requeue", "drop")
        },
    }


def compared(config: RunConfig) -> list[Schedule]:
    """Everything that the tables show: synchronous, one step off, then the others by bound.

    Each policy is shown with the interrupt mode of the recipe, the recipe's own policy with all of them.
    """
    own = own_schedule(config)
    known = {policy: name for name, policy in policies().items()}
    named = {
        **policies(),
        known.get(own.consumption, f"{own.consumption.type} of the recipe"): own.consumption,
    }
    found = [
        synchronous(shared=True),
        synchronous(),
        Schedule(ONE_STEP_OFF, 1, FifoConsumption(), "drain"),
    ]
    for bound in BOUNDS:
        found.append(volume_gate(bound, own.interrupt))
        found += [Schedule(name, bound, policy, own.interrupt) for name, policy in named.items()]
        found += [
            Schedule(name, bound, policy, interrupt)
            for name, policy in named.items()
            if policy == own.consumption
            for interrupt in INTERRUPTS
            if interrupt != own.interrupt
        ]
    return found
