"""Rewards that compare texts, and where they find the answer in a response."""

import asyncio
import re
import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout.reward import F1, Choice, Exact, FinalAnswer, MathVerify, Regex
from slipstream.rollout.reward.answers import answer_finder, last_boxed
from slipstream.rollout.reward.judge.judge_pool import JudgingFailed
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.judging import HANGS_S, Judging, trajectory


def score(reward, label, response):
    value = reward.score(Prompt(3, "?", label), response, trajectory())
    return asyncio.run(value) if asyncio.iscoroutine(value) else value


# ---- where the answer is


@pytest.mark.parametrize(
    ("form", "response", "answer"),
    [
        ("all", "  a b \n", "a b"),
        ("boxed", r"so \boxed{4} or \boxed{ 5 }.", "5"),
        ("boxed", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\fbox {x}", "x"),
        ("boxed", r"\boxed{a \boxed{b} c}", r"a \boxed{b} c"),
        ("boxed", r"\boxed{1} and \boxed{2", "1"),
        ("boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{\}}", r"\}"),
        ("boxed", r"\boxed{", None),
        ("boxed", r"} \boxed 4", None),
        ("boxed", "", None),
        ("last_line", "a\n b \n\n", "b"),
        ("last_line", " \n", None),
        ({"after": "####"}, "1 #### 2 #### 3 ", "3"),
        ({"after": "####"}, "###", None),
        ({"tag": "answer"}, "<answer>1</answer><answer> 2 </answer> ...", "2"),
        ({"tag": "answer"}, "<answer>1", None),
        ({"tag": "answer"}, "1</answer><answer>", None),
    ],
)
def test_the_answer_is_found_where_the_recipe_says(form, response, answer):
    assert answer_finder(form)(response) == answer


@pytest.mark.parametrize(
    "form", ["box", "", None, 3, {}, {"after": ""}, {"after": "a", "tag": "b"}, {"tag": "a b"}]
)
def test_another_form_is_refused_with_those_that_exist(form):
    with pytest.raises(
        ValueError, match=r"answer: found .*, expected `all`, `boxed`, `last_line`, `\{after: MARKER"
    ):
        Exact(answer=form)


def boxes(text: str) -> list[tuple[int, int]]:
    """Every balanced box, by trying out each end: slow, and plain."""
    spans = []
    for begin in re.finditer(r"\\(?:boxed|fbox)\{", text):
        depth = 1
        place = begin.end()
        while place < len(text) and depth:
            if text[place] == "\\":
                place += 1
            elif text[place] in "{}":
                depth += 1 if text[place] == "{" else -1
            place += 1
        if not depth:
            spans.append((begin.end(), place - 1))
    return spans


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([r"\boxed{", "{", "}", r"\{", r"\}", "a", " ", r"\fbox{"]), max_size=14).map(
        "".join
    )
)
def test_the_last_box_is_the_one_that_ends_last(text):
    spans = boxes(text)
    expected = text[slice(*max(spans, key=lambda span: span[1]))].strip() if spans else None
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    "response", [r"\boxed{" * 200_000, "{" * 10**6, r"\boxed{" + "{" * 10**6 + "}" * 10**6]
)
def test_braces_without_end_take_linear_time(response):
    """Twice the length of a quadratic search takes four times as long; here it would be minutes."""
    assert last_boxed(response) is None or response.startswith(r"\boxed{")


# ---- Exact


@pytest.mark.parametrize(
    ("args", "label", "response", "reward"),
    [
        ({}, "4", " 4\n", 1.0),
        ({}, 4, "4", 1.0),
        ({}, "a  b", "a\nb", 1.0),
        ({}, 18.0, "18", 1.0),
        ({}, 18.0, "18.0", 1.0),
        ({}, 18.5, "18", 0.0),
        ({}, True, "true", 1.0),
        ({}, ["a", 3.0], "3", 1.0),
        ({}, "é", "e\u0301", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({}, ["4", "four"], "four", 1.0),
        ({}, ["4", "four"], "4 four", 0.0),
        ({"answer": "boxed"}, "4", r"it is \boxed{4}", 1.0),
        ({"answer": "boxed"}, "4", "4", 0.0),
        ({"answer": "boxed"}, "", "no box", 0.0),
        ({}, "4", "\x00\udcff" * 10, 0.0),
    ],
)
def test_exact(args, label, response, reward):
    assert score(Exact(**args), label, response) == reward


@pytest.mark.parametrize("label", [None, {}, [], [None], ["a", None]])
@pytest.mark.parametrize("reward", [Exact(), F1(), Regex("(?P<answer>.)")])
def test_a_label_that_is_no_text_is_a_failure_and_no_wrong_answer(reward, label):
    with pytest.raises(ValueError, match=r"prompt 3 has the label .* expected a text to compare with"):
        score(reward, label, "4")


@pytest.mark.parametrize("label", [float("nan"), float("inf"), ["a", float("nan")]])
@pytest.mark.parametrize("reward", [Exact(), F1(), Regex("(?P<answer>.)"), FinalAnswer(), MathVerify()])
def test_a_label_that_is_missing_is_refused_before_the_run(reward, label):
    if isinstance(label, list) and isinstance(reward, FinalAnswer):
        return
    with pytest.raises(ValueError, match="prompt 3 has the label"):
        reward.check_prompt(Prompt(3, "?", label))


# ---- Choice


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) Paris", "B"),
        ("**B. Paris**", "B"),
        ("The answer is B", "B"),
        ("The answer is (b).", "B"),
        ("The correct answer is: **B**", "B"),
        ("**Answer:** B", "B"),
        ("Final answer: $B$", "B"),
        ("The answer is option B", "B"),
        ("The answer is B because it is larger.", "B"),
        ("The answer is A. No, the answer is C.", "C"),
        (r"So \boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"$\boxed{\textbf{(B)}\ 5}$", "B"),
        (r"The answer is A. \boxed{C}", "C"),
        ("First I think.\nThen: (C)", "C"),
        ("Therefore, we choose (C).", "C"),
        ("A", "A"),
        ("A\n", "A"),
        ("The answer is A good one", None),
        ("The answer is a good one", None),
        ("A man walks into a bar", None),
        ("I do not know", None),
        ("B vitamins are good", None),
        ("The answer is A or B", None),
        ("Answer: A, B", None),
        ("Answer: A, C and D", None),
        (r"\boxed{A, B}", None),
        (r"\boxed{AB}", None),
        (r"\boxed{}", None),
        ("Because", None),
        ("", None),
        ("\n \n", None),
        ("\x00\udcff", None),
        ("answer is " * 10_000, None),
        ("answer is " + "(" * 100_000, None),
        ("answer" + " " * 100_000 + "!", None),
    ],
)
def test_a_choice_is_read_in_its_usual_forms(response, letter):
    assert Choice().chosen(response) == letter
    if letter is not None:
        assert score(Choice(), letter, response) == 1.0
    assert score(Choice(), "E", response) == 0.0


def test_letters_beyond_those_of_the_question_are_no_choice():
    assert Choice("ABCD").chosen("The answer is E") is None


@pytest.mark.parametrize(
    ("label", "letter"), [("b", "B"), ("(B)", "B"), ("B.", "B"), (1, "B"), (0, "A"), (1.0, "B")]
)
def test_the_label_may_be_a_letter_or_a_place(label, letter):
    assert score(Choice("ABCD"), label, letter) == 1.0


@pytest.mark.parametrize("label", ["E", "AB", "", None, 4, -1, True, float("nan"), 0.5])
def test_a_label_that_cannot_be_chosen_is_a_failure(label):
    with pytest.raises(ValueError, match=r"prompt 3 has the label .*, expected one of the letters ABCD"):
        score(Choice("ABCD"), label, "A")


@pytest.mark.parametrize("letters", ["A", "AA", "ab", "A1", ""])
def test_letters_that_cannot_be_told_apart_are_refused(letters):
    with pytest.raises(ValueError, match="letters: found"):
        Choice(letters)


# ---- Regex


@pytest.mark.parametrize(
    ("args", "label", "response", "reward"),
    [
        ({"pattern": "<think>.*</think>"}, None, "<think>a\nb</think> 4", 1.0),
        ({"pattern": "^<think>"}, None, "4 <think>", 0.0),
        ({"pattern": "yes", "ignore_case": True}, None, "YES", 1.0),
        ({"pattern": r"#(?P<answer>[^#]*)"}, "4", "#3 # 4 ", 1.0),
        ({"pattern": r"#(?P<answer>[^#]*)"}, "3", "#3 # 4 ", 0.0),
        ({"pattern": r"#(?P<answer>\d+)"}, "3", "none", 0.0),
        ({"pattern": r"a|(?P<answer>\d+)"}, "3", "3 a", 0.0),
    ],
)
def test_regex(args, label, response, reward):
    assert score(Regex(**args), label, response) == reward


def test_an_expression_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"pattern: '\(' is no regular expression: missing \)"):
        Regex("(")


# ---- F1


def squad_words(s: str) -> list[str]:
    """``normalize_answer`` of SQuAD's evaluation script, with its steps."""
    lower = s.lower()
    no_punctuation = "".join(ch for ch in lower if ch not in set(string.punctuation))
    no_articles = re.sub(r"\b(a|an|the)\b", " ", no_punctuation)
    return " ".join(no_articles.split()).split()


def squad_f1(gold: str, predicted: str) -> float:
    """``compute_f1`` of the script for SQuAD 2.0."""
    gold_words, predicted_words = squad_words(gold), squad_words(predicted)
    same = sum((Counter(gold_words) & Counter(predicted_words)).values())
    if len(gold_words) == 0 or len(predicted_words) == 0:
        return int(gold_words == predicted_words)
    if same == 0:
        return 0
    precision = 1.0 * same / len(predicted_words)
    recall = 1.0 * same / len(gold_words)
    return (2 * precision * recall) / (precision + recall)


TEXTS = st.lists(
    st.sampled_from(["the", "a", "An", "Denver", "Broncos", "in-game", "4.", "'", "!", "\t", "ä"]), max_size=6
).map(" ".join)


@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_f1_is_that_of_the_evaluation_script(labels, response):
    value = score(F1(), labels, response)
    assert value["reward"] == pytest.approx(max(squad_f1(label, response) for label in labels))
    assert value["exact_match"] == max(squad_words(label) == squad_words(response) for label in labels)


@pytest.mark.parametrize(
    ("label", "response", "f1", "exact"),
    [
        ("Denver Broncos", "The Denver Broncos!", 1.0, 1.0),
        ("Denver Broncos", "Denver", 2 / 3, 0.0),
        ("Santa Clara, California", "Levi's Stadium in Santa Clara", 0.5, 0.0),
        ("", "", 1.0, 1.0),
        ("", "something", 0.0, 0.0),
        ("1 1 2", "1 2 2", 2 / 3, 0.0),
    ],
)
def test_f1_by_hand(label, response, f1, exact):
    assert score(F1(), label, response) == pytest.approx({"reward": f1, "exact_match": exact})


def test_f1_of_a_response_without_the_answer_that_is_looked_for_is_0():
    assert score(F1(answer="boxed"), "", "no box") == {"reward": 0.0, "exact_match": 0.0}


def test_a_catastrophic_expression_ends_with_the_time_limit_of_judging_and_is_no_wrong_answer(
    tmp_path, monkeypatch
):
    judging = Judging(tmp_path, monkeypatch)

    async def ask(pool):
        async def about(response):
            return (await pool.score(Prompt(3, "?"), response, trajectory())).reward

        return await asyncio.gather(about("a" * 64), about("aab"), return_exceptions=True)

    path = "slipstream.rollout.reward.Regex"
    failed, found = judging.use(judging.pool_of(path, {"pattern": "^(a+)+b$"}, timeout_s=HANGS_S), ask)
    assert isinstance(failed, JudgingFailed) and "longer than 3 s" in str(failed)
    assert found == 1.0
