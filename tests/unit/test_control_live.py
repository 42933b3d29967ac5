"""The door for live turns by hand-written schedules; ``control_schedules`` has random ones."""

import pytest

from slipstream.configs.schema.live import LiveConfig, live_places
from slipstream.configs.schema.rollout import RolloutConfig
from slipstream.rollout.control.core import RolloutControl
from slipstream.rollout.control.live_door import TurnEnd, TurnState
from slipstream.rollout.control.policies import make_control
from slipstream.rollout.control.versions import ControlError, UnknownVersion


def alone(bound: int = 1, trajectories: int = 2) -> RolloutControl:
    """A core without prompts."""
    return RolloutControl(0, bound, live_trajectories=trajectories)


def ready(core: RolloutControl, *turns: int, versions=(0,)) -> None:
    """Let turns come in, each the first of its conversation, and judge them."""
    for id_ in turns:
        core.live.arrived(id_, versions)
        core.live.ready(id_)


def take(core: RolloutControl) -> list[list[int]]:
    """Take a batch without a further wait. Return the turns of its trajectories."""
    if core.take_batch() is None:
        core.turns_wait_is_over()
        assert core.take_batch() is not None
    return [list(path) for path in core.live.training]


def train(core: RolloutControl) -> list[list[int]]:
    paths = take(core)
    core.published(core.begin_step())
    return paths


def test_turns_hold_no_slot():
    core = RolloutControl(1, 0, live_trajectories=1)
    ready(core, -1, -2, -3)
    assert core.held == 0
    assert core.may_admit()


def test_a_batch_waits_for_turns_until_it_is_told_not_to():
    core = RolloutControl(1, 0, live_trajectories=2)
    ready(core, -1)
    assert core.take_batch() is None
    assert not core.lacks_turns, "it lacks its group"
    core.finished(core.admit().id, [0])
    assert core.take_batch() is None
    assert core.lacks_turns
    core.turns_wait_is_over()
    assert list(core.take_batch()) == [0]
    assert core.live.training == [{-1: frozenset()}]


def test_without_prompts_and_turns_nothing_is_waited_for():
    core = alone()
    assert core.take_batch() is None
    assert not core.lacks_turns, "there is nothing to train: no time passes"
    core.turns_wait_is_over()
    ready(core, -1)
    assert core.take_batch() is None, "an earlier wait does not count"
    assert core.lacks_turns


def test_the_wait_begins_anew_when_the_only_turn_expires():
    core = RolloutControl(0, 0, live_trajectories=2)
    ready(core, -1)
    assert core.take_batch() is None
    core.turns_wait_is_over()
    core.live.ended(-1, TurnEnd.FORGOTTEN)
    assert core.take_batch() is None
    ready(core, -2)
    assert core.take_batch() is None
    assert core.lacks_turns


def test_turns_that_expire_first_are_trained_first():
    core = alone(bound=2, trajectories=1)
    ready(core, -1, -2, -3)
    train(core)
    ready(core, -4, versions=(1,))
    assert [train(core), train(core)] == [[[-2]], [[-3]]]
    assert train(core) == [[-4]]


def test_a_turn_that_waits_expires_when_all_of_its_tokens_are_too_old():
    core = alone(bound=1, trajectories=1)
    core.live.arrived(-1, (0,))
    core.live.arrived(-2, (0,))
    for version in range(2):
        ready(core, -3 - version, versions=(version,))
        train(core)
    assert core.live.take_expired() == {-1: 2, -2: 2}
    assert core.live.ends[TurnEnd.EXPIRED] == 2
    with pytest.raises(ControlError, match="turn -1 does not wait"):
        core.live.ready(-1)


def test_a_turn_comes_in_too_late():
    core = alone(bound=0)
    ready(core, -1)
    train(core)
    core.live.arrived(-2, (0,))
    assert core.live.take_expired() == {-2: 1}
    core.live.arrived(-3, (0, 1))
    core.live.ready(-3)
    take(core)
    assert core.live.training == [{-3: {0}}]


def test_tokens_of_a_version_in_the_making_are_as_old_as_what_becomes_of_it():
    core = alone(bound=0, trajectories=1)
    ready(core, -1)
    take(core)
    version = core.begin_step()
    core.live.arrived(-2, (version,))
    core.live.ready(-2)
    core.give_back()
    assert core.live.take_expired() == {-2: 1}, "its version is one of a dead branch"
    take(core)
    version = core.begin_step()
    core.live.arrived(-3, (version,))
    core.published(version)
    assert core.live.take_expired() == {}


def test_a_path_goes_over_turns_that_have_ended_and_ends_where_a_session_is_over():
    core = alone(bound=4, trajectories=4)
    ready(core, -1)
    core.live.is_context(-2, -1, TurnEnd.SIDE)
    core.live.arrived(-3, (0,), -2)
    core.live.ready(-3)
    assert train(core) == [[-1, -3]]
    core.live.unlink([-1, -2, -3])
    core.live.arrived(-4, (0,), -3)
    core.live.ready(-4)
    assert train(core) == [[-4]]


def test_turns_that_are_withheld_stay_out_of_a_path():
    core = alone(bound=4, trajectories=4)
    for id_, parent in ((-1, None), (-2, -1), (-3, -2)):
        core.live.arrived(id_, (0,), parent)
        core.live.ready(id_)
    core.withhold([-2])
    assert take(core) == [[-1, -3]]
    core.give_back()
    core.withhold([])
    assert take(core) == [[-1, -2, -3]]


def test_what_is_no_turn_is_refused():
    core = alone()
    with pytest.raises(ControlError, match="no sampled token"):
        core.live.arrived(-1, ())
    with pytest.raises(UnknownVersion):
        core.live.arrived(-1, (7,))
    ready(core, -2)
    with pytest.raises(ControlError, match="arrived before"):
        core.live.arrived(-2, (0,))
    take(core)
    with pytest.raises(ControlError, match="neither published nor given back"):
        core.take_batch()


@pytest.mark.parametrize(
    ("live", "groups", "trajectories"),
    [
        (None, 8, 0),
        (LiveConfig(), 4, 4),
        (LiveConfig(share=0.05), 7, 1),
        (LiveConfig(share=1.0), 0, 8),
        (LiveConfig(train=False), 8, 0),
    ],
)
def test_the_recipe_shares_a_batch_between_groups_and_turns(live, groups, trajectories):
    rollout = RolloutConfig.model_validate(
        {
            "max_head_offpolicyness": 1,
            "batch_size": 8,
            "n_samples_per_prompt": 2,
            "reward": "slipstream.rollout.reward.FinalAnswer",
        }
    )
    core = make_control(rollout, steps=10, live=live)
    assert (core.batch_size, core.live_trajectories) == (groups, trajectories)
    assert core.capacity == 2 * groups
    assert live_places(live, 8) == trajectories
    assert core.live.states == dict.fromkeys(TurnState, 0)
