"""A short run of ``tests.clients.fuzz``."""

from tests.clients.fuzz import LIMITS, fuzz
from tests.gateway_process import GatewayProcess

REQUESTS = 300


def test_no_request_makes_the_gateway_fail(chat_model):
    with GatewayProcess(chat_model, tool_parser="qwen25", reasoning_parser="qwen3", limits=LIMITS) as gateway:
        outcome = fuzz(gateway, REQUESTS, first_seed=1)
    assert outcome.is_good, "\n".join(outcome.shown)
    assert outcome.requests == REQUESTS
    assert {200, 400, 401, 404, 405} <= outcome.by_status.keys(), "it reaches everything"
