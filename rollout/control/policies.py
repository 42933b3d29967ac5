"""From a recipe to the control core."""

from collections import Counter

from configs.schema.rollout import (
    FifoConsumption,
    ReadyFirstConsumption,
    RolloutConfig,
    VolumeAdmission,
    WindowedConsumption,
)
from rollout.control.admission import Admission, Slots, VolumeGate
from rollout.control.consumption import Consumption, Fifo, OnStale, ReadyFirst, Windowed
from rollout.control.core import GroupCounts, Loss, RolloutControl


def admission_policy(config: RolloutConfig) -> Admission:
    return VolumeGate() if isinstance(config.admission, VolumeAdmission) else Slots()


def consumption_policy(config: RolloutConfig) -> Consumption:
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
    version: int = 0,
    step: int = 0,
    counts: GroupCounts | None = None,
    losses: Counter[Loss] | None = None,
) -> RolloutControl:
    """The core of a run of ``steps`` training steps that starts from ``version``, ``step`` steps done."""
    return RolloutControl(
        config.batch_size,
        config.max_head_offpolicyness,
        admission_policy(config),
        consumption_policy(config),
        config.over_sampling,
        version,
        step,
        steps,
        counts or GroupCounts(),
        losses or Counter(),
        accepted=step * config.batch_size,
    )
