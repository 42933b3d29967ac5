"""The benchmark of judges: the start policy learns what a teacher sees; and when the judge is down."""

import asyncio
import random

import pytest

from benchmarks.judges.run import shares
from benchmarks.judges.server import DOWN_S, PERIOD_S, is_down, vote_on
from benchmarks.judges.task import HINT, demonstrate, explaining, hinted
from slipstream.backend.quickstart import task
from slipstream.backend.quickstart.tokenizer import build_tokenizer, prompt_text
from slipstream.rollout.reward.live import JudgedTurn
from slipstream.rollout.reward.model.hints import with_hint
from slipstream.rollout.reward.model.parsing import read_hint, read_score
from slipstream.rollout.reward.model.prompts import ask_hint, ask_score


def test_the_warm_start_shows_the_hint_where_a_teacher_sees_it():
    tokenizer = build_tokenizer()
    prompt = tokenizer.encode(prompt_text("a3b9"))
    seen = with_hint(tokenizer, prompt, [{"role": "user", "content": "a3b9"}], HINT)
    assert seen == tokenizer.encode(prompt_text(hinted("a3b9")))


def test_demonstrations_are_right_behind_the_hint_and_mostly_wrong_without():
    rng, right = random.Random(0), {True: [], False: []}
    for _ in range(2000):
        asked, answered = demonstrate(task.Problem("a8b9", "7"), rng)
        right[asked["content"] != "a8b9"].append(task.is_correct(answered["content"], "7"))
    assert all(right[True]) and len(right[True]) == pytest.approx(1000, abs=100)
    assert sum(right[False]) / len(right[False]) < 0.2


def test_some_users_explain_what_was_wrong():
    said = explaining(random.Random(0))
    words = [asyncio.run(said("wrong")) for _ in range(100)]
    assert set(words) == {"wrong", f"wrong: {HINT}"} and 30 < words.count("wrong") < 70
    assert {asyncio.run(said("thanks")) for _ in range(20)} == {"thanks"}


@pytest.mark.parametrize(
    ("word", "score", "hint"), [("thanks", 1.0, None), ("wrong", -1.0, None), (f"wrong: {HINT}", -1.0, HINT)]
)
def test_the_judge_says_what_the_user_has_said(word, score, hint):
    turn = JudgedTurn("s", "k", [], [{"role": "user", "content": "a3b9"}], {"content": "a33b92#2"}, "stop", 9)
    next_state = [{"role": "user", "content": word}]
    vote = read_score(vote_on(ask_score(turn, next_state)))
    assert vote is not None and (vote.score, vote.hint) == (score, None)
    vote = read_hint(vote_on(ask_hint(turn, next_state)))
    assert vote is not None and (vote.score, vote.hint) == (-1.0 if hint is None else 1.0, hint)


def test_the_judge_is_down_for_a_third_of_the_time():
    assert 3 * DOWN_S == PERIOD_S
    moments = [number / 100 for number in range(int(100 * 4 * PERIOD_S))]
    assert sum(map(is_down, moments)) / len(moments) == pytest.approx(1 / 3, abs=0.01)


def test_a_curve_has_a_point_for_each_two_marks_with_enough_answers_between_them():
    right = [False] * 300 + [True] * 300 + [True, False] * 200
    marks = [(0, 0), (64, 200), (128, 300), (192, 600), (256, 900), (320, 1000)]
    assert shares(marks, right) == [(64, 0.0), (160, 1.0), (256, 0.5)]
