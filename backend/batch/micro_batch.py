"""A micro-batch: trajectories concatenated into one sequence, as arrays. Pure: numpy in, numpy out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from slipstream.backend.batch.packing import Pack
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.rollout.tokens.routes import NO_ROUTE, joined_routes
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
    taken_K: np.ndarray
    """int64: positions in the pack of the taken tokens, one segment after the other."""
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
        return _is_last(self.owner_M)

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
    lengths = [len(part.tokens_T) + -len(part.tokens_T) % trajectory_multiple for part in parts]
    tokens_T = _joined([part.tokens_T for part in parts], np.int64, trajectory_multiple)
    mask_T = _joined([part.loss_mask_T for part in parts], np.bool_, trajectory_multiple)
    starts = np.cumsum([0, *lengths])
    # Nothing predicts the first token of a trajectory; it belongs to the prompt and must carry no loss.
    predicted_M = np.flatnonzero(mask_T)
    if np.isin(predicted_M, starts[:-1]).any():
        raise ValueError(
            "a trajectory begins with a token that carries loss; it needs at least one prompt token"
        )
    logp_T = _joined([part.logprobs_T for part in parts], np.float32, trajectory_multiple)
    version_T = _joined([part.versions_T for part in parts], np.int32, trajectory_multiple)
    turn_T = _joined([part.turn_T() for part in parts], np.int64, trajectory_multiple)
    place_T = np.repeat(np.arange(len(parts)), np.array(lengths, np.int64))
    owner_M = place_T[predicted_M]
    trajectory_M = np.array(indices, np.int64)[owner_M]
    if share_N is None:
        share_N = np.ones(len(batch.trajectories), np.float32)
    taken_n = np.zeros(len(parts), np.int64) if taken_N is None else taken_N[list(indices)]
    rows = _rows(lengths, taken_n.tolist())
    row_T = np.concatenate([_NO_ROWS, *rows])
    is_own_T = np.concatenate([_NO_ROWS, *map(np.arange, lengths)]) >= taken_n[place_T]
    own_T = tokens_T[is_own_T]
    padding = -len(own_T) % multiple if parts else multiple
    segments = [*lengths, padding] if padding else lengths
    taken_n = np.pad(taken_n, (0, bool(padding)))
    positions = [np.arange(take, n) for take, n in zip(taken_n.tolist(), segments, strict=True)]
    return MicroBatch(
        tokens_T=np.pad(own_T, (0, padding)),
        position_T=np.concatenate(positions),
        cu_seqlens=np.cumsum([0, *map(len, positions)]).astype(np.int32),
        taken_N=taken_n,
        taken_K=np.concatenate([_NO_ROWS, *(row[:n] for row, n in zip(rows, taken_n, strict=False))]),
        index_M=row_T[predicted_M - 1],
        target_M=tokens_T[predicted_M],
        behaviour_logp_M=logp_T[predicted_M],
        lag_M=batch.lag_T(version_T[predicted_M]),
        owner_M=owner_M,
        trajectory_M=trajectory_M,
        turn_M=turn_T[predicted_M],
        share_M=share_N[trajectory_M],
        last_N=row_T[predicted_M[_is_last(owner_M)]],
        pack=tuple(indices),
        share_N=share_N[list(indices)],
        scale=scale,
        teacher=_taught(parts, starts, predicted_M),
        routes_TW=_routed(parts, lengths, is_own_T, padding),
    )


_NO_ROWS = np.empty(0, np.int64)


def _rows(lengths: Sequence[int], taken: Sequence[int]) -> list[np.ndarray]:
    """Return the position in the pack of every token of each trajectory, int64."""
    rows = [_NO_ROWS]
    end = 0
    for length, take in zip(lengths, taken, strict=True):
        rows.append(np.concatenate([rows[-1][:take], np.arange(end, end + length - take)]))
        end += length - take
    return rows[1:]


def _is_last(owner_M: np.ndarray) -> np.ndarray:
    return np.append(owner_M[1:] != owner_M[:-1], np.ones(len(owner_M[:1]), np.bool_))


def _taught(parts: Sequence[Trajectory], starts: np.ndarray, predicted_M: np.ndarray) -> TeacherScores | None:
    """Return a teacher's scores of the tokens at ``predicted_M`` of the pack, if there are any."""
    scores = [
        (int(start), part.teacher)
        for start, part in zip(starts, parts, strict=False)
        if part.teacher is not None
    ]
    return placed(int(starts[-1]), scores).take(predicted_M) if scores else None


def _routed(
    parts: Sequence[Trajectory], lengths: Sequence[int], is_own_T: np.ndarray, padding: int
) -> np.ndarray | None:
    """Return the engine's experts of the own tokens of trajectories and of padding, if any are known."""
    routes_TW = joined_routes(zip(lengths, (part.routes_TW for part in parts), strict=True))
    if routes_TW is None:
        return None
    return np.pad(routes_TW[is_own_T], ((0, padding), (0, 0)), constant_values=NO_ROUTE)


def _joined(arrays: Sequence[np.ndarray], dtype: DTypeLike, multiple: int) -> np.ndarray:
    """Concatenate ``arrays``, each padded with zeros to a multiple of ``multiple``; ``dtype`` if empty."""
    padded = [np.pad(array, (0, -len(array) % multiple)) for array in arrays]
    return np.concatenate([np.empty(0, dtype), *padded])
