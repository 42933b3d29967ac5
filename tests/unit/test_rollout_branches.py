"""Which turns train together, and the tokens of a branch, from entries alone."""

import msgspec
import pytest

from slipstream.rollout.branches import (
    BranchError,
    Branches,
    BranchTurn,
    RecordedTurn,
    branches_of,
    messages_of_turn,
    rebuild,
)
from slipstream.rollout.record import encode_chunk
from slipstream.rollout.trajectory import UNSAMPLED, Finish
from slipstream.rollout.turns import Turn, TurnType


def recorded(parent, shared, context, tokens, **changes) -> RecordedTurn:
    """A turn with the version 7 and log-probs that tell its tokens: -1 for token 1."""
    values = {
        "session": "s",
        "key": "k",
        "turn_type": TurnType.MAIN,
        "reason": "",
        "spans": ((7, len(tokens)),),
        "finish": Finish.STOP,
        "cancelled": False,
        "started_s": 0.0,
        "ended_s": 1.0,
        "kept": 0,
        "messages": msgspec.Raw(b"[]"),
        "answer": msgspec.Raw(b"{}"),
    }
    chunk = encode_chunk(context, tokens, [-float(token) for token in tokens])
    return RecordedTurn(Turn(parent=parent, shared=shared, **(values | changes)), chunk)


SIDE, CANCELLED = {"turn_type": TurnType.SIDE}, {"cancelled": True}


def branch(turns, last):
    return rebuild(turns, last, branches_of(turns).members(last))


def test_turns_that_repeat_each_other_whole_are_one_branch():
    turns = {1: recorded(None, 0, [10, 11], [1, 2]), 4: recorded(1, 4, [12], [3])}
    whole = branch(turns, 4)
    assert whole.turns == (BranchTurn(1, 2, 4), BranchTurn(4, 5, 6))
    trajectory = whole.trajectory
    assert trajectory.tokens_T.tolist() == [10, 11, 1, 2, 12, 3]
    assert trajectory.loss_mask_T.tolist() == [False, False, True, True, False, True]
    assert trajectory.logprobs_T.tolist() == [0, 0, -1, -2, 0, -3]
    assert trajectory.versions_T.tolist() == [UNSAMPLED, UNSAMPLED, 7, 7, UNSAMPLED, 7]
    assert branch(turns, 1).turns == whole.turns[:1]


def test_a_turn_that_repeats_a_part_begins_a_branch_to_which_the_part_is_context():
    turns = {1: recorded(None, 0, [10], [1, 2]), 2: recorded(1, 2, [11], [3])}
    part = branch(turns, 2)
    assert part.turns == (BranchTurn(2, 3, 4),)
    assert part.trajectory.tokens_T.tolist() == [10, 1, 11, 3]
    assert part.trajectory.loss_mask_T.tolist() == [False, False, False, True]


def test_the_first_of_two_turns_that_repeat_a_turn_continues_it():
    turns = {
        1: recorded(None, 0, [10], [1]),
        2: recorded(1, 2, [11], [2]),
        3: recorded(1, 2, [12], [3]),
        4: recorded(3, 4, [13], [4]),
    }
    branches = branches_of(turns)
    assert [branches.members(number) for number in turns] == [[1], [1, 2], [3], [3, 4]]


@pytest.mark.parametrize("untrained", [SIDE, CANCELLED])
def test_turns_that_are_not_trained_are_context_and_break_no_branch(untrained):
    turns = {
        1: recorded(None, 0, [10], [1]),
        2: recorded(1, 2, [11], [2], **untrained),
        3: recorded(2, 4, [12], [3], **untrained),
        4: recorded(3, 6, [13], [4]),
        5: recorded(1, 2, [14], [5]),
    }
    branches = branches_of(turns)
    assert [branches.members(number) for number in turns] == [[1], [], [], [1, 4], [5]]
    trajectory = branch(turns, 4).trajectory
    assert trajectory.tokens_T.tolist() == [10, 1, 11, 2, 12, 3, 13, 4]
    assert trajectory.tokens_T[trajectory.loss_mask_T].tolist() == [1, 4]
    assert not branch(turns, 3).trajectory.loss_mask_T.any()


def test_a_branch_may_begin_in_the_middle_of_an_answer_of_an_older_turn():
    turns = {
        1: recorded(None, 0, [10], [1, 2, 3]),
        2: recorded(1, 4, [11], [4, 5]),
        3: recorded(2, 3, [12], [6]),
        4: recorded(3, 5, [], [7]),
    }
    assert branches_of(turns).members(4) == [3, 4]
    trajectory = branch(turns, 4).trajectory
    assert trajectory.tokens_T.tolist() == [10, 1, 2, 12, 6, 7]
    assert trajectory.tokens_T[trajectory.loss_mask_T].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ({2: recorded(1, 1, [], [1])}, "turn 1, which is unknown"),
        ({1: recorded(None, 1, [], [1])}, "has no parent"),
        ({1: recorded(None, 0, [1], [1]), 2: recorded(1, 3, [], [1])}, "which has 2 tokens"),
    ],
)
def test_entries_that_do_not_fit_together_are_refused(turns, message):
    with pytest.raises(BranchError, match=message):
        branches_of(turns)
    with pytest.raises(BranchError):
        rebuild(turns, max(turns), [max(turns)])


def test_spans_that_do_not_tile_the_sampled_tokens_are_refused():
    turns = {1: recorded(None, 0, [10], [1, 2], spans=((7, 1),))}
    with pytest.raises(BranchError, match="do not tile 2 tokens"):
        branch(turns, 1)


def test_a_turn_that_is_repeated_in_part_cannot_carry_loss():
    turns = {1: recorded(None, 0, [10], [1, 2]), 2: recorded(1, 2, [11], [3])}
    with pytest.raises(BranchError, match="turn 1 is not repeated whole"):
        rebuild(turns, 2, [1, 2])


def test_a_placed_turn_never_moves():
    turns = {
        1: recorded(None, 0, [10], [1]),
        2: recorded(1, 2, [11], [2]),
        3: recorded(1, 2, [12], [3]),
    }
    branches, seen = Branches(), []
    for number, (turn, _) in turns.items():
        branches.add(number, turn, 2)
        seen.append([branches.members(earlier) for earlier in turns if earlier <= number])
    assert seen == [[[1]], [[1], [1, 2]], [[1], [1, 2], [3]]]


def test_the_messages_of_a_turn_are_those_it_keeps_and_those_it_adds():
    def said(text):
        return msgspec.Raw(msgspec.json.encode([{"content": part} for part in text]))

    def answered(text):
        return msgspec.Raw(msgspec.json.encode({"content": text}))

    turns = {
        1: recorded(None, 0, [1], [1], messages=said("ab"), answer=answered("c")).turn,
        2: recorded(1, 2, [1], [1], kept=3, messages=said("d"), answer=answered("e")).turn,
        3: recorded(2, 2, [1], [1], kept=1, messages=said("xyz")).turn,
    }
    texts = {number: "".join(str(m["content"]) for m in messages_of_turn(turns, number)) for number in turns}
    assert texts == {1: "ab", 2: "abcd", 3: "axyz"}
