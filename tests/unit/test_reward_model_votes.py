"""The reward of episodes by votes: outcome, steps and turns, and what is no reward."""

import asyncio
from typing import Any

import numpy as np
import pytest

from slipstream.configs.schema import JudgingConfig, PluginConfig
from slipstream.rollout.reward import ModelVotes
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.reward.judge.wire import ModelSetup
from slipstream.rollout.reward.model.answers import turns_in
from slipstream.rollout.reward.model.judge_model import JudgeModel
from slipstream.rollout.reward.value import Judgement
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory
from tests.chat_model import build_tokenizer
from tests.unit.chat_server import ChatServer
from tests.unit.judging import trajectory
from tests.unit.test_judge_model import BAD, GOOD, NEUTRAL, section

PROMPT = Prompt(1, [{"role": "user", "content": "What is 2+2?"}], "4")
PATH = "slipstream.rollout.reward.ModelVotes"


def by_words(**answers: str):
    """Answer a question by the first of the words that stands behind its last heading."""

    def answer(messages: list[dict]) -> str:
        last = messages[-1]["content"].rpartition("# ")[2]
        return next((text for word, text in answers.items() if word in last), NEUTRAL)

    return answer


def judged(
    answers: Any,
    response: str = "4",
    episode: Trajectory | None = None,
    path: str = PATH,
    args: dict[str, Any] | None = None,
    policy: str = "/policy",
    **settings: Any,
) -> tuple[Any, ChatServer]:
    """Return what a judge process says of an episode, or its error; and the server."""
    server = ChatServer(answers)

    async def main() -> Any:
        async with server.serving() as url:
            model = ModelSetup(section(url, **{"votes": 1, **settings}), policy)
            plugin = PluginConfig(path=path, args=args or {})
            limits = JudgingConfig(attempts=1, timeout_s=120)  # it reads a tokenizer
            try:
                async with JudgePool(limits, plugin, FOLDER[0], "test", model=model) as pool:
                    return await pool.score(PROMPT, response, episode or trajectory())
            except (JudgingFailed, JudgeStartFailed) as error:
                return error

    return asyncio.run(asyncio.wait_for(main(), 240)), server


FOLDER: list[Any] = []


@pytest.fixture(autouse=True)
def logs(tmp_path):
    FOLDER[:] = [tmp_path]


def test_the_whole_answer_is_judged_with_the_expected_result():
    judgement, server = judged([GOOD, GOOD, BAD], votes=3)
    assert judgement == Judgement(1.0, (("outcome", 1.0),))
    assert len(server.requests) == 3
    asked = server.requests[0]["messages"][-1]["content"]
    assert asked.index("What is 2+2?") < asked.index("# Expected result\n\n4") < asked.index("# Answer\n\n4")


def test_the_mean_of_the_steps_is_added_with_its_weight():
    response = "first fine\n\nsecond wrong\n \n\nthird fine\n\nfourth open\n\n"
    answers = by_words(Answer=GOOD, fine=GOOD, wrong=BAD)
    judgement, server = judged(answers, response, args={"outcome": 0.5, "steps": 2.0})
    assert judgement.reward == pytest.approx(0.5 * 1.0 + 2.0 * (1 - 1 + 1 + 0) / 4)
    assert dict(judgement.parts) == {"outcome": 1.0, "steps": 0.25}
    third = next(r for r in server.requests if "The step\n\nthird" in r["messages"][-1]["content"])
    assert "# Steps before\n\nfirst fine\n\nsecond wrong\n\n#" in third["messages"][-1]["content"]


@pytest.mark.parametrize(("response", "questions"), [("", 1), ("a\n\nb\n\nc\n\nd", 2)])
def test_an_empty_answer_is_one_step_and_many_steps_are_bounded(response, questions):
    judgement, server = judged([BAD], response, args={"outcome": 0, "steps": 1, "most_steps": 2})
    assert judgement.reward == -1.0 and "outcome" not in dict(judgement.parts)
    assert len(server.requests) == questions
    if response:
        assert any(r["messages"][-1]["content"].endswith("b\n\nc\n\nd") for r in server.requests)


def test_each_turn_gets_a_score_by_what_came_after_it(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "policy")
    texts = [("What?", False), ("tool call", True), ("error!", False), ("better", True)]
    pieces = [(tokenizer.encode(text, add_special_tokens=False), sampled) for text, sampled in texts]
    ids = [id_ for piece, _ in pieces for id_ in piece]
    sampled_T = np.array([sampled for piece, sampled in pieces for _ in piece])
    versions_T = np.where(sampled_T, np.arange(len(ids)) // 9, UNSAMPLED).astype(np.int32)
    logprobs_T = np.where(sampled_T, -1.0, 0.0).astype(np.float32)
    episode = Trajectory(np.array(ids), sampled_T, logprobs_T, versions_T, Finish.STOP)
    assert len(turns_in(episode)) == 2
    ends = [len("What?tool call"), len(ids)]

    def answer(messages: list[dict]) -> str:
        asked = messages[-1]["content"]
        if "# Answer" in asked:
            return NEUTRAL
        return BAD if "error!" in asked.partition("# What came after")[2] else GOOD

    judgement, _ = judged(answer, episode=episode, args={"turns": True}, policy=str(tmp_path / "policy"))
    assert judgement.turn_rewards == ((ends[0], -1.0), (ends[1], 1.0))
    trained = episode.judged(judgement.reward, judgement.parts, None, judgement.turn_rewards)
    assert trained.header.turn_rewards == trained.turn_rewards == judgement.turn_rewards


@pytest.mark.parametrize(
    ("answers", "part"),
    [
        ([(500, "down")], "1 are missing"),
        (["nonsense"], "0 could be read, 1 could not"),
        ([GOOD, BAD], "two scores lead"),
    ],
)
def test_votes_that_decide_nothing_are_a_failed_attempt_and_no_score(answers, part):
    error, _ = judged(answers, votes=len(answers))
    assert isinstance(error, JudgingFailed) and "Undecided" in str(error) and part in str(error)


def test_it_can_be_a_part_of_a_weighted_reward():
    parts = {"voted": {"path": PATH, "weight": 0.5}}
    judgement, _ = judged([GOOD], path="slipstream.rollout.reward.Weighted", args={"parts": parts})
    assert judgement.reward == 0.5


def test_everything_that_is_wrong_is_named_at_once():
    model = JudgeModel.of(section("http://host", score=None, hint={}), "/policy")
    with pytest.raises(ValueError, match="outcome and steps") as raised:
        ModelVotes(
            model,
            outcome=0,
            most_steps=0,
            turns=True,
            separator="(",
            outcome_prompt="no.such.f",
            step_prompt=f"{__name__}.by_words",
            parser=f"{__name__}.PROMPT",
        )
    named = [line.partition(":")[0] for line in str(raised.value).splitlines()]
    assert named == [
        "outcome and steps are both 0, expected a weight for one of them",
        "turns",
        "separator",
        "outcome_prompt",
        "step_prompt",
        "parser",
    ]


def test_without_a_language_model_it_is_refused(tmp_path):
    plugin = PluginConfig(path=PATH)

    async def main() -> None:
        async with JudgePool(JudgingConfig(), plugin, tmp_path, "test"):
            pass

    with pytest.raises(JudgeStartFailed, match="expected a section `judge` of type model"):
        asyncio.run(asyncio.wait_for(main(), 240))
