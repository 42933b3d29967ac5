"""The function that asks a teacher's server: its replies become log-probs of samples."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slipstream.rollout.compat.slime import make_slime_importable
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.compat.slime.teacher_server import WrongReply, taught_by_server


def sample(tokens: list[int], response: int):
    make_slime_importable()
    from slime.utils.types import Sample

    made = Sample()
    made.tokens, made.response_length = tokens, response
    return made


def asked(samples, reply):
    """Return what the function returns, and the requests that its server gets."""
    requests: list[dict] = []

    async def generate(request: web.Request) -> web.Response:
        requests.append(await request.json())
        return web.json_response(reply(requests[-1]["input_ids"]))

    async def main():
        application = web.Application()
        application.router.add_post("/generate", generate)
        async with TestServer(application) as server:
            args = SlimeArguments(rm_url=str(server.make_url("/generate")), rollout_temperature=0.5)
            return await taught_by_server(args, samples)

    return asyncio.run(main()), requests


def by_place(ids: list[int]) -> dict:
    """SGLang's reply: the first token has no log-prob."""
    values = [None, *(-0.5 * place for place in range(1, len(ids)))]
    return {
        "meta_info": {
            "input_token_logprobs": [[value, each, None] for value, each in zip(values, ids, strict=True)]
        }
    }


def test_a_sample_gets_the_log_probs_of_its_response_and_the_reward_0():
    taught = sample([7, 8, 9, 10], response=2)
    reward, [request] = asked(taught, by_place)
    assert reward == 0.0 and taught.teacher_log_probs == [-1.0, -1.5]
    assert request["sampling_params"]["max_new_tokens"] == 0 and request["return_logprob"]
    assert request["sampling_params"]["temperature"] == 0.5 and request["logprob_start_len"] == 0


def test_siblings_are_taught_one_by_one():
    siblings = [sample([7, 8, 9], response=2), sample([7, 8], response=1)]
    rewards, requests = asked(siblings, by_place)
    assert rewards == [0.0, 0.0] and [request["input_ids"] for request in requests] == [[7, 8, 9], [7, 8]]
    assert [each.teacher_log_probs for each in siblings] == [[-0.5, -1.0], [-0.5]]


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        ({"text": "hello"}, "found none"),
        ({"meta_info": {"input_token_logprobs": [[-1.0, 7, None]]}}, "found 1 of them"),
        ({"meta_info": {"input_token_logprobs": [[None, 7, None]] * 3}}, "has no log-prob"),
    ],
)
def test_a_reply_without_the_log_prob_of_each_token_is_a_failed_attempt(reply, part):
    with pytest.raises(WrongReply, match=part):
        asked(sample([7, 8, 9], response=2), lambda ids: reply)
