"""Builds the control core that a recipe describes."""

from collections import Counter

from slipstream.configs.schema.live import LiveConfig, live_places
from slipstream.configs.schema.rollout import (
    FifoConsumption,
    ReadyFirstConsumption,
    RolloutConfig,
    VolumeAdmission,
    WindowedConsumption,
)
from slipstream.rollout.control.admission import AdmissionPolicy, by_slots, by_volume
from slipstream.rollout.control.consumption import ConsumptionPolicy, Fifo, OnStale, ReadyFirst, Windowed
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.control.versions import VersionTree


def admission_policy(config: RolloutConfig) -> AdmissionPolicy:
    return by_volume if isinstance(config.admission, VolumeAdmission) else by_slots


def consumption_policy(config: RolloutConfig) -> ConsumptionPolicy:
    match config.consumption:
        case FifoConsumption():
            return Fifo()
        case WindowedConsumption(fraction=fraction):
            return Windowed(fraction)
        case ReadyFirstConsumption(on_stale=on_stale):
            return ReadyFirst(OnStale(on_stale))


def make_control(
    config: RolloutConfig,
    *,
    steps: int,
    live: LiveConfig | None = None,
    versions: VersionTree | None = None,
    version: int = 0,
    served: int | None = None,
    counts: GroupCounts | None = None,
    losses: Counter[Loss] | None = None,
    admission: AdmissionPolicy | None = None,
) -> RolloutControl:
    """Build the core of a run of ``steps`` steps whose trainer holds ``version``, one of ``versions``.

    ``served``: version that the engines serve, if it is another one. ``admission``: None for the recipe's.
    """
    counted = counts or GroupCounts()
    turns = live_places(live, config.batch_size)
    groups = config.batch_size - turns
    return RolloutControl(
        groups,
        config.max_head_offpolicyness,
        admission or admission_policy(config),
        consumption_policy(config),
        config.over_sampling,
        versions or VersionTree(),
        version,
        None if served == version else served,
        steps,
        counted,
        losses or Counter(),
        accepted=counted.trained,
        live_trajectories=turns,
    )
