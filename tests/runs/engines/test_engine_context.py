"""The end of a model's context, which SGLang does not serve."""

import numpy as np
import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.connection import EngineError
from slipstream.rollout.engine.context import served_length
from slipstream.rollout.engine.growing import GrowingCompletion
from tests.runs.engines.conftest import VOCAB, Server


def last_token(server: Server, ids: list[int]) -> GrowingCompletion:
    """Return a completion of one token, as one that goes on behind an interruption."""
    completion, sampling = GrowingCompletion(), SamplingConfig(max_new_tokens=1, ignore_eos=True)

    def ask(client: EngineClient):
        return client.generate(ids, sampling, completion, version=0)

    server.ask(ask)
    return completion


def test_what_is_served_goes_on_from_its_last_token_and_no_longer_input_does(server: Server):
    served = served_length(server.address.max_length, {})
    ids = np.random.default_rng(0).integers(5, VOCAB, served).tolist()
    assert len(last_token(server, ids[:-1]).tokens) == 1
    [logprobs] = server.probe([ids[:-1]])
    assert len(logprobs) == served - 2
    with pytest.raises(EngineError):
        last_token(server, ids)
