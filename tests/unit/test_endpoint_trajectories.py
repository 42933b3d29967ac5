"""Trajectories of an episode's turns, against a recount by hand: every token in its place, loss once."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.gateway.endpoint.trajectories import SampledTurn, replies_of, trajectories_of
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish
from slipstream.rollout.tokens.turn_entries import TurnType
from tests.tries import tries


@dataclass
class Script:
    """One turn: which earlier turn it descends from, and how much of that turn's branch it repeats."""

    parent: int | None
    drops: int
    """Number of tokens of the parent's branch that it does not repeat."""
    context: int
    sampled: int
    side: bool
    cancelled: bool


SCRIPTS = st.lists(
    st.builds(
        Script,
        st.none() | st.integers(0, 7),
        st.sampled_from([0, 0, 0, 1, 3]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.booleans(),
        st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=8,
)


def build(scripts: list[Script]) -> tuple[dict[int, SampledTurn], dict[int, list[tuple[int, int | None]]]]:
    """Return turns, and the branch of each: (token, number of the turn that has sampled it)."""
    turns: dict[int, SampledTurn] = {}
    branches: dict[int, list[tuple[int, int | None]]] = {}
    for number, script in enumerate(scripts):
        parent = script.parent if script.parent is not None and script.parent < number else None
        before = [] if parent is None else branches[parent]
        shared = max(0, len(before) - script.drops)
        context = [1000 * number + k for k in range(script.context)]
        sampled = [1000 * number + 500 + k for k in range(script.sampled)]
        branches[number] = [
            *before[:shared],
            *((token, None) for token in context),
            *((token, number) for token in sampled),
        ]
        first = len(sampled) // 2
        turns[number] = SampledTurn(
            number,
            parent,
            shared,
            np.array(context, np.int32),
            np.array(sampled, np.int32),
            np.array([-token / 1024 for token in sampled], np.float32),
            [span for span in ((3, first), (4, len(sampled) - first)) if span[1]],
            Finish.STOP,
            TurnType.SIDE if script.side else TurnType.MAIN,
            script.cancelled,
            "",
        )
    return turns, branches


@tries(167)
@given(SCRIPTS)
def test_every_trained_token_carries_loss_once_behind_its_own_prompt(scripts):
    turns, branches = build(scripts)
    trained = {
        n for n, turn in turns.items() if not (scripts[n].side or scripts[n].cancelled) and len(turn.tokens)
    }
    carried: list[int] = []
    for trajectory in trajectories_of(turns, retractions=2):
        tokens, mask = trajectory.tokens_T.tolist(), trajectory.loss_mask_T.tolist()
        loss = [token for token, carries in zip(tokens, mask, strict=True) if carries]
        assert loss
        carried += loss
        last = loss[-1] // 1000
        assert tokens == [token for token, _ in branches[last]], "it ends with its last turn that is trained"
        for token, carries, logprob, version in zip(
            tokens, mask, trajectory.logprobs_T, trajectory.versions_T, strict=True
        ):
            place = token % 1000 - 500
            if carries:
                first = len(turns[token // 1000].tokens) // 2
                assert (logprob, version) == (-token / 1024, 3 if place < first else 4)
            else:
                assert (logprob, version) == (0, UNSAMPLED)
    assert sorted(carried) == sorted(token for n in trained for token in turns[n].tokens.tolist())


@tries(67)
@given(SCRIPTS)
def test_each_reply_stands_behind_the_ids_that_it_was_asked_with(scripts):
    turns, branches = build(scripts)
    trained = [n for n, turn in turns.items() if turn.is_trained]
    replies = replies_of(turns, retractions=2)
    assert [reply.completion.tokens for reply in replies] == [tuple(turns[n].tokens) for n in trained]
    for number, reply in zip(trained, replies, strict=True):
        tokens, first = len(turns[number].tokens), len(turns[number].tokens) // 2
        assert list(reply.input_ids) == [token for token, _ in branches[number]][:-tokens]
        assert reply.completion.versions().tolist() == [3] * first + [4] * (tokens - first)
        assert reply.completion.logprobs == tuple(turns[number].logprobs.tolist())
    assert sum(reply.completion.retractions for reply in replies) == (2 if replies else 0)


@tries(67)
@given(SCRIPTS)
def test_a_conversation_that_only_grows_is_one_trajectory(scripts):
    for number, script in enumerate(scripts):
        script.parent, script.drops, script.cancelled = number - 1 if number else None, 0, False
    turns, _ = build(scripts)
    trajectories = trajectories_of(turns, retractions=2)
    assert len(trajectories) == any(not script.side and script.sampled for script in scripts)
    assert [trajectory.retractions for trajectory in trajectories] == [2] * len(trajectories)
