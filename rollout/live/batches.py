"""The trajectories of the turns that train together. Plain data.

A turn that was trained before, a side turn and one that waits are context: their tokens carry no loss, and
count as sampled by nobody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.rollout.control.live_door import StaleOf
from slipstream.rollout.ledger.rows.stored_turns import KnownTurn, branch_of
from slipstream.rollout.ledger.writing.transaction import Training
from slipstream.rollout.live.baseline import Score
from slipstream.rollout.tokens.named_numbers import means_by_name
from slipstream.rollout.tokens.record import cut_chunks
from slipstream.rollout.tokens.trajectory import UNSAMPLED, RewardParts, Run, TrajectoryHeader, count_tokens


@dataclass(slots=True)
class LiveTrajectory:
    """A trajectory of live turns, as a batch holds it."""

    turns: tuple[KnownTurn, ...]
    """Turns whose tokens carry loss, in order."""
    header: TrajectoryHeader
    refs: bytes
    """``record.REF`` of the chunk of each turn of the branch, one after the other. A teacher's scores of a
    turn whose tokens carry loss, if it has any, follow its chunk."""
    kept: tuple[int, ...]
    """Number of tokens that belong to the trajectory, of each chunk: ``record.cut_chunks``."""
    is_cut: bool
    """True if any of these numbers is smaller than that of the chunk's tokens."""
    stale: tuple[frozenset[int], ...]
    """Policy versions whose tokens carry no loss, of each of the turns."""
    advantages: tuple[float | None, ...] = ()
    """Advantage of each of the turns. None: the turn has no score."""
    trained_tokens: dict[int, int] = field(init=False)
    """Number of tokens that carry loss, by policy version."""

    def __post_init__(self) -> None:
        self.trained_tokens, _ = count_tokens([self.header])

    def payload(self, chunks: bytes) -> bytes:
        """Return the chunks of the trajectory, given those that ``refs`` points to. Raises CorruptRecord."""
        return cut_chunks(chunks, self.kept) if self.is_cut else chunks

    @property
    def ids(self) -> list[int]:
        """Numbers of the turns."""
        return [turn.id for turn in self.turns]

    @property
    def scores(self) -> list[Score]:
        """Scores of the turns that have one."""
        return [
            Score(turn.key, turn.score, None if turn.verdict is None else turn.verdict.group)
            for turn in self.turns
            if turn.score is not None
        ]

    def trainings(self, lags: dict[int, int]) -> Iterable[Training]:
        """Yield the account of each turn. ``lags``: of all versions whose tokens carry loss."""
        for turn, stale in zip(self.turns, self.stale, strict=True):
            tokens: dict[int, int] = {}
            for version, number in turn.head.spans:
                if number and version not in stale:
                    tokens[version] = tokens.get(version, 0) + number
            trained, sampled = sum(tokens.values()), turn.head.sampled
            head_lag = max(map(lags.__getitem__, tokens), default=-1)
            yield Training(turn.id, head_lag, trained, sampled - trained, sampled, tuple(tokens.items()))


def live_trajectory(stale: StaleOf, turns: Sequence[KnownTurn]) -> LiveTrajectory:
    """Return the trajectory of turns on one branch, each of which has a verdict.

    ``stale``: of the same turns, as the control core has taken them.
    """
    runs: list[Run] = []
    ends: list[tuple[int, float | None]] = []
    kept: list[int] = []
    refs: list[bytes] = []
    end = 0
    parts = branch_of(turns[-1])
    for turn, tokens in parts:
        assert turn.chunk is not None
        refs.append(turn.chunk)
        kept.append(tokens)
        if turn.id not in stale:
            end += tokens
            _extend(runs, (UNSAMPLED, False, end))
            continue
        assert tokens == turn.own_length
        assert turn.verdict is not None
        if turn.teacher is not None:
            refs.append(turn.teacher)
        if turn.head.context:
            end += turn.head.context
            _extend(runs, (UNSAMPLED, False, end))
        for version, number in turn.head.spans:
            if number:
                end += number
                _extend(runs, (version, version not in stale[turn.id], end))
        ends.append((end, turn.score))
    scores = [score for _, score in ends if score is not None]
    mean = sum(scores) / len(scores) if scores else None
    header = TrajectoryHeader(
        tuple(runs),
        turns[-1].head.finish,
        reward=mean,
        reward_parts=_parts(turns),
        turn_rewards=tuple(ends),
    )
    return LiveTrajectory(
        tuple(turns),
        header,
        b"".join(refs),
        tuple(kept),
        any(tokens != turn.own_length for turn, tokens in parts),
        tuple(stale[turn.id] for turn in turns),
    )


def _parts(turns: Sequence[KnownTurn]) -> RewardParts:
    """Return the mean of each reward that clients have given by a name, over the turns that have it."""
    means = means_by_name(turn.verdict.parts for turn in turns if turn.verdict is not None)
    return tuple((name, mean) for name, mean in sorted(means.items()) if name)


def _extend(runs: list[Run], run: Run) -> None:
    """Append a run, or lengthen the last one by it."""
    if runs and runs[-1][:2] == run[:2]:
        runs.pop()
    runs.append(run)
