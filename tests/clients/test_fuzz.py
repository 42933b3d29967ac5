"""A short run of ``tests.clients.fuzz``."""

from tests.clients.fuzz import LIMITS, fuzz
from tests.clients.hostile_values import EVERY_TOKEN, ends_scheduler
from tests.gateway_process import GatewayProcess

REQUESTS = 300


def test_no_request_makes_the_gateway_fail(chat_model):
    with GatewayProcess(chat_model, tool_parser="qwen25", reasoning_parser="qwen3", limits=LIMITS) as gateway:
        outcome = fuzz(gateway, REQUESTS, first_seed=1)
    assert outcome.is_good, "\n".join(outcome.shown)
    assert outcome.requests == REQUESTS
    assert {200, 400, 401, 404, 405} <= outcome.by_status.keys(), "it reaches everything"


def test_no_value_that_ends_an_engine_reaches_one(chat_model):
    with GatewayProcess(chat_model, tool_parser="qwen25", limits=LIMITS) as gateway:
        outcome = fuzz(gateway, 150, first_seed=1, values=True)
    assert outcome.is_good, "\n".join(outcome.shown)
    assert {200, 400} <= outcome.by_status.keys(), "some values are fine"


def test_the_oracle_knows_what_ends_a_scheduler():
    everywhere = {str(token): -1e39 for token in EVERY_TOKEN}
    for harmful in ({"logit_bias": everywhere}, {"top_k": 2**31}, {"repetition_penalty": 1e-320}):
        assert ends_scheduler(harmful)
    assert ends_scheduler({"min_new_tokens": 1, "stop_token_ids": list(EVERY_TOKEN)})
    assert not ends_scheduler({"temperature": 0.5, "top_k": 7, "logit_bias": {"3": 100}})
