"""The bound, the account of every group and progress, over random schedules with restarts."""

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.tries import tries
from tests.unit.control_schedules import POLICIES, Schedule

SETTINGS = tries(10, stateful_step_count=40, database=None)


@pytest.mark.parametrize("policy", POLICIES)
def test_bound_order_account_and_liveness_hold_in_every_schedule(policy):
    machine = type("Schedule", (Schedule,), {"policy": policy, "admission": "slots"})
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("policy", ["fifo", "windowed 0", "mask"])
def test_they_hold_behind_the_volume_gate_as_well(policy):
    machine = type("Schedule", (Schedule,), {"policy": policy, "admission": "volume"})
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("policy", ["fifo", "windowed 1/4", "mask", "requeue"])
def test_turns_of_live_users_are_trained_once_within_the_bound_and_groups_do_not_notice(policy):
    machine = type("Schedule", (Schedule,), {"policy": policy, "admission": "slots", "live": (1, 2, 5)})
    run_state_machine_as_test(machine, settings=SETTINGS)
