"""The trajectories of an episode, from the turns that its clients have got. Pure.

    turns      1 ── 2 ── 4        3 continues 1 as well: the branch begins with 3
                └── 3
    parts      [1 2 4], [1 3]     turn 1 carries loss in the first one, and is context in the second one

A turn that is not trained is context to all, and counts as sampled by nobody. A branch without a turn that is
trained is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from slipstream.rollout.tokens.trajectory import UNSAMPLED, Completion, Finish, Span, Trajectory
from slipstream.rollout.tokens.turn_entries import TurnType
from slipstream.rollout.workflow.endpoint import Reply


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One completion, as it is in the chain of its branch."""

    number: int
    """Ascending in the order in which turns have ended."""
    parent: int | None
    shared: int
    """Number of tokens that the prompt has in common with the parent's branch, from its beginning."""
    context: npt.NDArray[np.int32]
    """int32 token ids of the prompt after the shared ones."""
    tokens: npt.NDArray[np.int32]
    """Sampled token ids, int32 [S]."""
    logprobs: npt.NDArray[np.float32]
    """Behaviour log-probs, float32 [S]."""
    spans: Sequence[tuple[int, int]]
    """(version, tokens) of the sampled tokens, in order."""
    finish: Finish
    turn_type: TurnType
    cancelled: bool
    reason: str
    """Why it is a side turn."""

    @property
    def is_trained(self) -> bool:
        return self.turn_type is TurnType.MAIN and not self.cancelled and len(self.tokens) > 0

    @property
    def own_length(self) -> int:
        """Number of tokens after the shared ones."""
        return len(self.context) + len(self.tokens)


def trajectories_of(turns: Mapping[int, SampledTurn], retractions: int = 0) -> list[Trajectory]:
    """Return the trajectories of all branches with a turn that is trained, in the order of their ends.

    ``turns``: by number. ``retractions``: of all completions; they stand in the last trajectory.
    """
    branches = _branches(turns)
    return [
        _trajectory(turns, carrying, retractions if place == len(branches) else 0)
        for place, carrying in enumerate(branches, 1)
    ]


def replies_of(turns: Mapping[int, SampledTurn], retractions: int = 0) -> list[Reply]:
    """Return the completion of each turn that is trained, in order, and the token ids that it continues.

    ``turns``: by number. ``retractions``: of all completions; the last one has them.
    """
    trained = [turns[number] for number in sorted(turns) if turns[number].is_trained]
    return [
        _reply(turns, turn, retractions if place == len(trained) else 0)
        for place, turn in enumerate(trained, 1)
    ]


def untrained_replies_of(turns: Mapping[int, SampledTurn]) -> list[Reply]:
    """Return the completions that are left out of ``replies_of``, in order."""
    others = (turns[number] for number in sorted(turns) if not turns[number].is_trained)
    return [_reply(turns, turn, 0) for turn in others if len(turn.tokens)]


def _reply(turns: Mapping[int, SampledTurn], turn: SampledTurn, retractions: int) -> Reply:
    parts = [_tokens(part, carries_loss=False)[:length] for part, length in _chain(turns, turn)]
    input_ids = np.concatenate(parts)["token"][: -len(turn.tokens)]
    ends = accumulate(length for _, length in turn.spans)
    spans = tuple(
        Span(version, end - length, end) for (version, length), end in zip(turn.spans, ends, strict=True)
    )
    tokens, logprobs = tuple(turn.tokens.tolist()), tuple(turn.logprobs.tolist())
    return Reply(tuple(input_ids.tolist()), Completion(tokens, logprobs, spans, turn.finish, retractions))


def _branches(turns: Mapping[int, SampledTurn]) -> list[list[SampledTurn]]:
    """Return the turns that carry loss on each branch, in the order in which the branches have ended.

    A turn whose client has gone before its end is on none, and nothing continues it.
    """
    ends: dict[int, list[SampledTurn]] = {}
    """By the number of the last turn of a branch so far: its turns that carry loss."""
    for number in sorted(turns):
        turn = turns[number]
        if turn.cancelled:
            continue
        carrying: list[SampledTurn] = []
        if turn.parent in ends and turn.shared == turns[turn.parent].shared + turns[turn.parent].own_length:
            carrying = ends.pop(turn.parent)
        ends[number] = [*carrying, turn] if turn.is_trained else carrying
    return [carrying for _, carrying in sorted(ends.items()) if carrying]


def _trajectory(
    turns: Mapping[int, SampledTurn], carrying: Sequence[SampledTurn], retractions: int
) -> Trajectory:
    """Return the trajectory of a branch up to the last turn that carries loss there."""
    trained = {turn.number for turn in carrying}
    parts = [
        _tokens(turn, carries_loss=turn.number in trained)[:length]
        for turn, length in _chain(turns, carrying[-1])
    ]
    tokens_T = np.concatenate(parts)
    versions_T = tokens_T["version"].copy()
    return Trajectory(
        tokens_T["token"].astype(np.int64),
        versions_T != UNSAMPLED,
        tokens_T["logprob"].copy(),
        versions_T,
        carrying[-1].finish,
        retractions,
    )


_TOKEN = np.dtype([("token", np.int32), ("logprob", np.float32), ("version", np.int32)])


def _tokens(turn: SampledTurn, *, carries_loss: bool) -> npt.NDArray[np.void]:
    """Return the tokens that a turn adds to its branch, [own_length]."""
    tokens = np.zeros(turn.own_length, _TOKEN)
    tokens["token"] = np.concatenate([turn.context, turn.tokens])
    tokens["version"] = UNSAMPLED
    if carries_loss:
        start = len(turn.context)
        tokens["logprob"][start:] = turn.logprobs
        for version, length in turn.spans:
            tokens["version"][start : start + length] = version
            start += length
    return tokens


def _chain(turns: Mapping[int, SampledTurn], last: SampledTurn) -> list[tuple[SampledTurn, int]]:
    """Return the turns of whose tokens a branch consists, in order, and how many of each belong to it."""
    chain: list[tuple[SampledTurn, int]] = []
    turn, end = last, last.shared + last.own_length
    while True:
        if end > turn.shared:
            chain.append((turn, end - turn.shared))
        end = min(end, turn.shared)
        if turn.parent is None or not end:
            break
        turn = turns[turn.parent]
    chain.reverse()
    return chain
