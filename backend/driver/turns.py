"""Makes the turns of a run's live users: the one place where their room meets the driver."""

from slipstream.backend.driver.assemble import LiveTurns
from slipstream.backend.driver.inputs import InputError
from slipstream.backend.driver.resume import RunState
from slipstream.configs.schema import RunConfig
from slipstream.rollout.collect.gate import AdmissionGate


def make_turns(config: RunConfig, state: RunState, gate: AdmissionGate) -> LiveTurns:
    """Make the intake, the judging and the mixing of turns. Raises InputError."""
    raise InputError("gateway: nothing takes in the turns of live users; expected no section gateway")
