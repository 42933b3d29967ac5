"""One episode: the built-in workflow and reward."""

import asyncio

import numpy as np
import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.reward import FinalAnswer
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Completion, Finish, Prompt, Span, Trajectory
from slipstream.rollout.workflow import SingleTurn, WorkflowContext


def trajectory(finish=Finish.STOP) -> Trajectory:
    one = np.ones(1)
    return Trajectory(one, one > 0, one, one, finish)


def score(response: str, label, *, marker="#", finish=Finish.STOP) -> float:
    return asyncio.run(FinalAnswer(marker).score(Prompt(0, "?", label), response, trajectory(finish)))


@pytest.mark.parametrize(
    ("response", "label"),
    [("so #42", "42"), ("#42", 42), ("a\nb # 42 \n", "42"), ("#x y", "x y"), ("#42", " 42\n"), ("#0", 0)],
)
def test_the_text_after_the_marker_is_compared_with_the_label(response, label):
    assert score(response, label) == 1.0


@pytest.mark.parametrize(
    "response", ["", "42", "#", "#41", "#42.0", "42#", "#42#", "#1 #42", "##42", "#42 or so", "#4 2"]
)
def test_anything_else_is_wrong(response):
    assert score(response, "42") == 0.0


def test_a_marker_may_have_several_characters():
    assert score("1 # 2 #### 42", "42", marker="####") == 1.0
    assert score("### 42", "42", marker="####") == 0.0


def test_an_answer_that_was_cut_off_is_wrong():
    assert score("#42", "42", finish=Finish.LENGTH) == 0.0


def test_a_prompt_without_a_label_cannot_be_judged():
    with pytest.raises(ValueError, match="prompt 0 has no label"):
        score("#None", None)


def test_an_empty_marker_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        FinalAnswer("")


class Letters:
    """A tokenizer: the characters of the chat; id 0 is special."""

    eos_token_id = 0

    def apply_chat_template(self, conversation, **kwargs):
        assert kwargs == {"add_generation_prompt": True, "return_dict": False}
        return [ord(c) for message in conversation for c in message["content"]] + [0]

    def decode(self, token_ids, **kwargs):
        assert kwargs == {"skip_special_tokens": True}
        return "".join(chr(i) for i in token_ids if i)


class Scripted:
    """A generator that answers everything with one text, from versions 3 and 4."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.requests = []

    async def generate(self, input_ids, sampling):
        self.requests.append((list(input_ids), sampling))
        tokens = (*map(ord, self._text), 0)
        spans = (Span(3, 0, 1), Span(4, 1, len(tokens)))
        return Completion(tokens, (-1.0,) * len(tokens), spans, Finish.STOP, retractions=1)


class NobodyAsks:
    """The judge of an episode that leaves the judging to the recipe's reward."""

    async def score(self, prompt, response, trajectory):
        raise AssertionError("the workflow has asked for a reward")


def context(generator) -> WorkflowContext:
    return WorkflowContext(
        generator, Letters(), NobodyAsks(), SamplingConfig(temperature=0.5, max_new_tokens=9)
    )


def test_a_single_turn_generates_from_the_chat_and_leaves_the_judging_to_the_reward():
    generator = Scripted("so #42")
    setting = context(generator)
    episode = asyncio.run(SingleTurn().run(Prompt(0, "6*7", "42"), setting))
    prompt_ids = [*map(ord, "6*7"), 0]
    assert generator.requests == [(prompt_ids, setting.sampling)]
    assert episode.tokens_T.tolist() == [*prompt_ids, *map(ord, "so #42"), 0]
    assert episode.loss_mask_T.tolist() == [False] * 4 + [True] * 7
    assert episode.versions_T.tolist() == [UNSAMPLED] * 4 + [3] + [4] * 6
    assert (episode.reward, episode.finish, episode.retractions) == (None, Finish.STOP, 1)


def test_an_empty_answer_is_a_failure():
    class Silent:
        async def generate(self, input_ids, sampling):
            return Completion((), (), (), Finish.STOP)

    with pytest.raises(ValueError, match="none of them sampled"):
        asyncio.run(SingleTurn().run(Prompt(0, "a", "a"), context(Silent())))
