"""Turns of live users in judge processes: what a verdict is, and what is none."""

import asyncio
import re

import pytest

from slipstream.configs.schema import LiveJudgingConfig, PluginConfig
from slipstream.rollout.reward.judge.judge_errors import JudgeStartFailed, JudgingFailed
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.reward.live import JudgedTurn, RuleJudge, Verdict

ASKED = [{"role": "user", "content": "What is 2+2?"}]
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "5"}]}
TURN = JudgedTurn("session", "alice", [], ASKED, ANSWER, "stop", 3)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def verdicts(folder, questions, judge="Told", args=None, **settings):
    plugin = PluginConfig(path=f"tests.unit.live_judges.{judge}", args=args or {})
    limits = {"timeout_s": 60.0, "retry_after_s": 0.01, "attempts": 1} | settings
    pool = JudgePool(LiveJudgingConfig(**limits), plugin, folder, "live", of_turns=True)

    async def ask():
        async with pool:
            asked = [pool.judge(TURN, question) for question in questions]
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 120)

    return asyncio.run(ask())


def test_a_verdict_arrives_with_its_hint_and_from_the_whole_turn(tmp_path):
    given = verdicts(tmp_path, [user("score -0.5"), user("nothing"), [], user("none")])
    assert given == [Verdict(-0.5, "session alice 5"), Verdict(None), Verdict(None), Verdict(None)]


def test_a_function_with_its_parameters_is_a_judge(tmp_path):
    assert verdicts(tmp_path, [user("")], "judge", {"least": 2}) == [Verdict(1.0)]


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("raise", "the server of the judge is down"),
        ("sleep", r"longer than 3 s \(live.judging.timeout_s\)"),
        ("die", "ended its judge process with exit code 3"),
        ("number", "expected a Verdict or None"),
        ("score nan", "expected a finite number"),
    ],
)
def test_whatever_is_no_verdict_is_a_failure_that_says_why(tmp_path, said, cause):
    limit_s = 3.0 if said == "sleep" else 60.0
    [failure, other] = verdicts(tmp_path, [user(said), user("score 1")], timeout_s=limit_s)
    assert isinstance(failure, JudgingFailed)
    assert re.search(cause, str(failure))
    assert "live.judging.attempts: 1" in str(failure)
    assert other == Verdict(1.0, "session alice 5")


def test_what_has_no_method_judge_is_refused_at_the_start(tmp_path):
    with pytest.raises(JudgeStartFailed, match=r"has no method `judge`.*\(turn, next_state\)"):
        verdicts(tmp_path, [], "NoJudge")


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Thanks, that works!", 1.0),
        ("That's not what I meant", -1.0),
        ("And what is 3+3?", None),
        ("Great, but the second one is wrong", None),
    ],
)
def test_the_rule_judge_reads_praise_and_complaint(said, score):
    assert asyncio.run(RuleJudge().judge(TURN, user(said))).score == score


def test_the_rule_judge_reads_tool_output_and_parts_and_no_next_state(tmp_path):
    judge = RuleJudge(otherwise=0.5)
    failed = [{"role": "tool", "content": [{"type": "text", "text": "Traceback (most recent call last)"}]}]
    assert asyncio.run(judge.judge(TURN, failed)).score == -1.0
    assert asyncio.run(judge.judge(TURN, [])).score == 0.5
    assert asyncio.run(judge.judge(TURN, [{"role": "user", "content": None}])).score == 0.5
