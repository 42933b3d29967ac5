"""A micro-batch: trajectories concatenated into one sequence, as arrays. Pure: numpy in, numpy out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from slipstream.backend.batch.packing import Pack
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.rollout.tokens.routes import joined_routes
from slipstream.rollout.tokens.teacher import TeacherScores, placed
from slipstream.rollout.tokens.trajectory import Trajectory


@dataclass(frozen=True)
class MicroBatch:
    """One pack, concatenated to T tokens. Position t predicts token t + 1 of the same trajectory.

    A segment may take its first tokens from segments before it (``prefixes``). They are not repeated, and
    ``index_M`` has a position once for each trajectory in which it predicts a token with loss.

    The arrays named _M hold one value for each of the M tokens that carry loss.
    """

    tokens_T: np.ndarray
    position_T: np.ndarray
    """Position of each token within its trajectory."""
    cu_seqlens: np.ndarray
    """int32: boundaries of the trajectories, padding included; the last segment may be padding alone."""
    taken_N: np.ndarray
    """int64: number of tokens that each segment takes from those before it."""
    taken_R3: np.ndarray
    """int64: runs of taken tokens that stand side by side in the pack, in order: the segment that takes them,
    the first one's position within its trajectory, and its position in the pack."""
    index_M: np.ndarray
    """Positions in the pack whose prediction carries loss, one trajectory after the other."""
    target_M: np.ndarray
    """Token ids to be predicted."""
    behaviour_logp_M: np.ndarray
    lag_M: np.ndarray
    owner_M: np.ndarray
    """int64: trajectory of each token, as its place in the pack."""
    trajectory_M: np.ndarray
    """int64: trajectory of each token, as its place in the batch."""
    turn_M: np.ndarray
    """int64: turn of each token (``Trajectory.turn_T``)."""
    share_M: np.ndarray
    """float32: weight of each token in the mean over the tokens of the mini-batch."""
    last_N: np.ndarray
    """Position in the pack of the last token with loss of each trajectory that has one."""
    pack: tuple[int, ...]
    """Place in the batch of each trajectory, those without loss included."""
    share_N: np.ndarray
    """float32: ``share_M`` of each trajectory of ``pack``."""
    scale: float
    """Factor from a mean of the recipe's units to a sum of token losses (``averaging.mean_scale``)."""
    teacher: TeacherScores | None = None
    """A teacher's scores of the M tokens. None: no trajectory of the pack has any."""
    routes_TW: np.ndarray | None = None
    """uint16: the engine's experts of all tokens (``Trajectory.routes_TW``). None: no trajectory has any."""

    @property
    def is_last_M(self) -> np.ndarray:
        """bool [M]: True for the last token of each trajectory."""
        return np.append(self.owner_M[1:] != self.owner_M[:-1], np.ones(len(self.owner_M[:1]), np.bool_))

    @property
    def owners(self) -> int:
        """Exclusive upper bound of ``owner_M``."""
        return len(self.cu_seqlens) - 1

    @property
    def longest(self) -> int:
        """Number of tokens in the longest segment, those that it takes included."""
        return int((np.diff(self.cu_seqlens) + self.taken_N).max())


def assemble(
    batch: TrainBatch,
    indices: Pack,
    multiple: int = 1,
    *,
    trajectory_multiple: int = 1,
    taken_N: np.ndarray | None = None,
    share_N: np.ndarray | None = None,
    scale: float = 1.0,
) -> MicroBatch:
    """Concatenate the trajectories ``indices`` of a batch. An empty pack gives a micro-batch of padding.

    Each trajectory is padded at its end to a multiple of ``trajectory_multiple`` tokens (context
    parallelism), and the whole to a multiple of ``multiple`` tokens (sequence parallelism), which must be a
    multiple of ``trajectory_multiple``.

    ``taken_N`` [N]: number of tokens that each trajectory takes from the one before it in the pack, which
    begins with the same ones; only with a ``trajectory_multiple`` of 1. None: 0.

    ``share_N`` [N]: weight of each trajectory's tokens in the loss; None: 1. ``scale``: as in ``MicroBatch``.

    Raises ValueError for a trajectory whose first token carries loss.
    """
    parts = [batch.trajectories[i] for i in indices]
    taken: list[int] = [0] * len(parts) if taken_N is None else taken_N[list(indices)].tolist()
    ids = [
        np.pad(part.tokens_T[take:], (0, -len(part.tokens_T) % trajectory_multiple))
        for part, take in zip(parts, taken, strict=True)
    ]
    routes = [
        None if part.routes_TW is None else part.routes_TW[take:]
        for part, take in zip(parts, taken, strict=True)
    ]
    padding = -sum(map(len, ids)) % multiple if parts else multiple
    if padding:
        taken, ids, routes = [*taken, 0], [*ids, np.zeros(padding, np.int64)], [*routes, None]
    own = list(map(len, ids))
    rows = _rows(own, taken)
    # Nothing predicts the first token of a trajectory; it belongs to the prompt and must carry no loss.
    places = [np.flatnonzero(part.loss_mask_T) for part in parts]
    if any(place.size and not place[0] for place in places):
        raise ValueError(
            "a trajectory begins with a token that carries loss; it needs at least one prompt token"
        )
    owner_M = np.repeat(np.arange(len(parts)), np.array(list(map(len, places)), np.int64))
    trajectory_M = np.array(indices, np.int64)[owner_M]
    if share_N is None:
        share_N = np.ones(len(batch.trajectories), np.float32)

    def predicted(array_of: Callable[[Trajectory], np.ndarray], dtype: DTypeLike) -> np.ndarray:
        return _joined([array_of(part)[place] for part, place in zip(parts, places, strict=True)], dtype)

    of_parts = list(zip(rows, places, strict=False))
    return MicroBatch(
        tokens_T=_joined(ids, np.int64),
        position_T=_joined([np.arange(t, t + n) for t, n in zip(taken, own, strict=True)], np.int64),
        cu_seqlens=np.cumsum([0, *own]).astype(np.int32),
        taken_N=np.array(taken, np.int64),
        taken_R3=_taken_runs(rows, taken),
        index_M=_joined([row.positions(place - 1) for row, place in of_parts], np.int64),
        target_M=predicted(lambda part: part.tokens_T, np.int64),
        behaviour_logp_M=predicted(lambda part: part.logprobs_T, np.float32),
        lag_M=batch.lag_T(predicted(lambda part: part.versions_T, np.int32)),
        owner_M=owner_M,
        trajectory_M=trajectory_M,
        turn_M=_joined([part.turn_T(place) for part, place in zip(parts, places, strict=True)], np.int64),
        share_M=share_N[trajectory_M],
        last_N=_joined([row.positions(place[-1:]) for row, place in of_parts], np.int64),
        pack=tuple(indices),
        share_N=share_N[list(indices)],
        scale=scale,
        teacher=_taught(parts, places),
        routes_TW=joined_routes(zip(own, routes, strict=True)),
    )


class _Row(NamedTuple):
    """Where the tokens of a trajectory stand in the pack: runs of tokens side by side."""

    start_R: np.ndarray
    """int64: first token of each run, as its place in the trajectory."""
    shift_R: np.ndarray
    """int64: what the position in the pack of its tokens is beyond their place in the trajectory."""

    def positions(self, places: np.ndarray) -> np.ndarray:
        """Return the positions in the pack of the tokens at these places, int64."""
        return places + self.shift_R[np.searchsorted(self.start_R, places, side="right") - 1]


def _rows(own: Sequence[int], taken: Sequence[int]) -> list[_Row]:
    """Return the row of each trajectory, which takes the first tokens of the row before it."""
    rows = [_Row(np.empty(0, np.int64), np.empty(0, np.int64))]
    end = 0
    for n, take in zip(own, taken, strict=True):
        kept = int(np.searchsorted(rows[-1].start_R, take))
        start_R, shift_R = rows[-1].start_R[:kept], rows[-1].shift_R[:kept]
        if n:
            start_R, shift_R = np.append(start_R, take), np.append(shift_R, end - take)
        rows.append(_Row(start_R, shift_R))
        end += n
    return rows[1:]


def _taken_runs(rows: Sequence[_Row], taken: Sequence[int]) -> np.ndarray:
    """Return ``MicroBatch.taken_R3``."""
    runs = [np.empty((0, 3), np.int64)]
    for number, (row, take) in enumerate(zip(rows, taken, strict=True)):
        start_r = row.start_R[row.start_R < take]
        runs.append(np.column_stack([np.full_like(start_r, number), start_r, row.positions(start_r)]))
    return np.concatenate(runs)


def _taught(parts: Sequence[Trajectory], places: Sequence[np.ndarray]) -> TeacherScores | None:
    """Return a teacher's scores of the tokens at ``places`` of each trajectory, if there are any."""
    starts = np.cumsum([0, *map(len, places)]).tolist()
    scores = [
        (start, part.teacher.take(place))
        for start, part, place in zip(starts, parts, places, strict=False)
        if part.teacher is not None
    ]
    return placed(starts[-1], scores) if scores else None


def _joined(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """Concatenate ``arrays``; ``dtype`` if there are none."""
    return np.concatenate([np.empty(0, dtype), *arrays])
