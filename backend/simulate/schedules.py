"""Schedules of generation and training that a simulation compares."""

from dataclasses import dataclass, replace

from slipstream.bridge.publish.endpoint import Interrupt
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.rollout import (
    ConsumptionConfig,
    FifoConsumption,
    ReadyFirstConsumption,
    RolloutConfig,
    VolumeAdmission,
    WindowedConsumption,
)
from slipstream.rollout.control.admission import by_slots, by_volume
from slipstream.rollout.control.consumption import ConsumptionPolicy, OnStale, ReadyFirst
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.policies import consumption_policy
from slipstream.rollout.control.versions import VersionTree
from slipstream.rollout.ledger.recovery import Recovered

BOUNDS = (1, 2, 4, 8)
"""Values of rollout.max_head_offpolicyness that are compared."""

ONE_STEP_OFF = "one step off"

INTERRUPTS: tuple[Interrupt, ...] = ("retract", "in_place", "abort", "drain")


@dataclass(frozen=True)
class Schedule:
    """Rules for when groups start, which groups are trained, and what an update does to running requests."""

    name: str
    bound: int
    consumption: ConsumptionConfig | None
    """A section of the recipe; None: whatever is ready first is trained, whatever its lag."""
    interrupt: Interrupt = "retract"
    over_sampling: float = 1.0
    volume: bool = False
    """AReaL's volume gate admits groups, which does not keep the bound."""
    shared: bool = False
    """Trainer and engines take turns on all GPUs."""

    @property
    def title(self) -> str:
        return f"{self.name}, eta {self.bound}, {self.interrupt}"

    def control(
        self,
        rollout: RolloutConfig,
        steps: int,
        recovered: Recovered | None = None,
        served: int | None = None,
    ) -> RolloutControl:
        """Return a control core for a run of ``steps`` steps: a new one, or one that goes on from what the
        ledger has ``recovered`` while the engines serve version ``served``.
        """
        if self.consumption is None:
            policy: ConsumptionPolicy = ReadyFirst(OnStale.TRAIN)
        else:
            policy = consumption_policy(rollout.model_copy(update={"consumption": self.consumption}))
        control = RolloutControl(
            rollout.batch_size,
            self.bound,
            by_volume if self.volume else by_slots,
            policy,
            self.over_sampling,
            last_step=steps,
        )
        if recovered is None:
            return control
        return replace(
            control,
            versions=VersionTree(recovered.versions, recovered.copies),
            version=recovered.restored,
            served=None if served == recovered.restored else served,
            counts=recovered.counts,
            accepted=recovered.counts.trained,
            losses=recovered.losses,
        )


def recipe_schedule(config: RunConfig) -> Schedule:
    """Return the schedule that the recipe asks for."""
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


def policies(fractions: tuple[float, ...] = (0.25,)) -> dict[str, ConsumptionConfig]:
    """Return every consumption policy by name; ``windowed`` with each of ``fractions``."""
    return {
        "fifo": FifoConsumption(),
        **{f"windowed {fraction:g}": WindowedConsumption(fraction=fraction) for fraction in fractions},
        "ready_first mask": ReadyFirstConsumption(on_stale="mask"),
        "ready_first requeue": ReadyFirstConsumption(on_stale="requeue"),
        "ready_first drop": ReadyFirstConsumption(on_stale="drop"),
    }


def compared(config: RunConfig) -> list[Schedule]:
    """Return the schedules of the tables: synchronous, one step off, then the others by bound.

    Every policy is compared with the recipe's interrupt mode, the recipe's own policy with all four.
    """
    recipe = recipe_schedule(config)
    named = policies()
    if recipe.consumption not in named.values():
        named[f"{config.rollout.consumption.type} of the recipe"] = config.rollout.consumption
    name = next(name for name, policy in named.items() if policy == recipe.consumption)
    schedules = [
        synchronous(shared=True),
        synchronous(),
        Schedule(ONE_STEP_OFF, 1, FifoConsumption(), "drain"),
    ]
    for bound in BOUNDS:
        schedules.append(volume_gate(bound, recipe.interrupt))
        schedules += [Schedule(name, bound, policy, recipe.interrupt) for name, policy in named.items()]
        schedules += [
            Schedule(name, bound, recipe.consumption, interrupt)
            for interrupt in INTERRUPTS
            if interrupt != recipe.interrupt
        ]
    return schedules
