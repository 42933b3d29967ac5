"""The streaming benchmark's eyes: whatever is wrong with an answer is counted, once, as what it is."""

from dataclasses import replace

import msgspec
import pytest

from benchmarks.streaming.answers import Heard, Reading, Recorded, account_of
from slipstream.rollout.tokens.trajectory import Finish
from slipstream.rollout.tokens.turn_entries import Turn, TurnType

END = 0
READING = Reading(lambda ids: "".join(chr(96 + each) for each in ids if each != END), END)
WRONG = (
    "failed",
    "truncated",
    "duplicated",
    "altered",
    "ends_wrong",
    "spans_wrong",
    "repeats_wrong",
)


def recorded(*ids: int, spans=None, finish: Finish = Finish.STOP, logprobs=None) -> Recorded:
    turn = Turn(
        session="s",
        key="k",
        parent=None,
        shared=0,
        turn_type=TurnType.MAIN,
        reason="",
        spans=tuple(spans or [(3, len(ids))]),
        finish=finish,
        cancelled=False,
        started_s=0.0,
        ended_s=0.0,
        kept=0,
        messages=msgspec.Raw(b"[]"),
        answer=msgspec.Raw(b"{}"),
    )
    return Recorded(turn, [9, 9], list(ids), logprobs or [-1.0] * len(ids))


TURN = recorded(1, 2, 3, END, spans=[(3, 2), (4, 2)])
HEARD = Heard(
    "s", 8, text="abc", finish="stop", prompt_tokens=2, completion_tokens=4, ids=[1, 2, 3, END],
    logprobs=[-1.0] * 4, spans=[(3, 2), (4, 2)],
)  # fmt: skip


def wrong(*heard: Heard, turns=(TURN,)) -> dict[str, int]:
    sums = account_of(heard, {"s": turns}, READING)
    return {name: number for name in WRONG if (number := getattr(sums, name))}


def test_an_answer_that_is_right_counts_as_nothing_else():
    sums = account_of(
        [HEARD, replace(HEARD, ids=None, logprobs=None, spans=None)], {"s": [TURN, TURN]}, READING
    )
    assert sums.is_clean
    assert (sums.answers, sums.tokens, sums.crossing, sums.versions) == (2, 8, 2, {3, 4})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"error": "HTTP 500"}, "failed"),
        ({"finish": None}, "truncated"),
        ({"text": "ab", "ids": [1, 2]}, "truncated"),
        ({"text": "ab", "ids": None}, "truncated"),
        ({"text": "abcc", "ids": None}, "duplicated"),
        ({"ids": [1, 2, 2, 3, END]}, "duplicated"),
        ({"text": "abd", "ids": None}, "altered"),
        ({"ids": [1, 2, 4, END]}, "altered"),
        ({"finish": "length"}, "ends_wrong"),
        ({"completion_tokens": 3}, "ends_wrong"),
        ({"prompt_tokens": 3}, "ends_wrong"),
        ({"spans": [(3, 3), (4, 1)]}, "spans_wrong"),
        ({"logprobs": [-1.0] * 3 + [-2.0]}, "spans_wrong"),
    ],
)
def test_an_answer_that_is_wrong_counts_once(changes, expected):
    assert wrong(replace(HEARD, **changes)) == {expected: 1}


@pytest.mark.parametrize("spans", [[(3, 2), (4, 1)], [(4, 2), (3, 2)], [(3, 2), (3, 2)], [(3, 5)]])
def test_spans_tile_all_tokens_and_versions_grow(spans):
    turn = recorded(1, 2, 3, END, spans=spans)
    assert wrong(replace(HEARD, spans=spans), turns=(turn,)) == {"spans_wrong": 1}


def test_an_answer_ends_for_a_reason_that_its_ids_show():
    heard = Heard("s", 3, text="ab", finish="stop", prompt_tokens=2, completion_tokens=3)
    assert wrong(replace(heard, stops=["c"]), turns=(recorded(1, 2, 3),)) == {}
    assert (
        wrong(replace(heard, text="abc", finish="length"), turns=(recorded(1, 2, 3, finish=Finish.LENGTH),))
        == {}
    )
    assert wrong(replace(heard, text="abc", limit=4), turns=(recorded(1, 2, 3),)) == {"ends_wrong": 1}
    assert wrong(replace(heard, text="abc"), turns=(recorded(1, 2, 3),)) == {"ends_wrong": 1}


def test_an_answer_that_is_recorded_twice_or_never_is_noticed():
    assert wrong(HEARD, turns=(TURN, TURN)) == {"duplicated": 1}
    assert wrong(HEARD, turns=()) == {"failed": 1}


def test_greedy_answers_to_the_same_ids_are_the_same_up_to_ties():
    first = replace(HEARD, greedy=True, session="first")
    again = replace(first, session="again")
    other = recorded(1, 2, 5, END, spans=[(3, 2), (4, 2)], logprobs=[-1.0, -1.0, -1.2, -1.0])
    tie = recorded(1, 2, 5, END, spans=[(3, 2), (4, 2)], logprobs=[-1.0, -1.0, -1.00001, -1.0])
    for turn, expected in ((TURN, (1, 0, 0)), (other, (1, 1, 0)), (tie, (1, 0, 1))):
        heard = replace(again, text=READING.text(turn.ids, ()), ids=turn.ids, logprobs=turn.logprobs)
        sums = account_of([first, heard], {"first": [TURN], "again": [turn]}, READING)
        assert (sums.repeats, sums.repeats_wrong, sums.ties) == expected
    whole = replace(again, repeats=([1, 2, 3, END], [-1.0] * 4))
    assert account_of([whole], {"again": [TURN]}, READING).repeats == 1
    assert account_of([whole], {"again": [other]}, READING).repeats_wrong == 1
