"""Judging as episodes see it: what the reward is asked about, and whose time it takes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.rollout.collection.collector.judging import Judging, WorkflowReward, last_response
from slipstream.rollout.reward.judge.judge_errors import JudgingFailed
from slipstream.rollout.reward.reasoning import answer_in, reads_reasoning
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory
from tests.unit.collecting import run_with_contexts as run

PROMPT = Prompt(7, "what?")


class Numbers:
    """A tokenizer whose text names the token ids."""

    eos_token_id = -1

    def apply_chat_template(self, conversation, **kwargs):
        raise AssertionError

    def decode(self, token_ids, **kwargs):
        return ",".join(map(str, token_ids))


def trajectory(versions: list[int], mask: list[bool] | None = None) -> Trajectory:
    versions_T = np.array(versions, np.int32)
    mask_T = versions_T != UNSAMPLED if mask is None else np.array(mask)
    return Trajectory(np.arange(len(versions)), mask_T, np.zeros(len(versions)), versions_T, Finish.STOP)


@given(st.lists(st.sampled_from([UNSAMPLED, 0, 1]), max_size=12), st.integers(0, 2**12))
def test_the_response_is_the_last_completion_whatever_its_versions_and_loss(versions, bits):
    """One completion may hold tokens of several versions, some of which carry no loss any more."""
    mask = [version != UNSAMPLED and bool(bits >> i & 1) for i, version in enumerate(versions)]
    end = max((i + 1 for i, version in enumerate(versions) if version != UNSAMPLED), default=0)
    start = max((i + 1 for i in range(end) if versions[i] == UNSAMPLED), default=0)
    expected = ",".join(map(str, range(start, end)))
    assert last_response(Numbers(), trajectory(versions, mask)) == expected


WORDS = [
    "<s>",
    "</s>",
    "<pad>",
    "<|end|>",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "user",
    "hm",
    "4",
    "5",
]
TAGS = ["<|end|>", "<answer>", "</answer>", "<think>", "</think>"]


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, all tags of which are special tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tags = [word for word in words if word in TAGS]
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=tags, **names)


def read(prompt: str, answer: str, *, reads_reasoning: bool, finish: Finish = Finish.STOP) -> str:
    words = WORDS if "think" in prompt + answer else [word for word in WORDS if "think" not in word]
    tokenizer = tokenizer_of(words)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer)]
    whole = trajectory([UNSAMPLED] * len(ids[0]) + [1] * len(ids[1]))
    whole = replace(whole, tokens_T=np.array([*ids[0], *ids[1]]), finish=finish)
    judges = Judges()
    run(Judging(judges, tokenizer, reads_reasoning=reads_reasoning).judge(PROMPT, whole))
    return " ".join(judges.asked[0][1].split())


@pytest.mark.parametrize(
    ("answer", "finish", "response"),
    [
        ("hm <answer> 4 </answer> </s>", Finish.STOP, "hm <answer> 4 </answer>"),
        ("hm <answer> 4 </answer> <|end|>", Finish.STOP, "hm <answer> 4 </answer>"),
        ("hm <answer> 4 </answer>", Finish.STOP, "hm <answer> 4 </answer>"),
        ("<answer> 4 <answer>", Finish.LENGTH, "<answer> 4 <answer>"),
        ("", Finish.LENGTH, ""),
    ],
)
def test_a_reward_reads_the_special_tokens_that_were_said_and_not_the_end(answer, finish, response):
    if not answer:
        assert last_response(tokenizer_of(WORDS), trajectory([UNSAMPLED])) == ""
        return
    assert read("user 5", answer, reads_reasoning=False, finish=finish) == response


@pytest.mark.parametrize(
    ("prompt", "answer", "cut", "kept"),
    [
        ("user", "<think> hm </think> 4 </s>", "4", "<think> hm </think> 4"),
        ("user <think>", "hm </think> 4 </s>", "4", "hm </think> 4"),
        ("user <think>", "hm 4", "", "hm 4"),
        ("user <think> </think>", "4 </s>", "4", "4"),
        ("user", "<think> hm 4", "", "<think> hm 4"),
        ("user", "<think> hm </think> 5 <think> 4 </think>", "", "<think> hm </think> 5 <think> 4 </think>"),
        ("user", "hm 4 </s>", "hm 4", "hm 4"),
    ],
)
def test_a_reward_of_answers_reads_what_follows_the_reasoning(prompt, answer, cut, kept):
    assert read(prompt, answer, reads_reasoning=False) == cut
    assert read(prompt, answer, reads_reasoning=True) == kept


OURS = "slipstream.rollout.reward."


@pytest.mark.parametrize(
    ("reading", "path", "args", "reads"),
    [
        ("auto", OURS + "MathVerify", {}, False),
        ("auto", OURS + "Regex", {}, True),
        ("auto", OURS + "Exact", {"answer": {"after": "</think>"}}, True),
        ("auto", "my.reward", {}, True),
        ("cut", "my.reward", {}, False),
        ("keep", OURS + "Exact", {}, True),
        ("auto", OURS + "Weighted", {"parts": {"a": {"path": OURS + "Exact"}}}, False),
        (
            "auto",
            OURS + "Weighted",
            {"parts": {"a": {"path": OURS + "Exact"}, "b": {"path": OURS + "Regex"}}},
            True,
        ),
    ],
)
def test_rewards_that_look_for_forms_or_are_the_users_read_the_reasoning(reading, path, args, reads):
    assert reads_reasoning(reading, path, args) is reads


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4", "4"),
        ("<|channel|>analysis<|message|>hm", ""),
        ("[THINK]hm[/THINK]4", "4"),
        ("4 < 5", "4 < 5"),
    ],
)
def test_reasoning_has_the_marks_of_several_families(text, answer):
    assert answer_in(text) == answer


@dataclass
class Judges:
    """A judge pool that takes 50 seconds for a question."""

    error: Exception | None = None
    of_groups: bool = False
    asked: list[tuple[Prompt, str, Trajectory]] = field(default_factory=list)

    async def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> Judgement:
        self.asked.append((prompt, response, trajectory))
        await asyncio.sleep(50)
        if self.error is not None:
            raise self.error
        return Judgement(0.5, (("length", 2.0),))

    async def score_group(
        self, prompt: Prompt, responses: Sequence[str], trajectories: Sequence[Trajectory]
    ) -> list[Judgement]:
        self.asked += [(prompt, *each) for each in zip(responses, trajectories, strict=True)]
        return [Judgement(float(len(response))) for response in responses]


def test_a_group_is_judged_by_the_texts_of_its_last_completions():
    judges, group = Judges(of_groups=True), [trajectory([UNSAMPLED, 0]), trajectory([UNSAMPLED, 0, 0])]
    judging = Judging(judges, Numbers())
    assert run(judging.judge_group(PROMPT, group)) == [Judgement(1), Judgement(3)]
    assert [(response, each) for _, response, each in judges.asked] == [("1", group[0]), ("1,2", group[1])]


def test_a_single_trajectory_is_a_group_of_its_own_to_a_reward_of_groups():
    """An evaluation prompt has one completion."""
    judging = Judging(Judges(of_groups=True), Numbers())
    assert run(judging.judge(PROMPT, trajectory([UNSAMPLED, 0, 0]))) == Judgement(3)


def test_a_trajectory_is_judged_by_the_text_of_its_last_completion():
    judges, whole = Judges(), trajectory([UNSAMPLED, 0, UNSAMPLED, 1, 1])
    assert run(Judging(judges, Numbers()).judge(PROMPT, whole)) == Judgement(0.5, (("length", 2.0),))
    [(prompt, response, judged)] = judges.asked
    assert (prompt, response) == (PROMPT, "3,4")
    assert judged is whole


class Record:
    def __init__(self) -> None:
        self.writes: list[float] = []

    def write_ends(self, older_than_s: float = 0.0) -> None:
        self.writes.append(older_than_s)


def test_what_a_workflow_has_got_is_recorded_before_it_asks_for_a_reward():
    """The completions have ended: a judge that ends the process must not cost any of them."""
    judges, record = Judges(), Record()
    reward = WorkflowReward(judges, TimeLimit(10), record)  # type: ignore[arg-type]

    async def main() -> float:
        asking = asyncio.create_task(reward.score(PROMPT, "text", trajectory([0])))
        await asyncio.sleep(1)
        assert record.writes == [0.0]
        return await asking

    assert run(main()) == 0.5
    assert judges.asked[0][1] == "text"


@pytest.mark.parametrize("error", [None, JudgingFailed("in every attempt")])
def test_the_time_of_judging_is_not_that_of_the_episode(error):
    async def main() -> None:
        limit = TimeLimit(20)
        reward = WorkflowReward(Judges(error), limit)
        with limit():
            for _ in range(2):
                try:
                    assert await reward.score(PROMPT, "text", trajectory([0])) == 0.5
                except JudgingFailed:
                    assert error is not None

    run(main())
