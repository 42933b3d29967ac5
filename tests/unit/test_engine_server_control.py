"""The load of a server as its control calls report it."""

import pytest

from slipstream.rollout.control.concurrency import EngineLoad
from slipstream.rollout.engine.server_control import parse_load


def test_the_load_of_a_server_is_that_of_all_its_ranks():
    rank = {
        "timestamp": 5.0,
        "num_running_reqs": 3,
        "num_waiting_reqs": 1,
        "token_usage": 0.25,
        "queues": {"retracted": 0},
    }
    busier = rank | {"token_usage": 0.75, "timestamp": 6.0, "queues": {"retracted": 2}}
    assert parse_load({"loads": [rank, busier]}) == EngineLoad(6, 2, 0.75, 2, 6.0)


@pytest.mark.parametrize("malformed", [None, {}, {"loads": []}, {"loads": [{}]}, {"loads": 3}, ""])
def test_a_malformed_load_is_a_value_error(malformed):
    with pytest.raises(ValueError, match="/v1/loads"):
        parse_load(malformed)
