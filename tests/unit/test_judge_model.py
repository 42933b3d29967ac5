"""The language model that judges: what counts as a vote, what the votes decide, and what is no answer."""

import asyncio
import re
from typing import Any

import pytest

from slipstream.configs.schema import LiveJudgingConfig, ModelJudge
from slipstream.configs.schema.plugin import PluginConfig
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.reward.judge.named_model import TURN_VOTES
from slipstream.rollout.reward.judge.wire import ModelSetup
from slipstream.rollout.reward.live import JudgedTurn, Verdict, VoteCounts
from slipstream.rollout.reward.model import endpoint as endpoints
from slipstream.rollout.reward.model.functions import load_parser, load_prompt
from slipstream.rollout.reward.model.judge_model import JudgeModel
from slipstream.rollout.reward.model.parsing import read_hint, read_score
from slipstream.rollout.reward.model.turns import TurnVotes
from slipstream.rollout.reward.model.votes import Tied, Vote, elected, hints_for
from slipstream.rollout.system.plugins import PluginError
from tests.unit.chat_server import Answer, ChatServer, completion

HISTORY = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
    {"id": "b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]
TURN = JudgedTurn(
    "session",
    "alice",
    HISTORY,
    [{"role": "user", "content": "Weather and time?"}],
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    "stop",
    3,
    left_out=2,
)
NEXT = [
    {"role": "tool", "tool_call_id": "a", "content": "rain"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "noon"}]},
]
GOOD, BAD, NEUTRAL = r"\boxed{1}", r"\boxed{-1}", r"\boxed{0}"


def hinted(hint: str) -> str:
    return f"{GOOD} [HINT_START]{hint}[HINT_END]"


def judge(
    answers: Any, turn: JudgedTurn = TURN, next_state=NEXT, **settings: Any
) -> tuple[Verdict, ChatServer]:
    """Return the verdict on a turn, and the server."""
    server = ChatServer(answers)

    async def main() -> Verdict:
        async with server.serving() as url:
            model = JudgeModel.of(section(url, **settings), "/no/such/policy")
            try:
                return await TurnVotes(model).judge(turn, next_state)
            finally:
                assert isinstance(model._endpoint, endpoints.ChatServer)
                if model._endpoint._session is not None:
                    await model._endpoint._session[1].close()

    return asyncio.run(asyncio.wait_for(main(), 120)), server


def section(url: str, **settings: Any) -> dict[str, Any]:
    endpoint = {"type": "url", "url": url, "model": "judge", **settings.pop("endpoint", {})}
    return ModelJudge.model_validate({"endpoint": endpoint, **settings}).model_dump(mode="json")


@pytest.mark.parametrize(
    ("text", "vote"),
    [
        (GOOD, Vote(1.0)),
        (r"It is wrong: \boxed{-1}.", Vote(-1.0)),
        (r"\boxed{ +1 }", Vote(1.0)),
        (r"\boxed{1.0}", Vote(1.0)),
        (r"first \boxed{1}, on reflection \boxed{0}", Vote(0.0)),
        (r"<think>maybe \boxed{-1}</think> yes: \boxed{1}", Vote(1.0)),
        (r"reasoning without its begin \boxed{-1}</think>\boxed{1}", Vote(1.0)),
        (r"<think>\boxed{1}", None),
        (r"<think>\boxed{1}</think> I cannot say", None),
        (r"\boxed{1} and then \boxed{unsure}", None),
        (r"\boxed{2}", None),
        (r"\boxed{1", None),
        (r"\boxed{٣}", None),
        ("1", None),
        ("", None),
        ("\\boxed{" * 10_000, None),
        (hinted(" Say it briefly. "), Vote(1.0, "Say it briefly.")),
        (r"[HINT_START]a[HINT_END] \boxed{1} [HINT_START]b" "\n" r"c[HINT_END]", Vote(1.0, "b\nc")),
        (GOOD + "[HINT_START]half a hint", Vote(1.0)),
        (GOOD + "[HINT_START]  [HINT_END]", Vote(1.0)),
        ("<think>[HINT_START]no[HINT_END]</think>" + GOOD, Vote(1.0)),
    ],
)
def test_the_last_box_and_the_last_hint_behind_the_reasoning_are_a_vote(text, vote):
    assert read_score(text) == vote


def test_a_decision_about_a_hint_is_yes_or_no():
    assert read_hint(NEUTRAL) is None
    assert (read_hint(BAD), read_hint(hinted("x"))) == (Vote(-1.0), Vote(1.0, "x"))


def test_the_strict_plurality_is_elected():
    assert elected([Vote(0.0)]) == 0.0
    assert elected([Vote(1.0), Vote(-1.0), Vote(0.0), Vote(-1.0)]) == -1.0
    with pytest.raises(Tied, match=r"-1\.0: 1, 1\.0: 1"):
        elected([Vote(1.0), Vote(-1.0)])
    with pytest.raises(Tied):
        elected([Vote(1.0), Vote(-1.0), Vote(0.0)])


def test_hints_are_those_of_the_votes_that_say_yes_the_longest_first():
    votes = [Vote(1.0, "bb"), Vote(1.0, " aa "), Vote(-1.0, "longest"), Vote(1.0, "ccc"), Vote(1.0, "bb")]
    assert hints_for(votes, 1.0) == ["ccc", "aa", "bb"]
    assert hints_for([Vote(1.0), Vote(1.0, " ")], 1.0) == []


@pytest.mark.parametrize(
    ("answers", "votes", "verdict"),
    [
        ([GOOD], 1, Verdict(1.0)),
        ([GOOD, BAD, BAD], 3, Verdict(-1.0)),
        ([GOOD, BAD], 2, Verdict(None, votes=VoteCounts(tied=1))),
        ([GOOD, "no idea", BAD, BAD], 4, Verdict(-1.0, votes=VoteCounts(unparsable=1))),
        ([(500, "down"), GOOD, GOOD], 3, Verdict(1.0, votes=VoteCounts(missing=1))),
        ([(429, ""), (404, "?"), (302, ""), GOOD], 4, Verdict(1.0, votes=VoteCounts(missing=3))),
        (["hang", GOOD], 2, Verdict(1.0, votes=VoteCounts(missing=1))),
        (["cut", GOOD], 2, Verdict(1.0, votes=VoteCounts(missing=1))),
        ([completion(GOOD, "length"), GOOD], 2, Verdict(1.0, votes=VoteCounts(unparsable=1))),
        ([completion(None, reasoning_content=GOOD)], 1, Verdict(None, votes=VoteCounts(unparsable=1))),
        ([completion([{"type": "text"}])], 1, Verdict(None, votes=VoteCounts(missing=1))),  # type: ignore
        ([{"choices": []}], 1, Verdict(None, votes=VoteCounts(missing=1))),
        ([{"error": "x"}], 1, Verdict(None, votes=VoteCounts(missing=1))),
        ([(200, "<html>")], 1, Verdict(None, votes=VoteCounts(missing=1))),
        ([(200, "[" * 50_000)], 1, Verdict(None, votes=VoteCounts(missing=1))),
        ([(200, "null")], 1, Verdict(None, votes=VoteCounts(missing=1))),
        (["nonsense \ud800 \x00"], 1, Verdict(None, votes=VoteCounts(unparsable=1))),
        (["x" * 3_000_000 + GOOD], 1, Verdict(1.0)),
        (["x" * 9_000_000 + GOOD], 1, Verdict(None, votes=VoteCounts(missing=1))),
    ],
)
def test_every_answer_is_a_vote_unparsable_or_missing(answers: list[Answer], votes: int, verdict: Verdict):
    given, server = judge(answers, votes=votes, request_timeout_s=5 if "hang" in answers else 60)
    assert given == verdict
    assert len(server.requests) == votes


def test_too_few_good_votes_are_no_verdict():
    assert judge([GOOD, "?", (500, "")], votes=3, min_votes=2)[0] == Verdict(
        None, votes=VoteCounts(unparsable=1, missing=1)
    )
    assert judge([GOOD, "?", GOOD], votes=3, min_votes=2)[0].score == 1.0


def test_the_question_shows_the_conversation_the_answer_and_everything_that_came_next():
    _, server = judge([GOOD], votes=1, temperature=0.25, max_new_tokens=99)
    [body] = server.requests
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.25, 99)
    asked = body["messages"][-1]["content"]
    parts = ["2 older messages", "Be brief.", "Hello", "Weather and time?", "I look.", "Bonn", "rain", "noon"]
    places = [asked.index(part) for part in parts]
    assert places == sorted(places)
    assert "[tool a]" in asked and "[tool b]" in asked


def test_the_end_of_a_session_is_asked_about_too():
    _, server = judge([GOOD], next_state=[], votes=1)
    assert "the conversation ended here" in server.requests[0]["messages"][-1]["content"]


def test_long_messages_keep_their_begin_and_their_end():
    turn = JudgedTurn("s", "k", [], [{"role": "user", "content": "a" * 50_000 + "z"}], HISTORY[0], "stop", 1)
    _, server = judge([GOOD], turn, votes=1)
    asked = server.requests[0]["messages"][-1]["content"]
    assert len(asked) < 30_000 and "30001 characters are left out" in asked and "z\n\n# The reply" in asked


def scores_and_hints(score: str, *decisions: str):
    """Answer questions about scores and hints apart."""
    rest = list(decisions)

    def answer(messages: list[dict]) -> str:
        return rest.pop(0) if "[HINT_START]" in messages[0]["content"] else score

    return answer


def test_the_longest_hint_of_the_votes_that_say_yes_is_taken():
    answers = scores_and_hints(BAD, hinted("short"), hinted("longer hint"), BAD)
    verdict, server = judge(answers, votes=3, hint={})
    assert verdict == Verdict(-1.0, "longer hint")
    assert len(server.requests) == 6


def test_votes_that_say_no_leave_the_score_alone():
    assert judge(scores_and_hints(GOOD, BAD, BAD), votes=2, hint={})[0] == Verdict(1.0)
    no = BAD + "[HINT_START]not meant[HINT_END]"
    assert judge(scores_and_hints(GOOD, no, no), votes=2, hint={})[0] == Verdict(1.0)


def test_without_a_decision_about_hints_there_is_no_verdict_yet():
    verdict, _ = judge(scores_and_hints(GOOD, "?", "?"), votes=2, hint={})
    assert verdict == Verdict(None, votes=VoteCounts(unparsable=2))


def test_the_votes_for_the_winning_score_can_carry_the_hints():
    answers = [hinted("aa"), hinted("b"), BAD + "[HINT_START]longest[HINT_END]"]
    verdict, server = judge(answers, votes=3, hint={"question": None})
    assert verdict == Verdict(1.0, "aa")
    assert len(server.requests) == 3


def test_with_hints_alone_a_turn_without_one_has_nothing_to_learn():
    settings = {"score": None, "hint": {}, "votes": 1}
    assert judge([BAD], **settings)[0] == Verdict(None, nothing_to_learn=True)
    assert judge([hinted("x")], **settings)[0] == Verdict(None, "x")
    assert judge(["?"], **settings)[0] == Verdict(None, votes=VoteCounts(unparsable=1))


def test_a_key_comes_from_the_environment_and_a_missing_one_is_an_error(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", " secret\n")
    _, server = judge([GOOD], votes=1, endpoint={"key_env": "JUDGE_KEY"})
    assert server.keys == ["Bearer secret"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match=r"judge.endpoint.key_env: .* JUDGE_KEY has no key"):
        JudgeModel.of(section("http://host", endpoint={"key_env": "JUDGE_KEY"}), "/policy")


# ---- prompts and parsers of the user


def texts_alone(response_text, next_state_text, next_state_role="user"):
    """A prompt with the parameters of OpenClaw-RL's."""
    return [{"role": "user", "content": f"{response_text}|{next_state_text}|{next_state_role}"}]


def whole_turn(next_state, turn, word="judge"):
    return f"{word} {turn.session} {len(next_state)}"


def nothing_of_a_turn(word):
    return word


def pair(text):
    return (int(text), "hint") if text != "none" else (None, "")


def number(text, base=10):
    return int(text, base)


def plugin(function: str, **args: object) -> PluginConfig:
    return PluginConfig(path=f"{__name__}.{function}", args=args)


def test_a_prompt_gets_what_its_parameters_name():
    assert load_prompt(plugin("whole_turn", word="rate"))(TURN, NEXT) == [
        {"role": "user", "content": "rate session 2"}
    ]
    [message] = load_prompt(plugin("texts_alone"))(TURN, NEXT)
    assert re.fullmatch(r"(?s)I look\..*\|\[tool a\]\nrain\n\n\[tool b\]\nnoon\|tool", message["content"])
    [message] = load_prompt(plugin("texts_alone"))(TURN, [{"role": "user", "content": "no"}])
    assert message["content"].endswith("|no|user")


def test_a_parser_returns_a_number_or_a_pair():
    assert load_parser(plugin("number", base=2))("-1") == Vote(-1.0)
    assert load_parser(plugin("pair"))("1") == Vote(1.0, "hint")
    assert load_parser(plugin("pair"))("none") is None


def test_an_error_of_a_parser_about_the_text_is_an_unparsable_vote():
    settings = {"score": {"parser": {"path": f"{__name__}.number", "args": {}}}, "votes": 2}
    assert judge(["1", "one"], **settings)[0] == Verdict(1.0, votes=VoteCounts(unparsable=1))


@pytest.mark.parametrize(
    ("load", "function", "args", "reason"),
    [
        (load_prompt, "nothing_of_a_turn", {"word": "x"}, "name nothing of a turn; expected some of turn"),
        (load_prompt, "nothing_of_a_turn", {}, "`word` is missing"),
        (load_prompt, "whole_turn", {"words": "x"}, "`words` is unknown: did you mean `word`"),
        (load_prompt, "nowhere", {}, "has no 'nowhere'"),
        (load_prompt, "HISTORY", {}, "is of type list, expected a function"),
        (load_parser, "number", {"text": "x"}, "`text` is unknown"),
        (load_parser, "ChatServer", {}, "is of type type, expected a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(load, function, args, reason):
    with pytest.raises(PluginError, match=re.escape(reason)):
        load(plugin(function, **args))


def test_all_functions_that_cannot_be_used_are_named_at_once():
    settings = section(
        "http://host",
        score={"prompt": "no.such.module.f", "parser": f"{__name__}.nowhere"},
        hint={"question": {"prompt": f"{__name__}.nothing_of_a_turn"}},
    )
    with pytest.raises(PluginError) as raised:
        TurnVotes(JudgeModel.of(settings, "/policy"))
    lines = str(raised.value).splitlines()
    expected = ["judge.score.prompt", "judge.score.parser", "judge.hint.question.prompt"]
    assert [line.partition(":")[0] for line in lines] == expected


# ---- in judge processes


def test_a_judge_process_asks_the_model(tmp_path):
    server = ChatServer(scores_and_hints(GOOD, hinted("x"), hinted("yy")))

    async def main() -> Verdict:
        async with server.serving() as url:
            model = ModelSetup(section(url, votes=2, hint={}), "/policy")
            limits = LiveJudgingConfig(timeout_s=60, attempts=1)
            async with JudgePool(limits, TURN_VOTES, tmp_path, "live", of_turns=True, model=model) as pool:
                return await pool.judge(TURN, NEXT)

    assert asyncio.run(asyncio.wait_for(main(), 120)) == Verdict(1.0, "yy")
