"""A real engine as teacher and as judge: log-probs of tokens behind a prompt, and answers to questions."""

import asyncio

import numpy as np
import pytest

from slipstream.configs.schema import ModelJudge
from slipstream.rollout.engine.asked_engines import ModelEngines
from slipstream.rollout.engine.client import EngineClient, InvalidRequest
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.sampling import LiveSampling
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.reward.model.endpoint import ChatEngines, CutOff
from slipstream.rollout.reward.model.hints import with_hint
from slipstream.rollout.reward.model.teacher import HintTeacher
from slipstream.rollout.tokens.tokenizer import load_tokenizer
from tests.runs.engines.conftest import VOCAB

PROMPT, TOKENS = [3, 5, 7, 11, 13, 2], [17, 4, 4, VOCAB - 1, 30]


def test_the_log_probs_are_those_of_the_given_tokens_behind_the_prompt(server):
    whole, scores = server.ask(
        lambda client: client.prompt_logprobs(PROMPT + TOKENS),
        lambda client: client.score_tokens(PROMPT, TOKENS, top_k=3),
    )
    np.testing.assert_allclose(scores.logprobs, whole[len(PROMPT) - 1 :], atol=1e-5)
    assert [len(position) for position in scores.top] == [3] * len(TOKENS)
    for position in scores.top:
        logprobs = [logprob for logprob, _ in position]
        assert logprobs == sorted(logprobs, reverse=True)


def test_sampled_tokens_have_the_log_probs_that_they_were_sampled_with(server):
    completion = GrowingCompletion()
    sampling = LiveSampling(12, {"temperature": 1.0, "ignore_eos": True}, priority=0)
    server.ask(lambda client: client.generate(PROMPT, sampling, completion, version=0))
    [scores] = server.ask(lambda client: client.score_tokens(PROMPT, completion.tokens.tolist(), top_k=48))
    np.testing.assert_allclose(scores.logprobs, completion.logprobs, atol=1e-4)
    for position, token, logprob in zip(scores.top, completion.tokens, scores.logprobs, strict=True):
        assert {id_: value for value, id_ in position}[token] == pytest.approx(logprob, abs=1e-5)


def test_one_token_behind_one_token_is_scored(server):
    [whole], [scores] = server.probe([[3, 5]]), server.ask(lambda client: client.score_tokens([3], [5]))
    assert scores.logprobs == pytest.approx(whole, abs=1e-5)
    with pytest.raises(InvalidRequest):
        server.ask(lambda client: client.score_tokens([], [5]))


def test_the_policy_answers_questions_and_teaches_itself(server, checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    messages = [{"role": "user", "content": "1+2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode("3", add_special_tokens=False)
    ids = (np.array(each, "<i4").tobytes() for each in (prompt, answer))
    turn = JudgedTurn("s", "k", [], messages, {}, "stop", len(answer), 0, *ids)
    settings = ModelJudge.model_validate(
        {
            "endpoint": {"type": "policy"},
            "max_new_tokens": 8,
            "hint": {"teacher": {"type": "policy", "top_k": 2}, "choose": {"type": "overlap", "top_k": 4}},
        }
    )
    assert settings.hint is not None
    hints = ["add both", "count"]

    async def main():
        engines = ModelEngines()
        engines.follow((server.address,))
        try:
            endpoint = ChatEngines(settings, lambda: tokenizer, engines)
            try:
                text = await endpoint.complete(messages)
            except CutOff:
                text = ""
            teacher = HintTeacher(settings.hint, lambda: tokenizer, 60, policy=engines.least_loaded)
            taught = await teacher.taught(turn, hints)
            assert taught is not None
            hinted = with_hint(tokenizer, prompt, messages, taught.hint)
            async with EngineClient(server.address) as client:
                expected = await client.prompt_logprobs(hinted + answer)
            return text, taught, expected[len(hinted) - 1 :]
        finally:
            await engines.close()

    text, taught, expected = asyncio.run(asyncio.wait_for(main(), 120))
    assert isinstance(text, str)
    assert taught.hint in hints
    np.testing.assert_allclose(taught.scores.logp_T, expected, atol=1e-5)
    assert taught.scores.k == 2
