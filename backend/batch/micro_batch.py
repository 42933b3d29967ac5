"""What a training step consumes, and a micro-batch of it as arrays. Pure: numpy in, numpy out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.backend.batch.packing import Pack
from slipstream.rollout.trajectory import Completion, Finish, Span, Trajectory, TrajectoryBuilder


@dataclass(frozen=True)
class TrainBatch:
    """What one training step consumes."""

    version: int
    """The version whose weights the step starts from."""
    trajectories: tuple[Trajectory, ...]
    group_N: np.ndarray
    """int64: which trajectories are siblings."""


def demonstrated(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], version: int) -> TrainBatch:
    """Prompts and the responses to learn, token ids, as trajectories with reward 1, each a group of its own.

    They count as sampled by ``version``, that of the trainer.
    """

    def trajectory(prompt: Sequence[int], response: Sequence[int]) -> Trajectory:
        builder = TrajectoryBuilder(prompt)
        n = len(response)
        builder.add_completion(Completion(tuple(response), (0.0,) * n, (Span(version, 0, n),), Finish.STOP))
        return replace(builder.build(), reward=1.0)

    return TrainBatch(version, tuple(trajectory(*pair) for pair in pairs), np.arange(len(pairs)))


class StalenessViolation(RuntimeError):
    """A token that carries loss is older than the bound permits, from the future, or of no version."""


def check_staleness(batch: TrainBatch, max_lag: int) -> None:
    """Raise StalenessViolation unless every token that carries loss has 0 <= lag <= ``max_lag``."""
    for index, trajectory in enumerate(batch.trajectories):
        version_T = trajectory.versions_T[trajectory.loss_mask_T]
        if (version_T < 0).any():
            raise StalenessViolation(
                f"trajectory {index} of group {batch.group_N[index]} trains tokens that no policy "
                "version sampled"
            )
        lag_T = batch.version - version_T
        if lag_T.size and not (lag_T.min() >= 0 and lag_T.max() <= max_lag):
            raise StalenessViolation(
                f"trajectory {index} of group {batch.group_N[index]} holds tokens of lag "
                f"{lag_T.min()}..{lag_T.max()} at version {batch.version}; "
                f"rollout.max_head_offpolicyness allows 0..{max_lag}"
            )


@dataclass(frozen=True)
class MicroBatch:
    """One pack, concatenated. Position t predicts token t + 1 of the same trajectory.

    The arrays named _M hold one value for each of the M positions whose prediction carries loss.
    """

    tokens_T: np.ndarray
    position_T: np.ndarray
    """Position within its trajectory."""
    cu_seqlens: np.ndarray
    """int32: where trajectories begin and end, with their padding; the last segment may be padding alone."""
    index_M: np.ndarray
    """The positions whose prediction carries loss, ascending."""
    target_M: np.ndarray
    behaviour_logp_M: np.ndarray
    lag_M: np.ndarray
    owner_M: np.ndarray
    """int64: the trajectory of each, by its place in the pack."""
    trajectory_M: np.ndarray
    """int64: the same by its place in the batch."""
    turn_M: np.ndarray
    """int64: ``Trajectory.turn_T`` of each."""
    share_M: np.ndarray
    """float32: how often each counts in the mean over the tokens of the mini-batch."""

    @property
    def is_last_M(self) -> np.ndarray:
        """bool: the last of its trajectory."""
        return np.append(self.owner_M[1:] != self.owner_M[:-1], np.ones(len(self.owner_M[:1]), np.bool_))

    @property
    def owners(self) -> int:
        """A bound on ``owner_M``."""
        return len(self.cu_seqlens) - 1

    @property
    def longest(self) -> int:
        return int(np.diff(self.cu_seqlens).max())


def assemble(
    batch: TrainBatch,
    indices: Pack,
    multiple: int = 1,
    *,
    each: int = 1,
    share_N: np.ndarray | None = None,
) -> MicroBatch:
    """Concatenate the trajectories ``indices``, each padded at its end to a multiple of ``each`` (context
    parallelism); pad the total to a ``multiple`` (sequence parallelism), which is one of ``each``.

    ``share_N``: how often a token of each trajectory counts in the loss; None: once.

    An idle micro-batch is all padding. Raises ValueError for a trajectory that cannot be trained on.
    """
    parts = [batch.trajectories[i] for i in indices]
    lengths = [len(part.tokens_T) + -len(part.tokens_T) % each for part in parts]
    tokens_T = _joined([part.tokens_T for part in parts], np.int64, each)
    mask_T = _joined([part.loss_mask_T for part in parts], np.bool_, each)
    starts = np.cumsum([0, *lengths])
    # The first token of a trajectory is predicted by nothing; it is a prompt token, hence never in the mask.
    predicted_M = np.flatnonzero(mask_T)
    if np.isin(predicted_M, starts[:-1]).any():
        raise ValueError(
            "a trajectory begins with a token that carries loss; it needs at least one prompt token"
        )
    logp_T = _joined([part.logprobs_T for part in parts], np.float32, each)
    version_T = _joined([part.versions_T for part in parts], np.int32, each)
    turn_T = _joined([part.turn_T() for part in parts], np.int64, each)
    place_T = np.repeat(np.arange(len(parts)), np.array(lengths, np.int64))
    owner_M = place_T[predicted_M]
    trajectory_M = np.array(indices, np.int64)[owner_M]
    padding = -len(tokens_T) % multiple if parts else multiple
    segments = [*lengths, padding] if padding else lengths
    return MicroBatch(
        tokens_T=np.pad(tokens_T, (0, padding)),
        position_T=np.concatenate([np.arange(n) for n in segments]),
        cu_seqlens=np.cumsum([0, *segments]).astype(np.int32),
        index_M=predicted_M - 1,
        target_M=tokens_T[predicted_M],
        behaviour_logp_M=logp_T[predicted_M],
        lag_M=batch.version - version_T[predicted_M],
        owner_M=owner_M,
        trajectory_M=trajectory_M,
        turn_M=turn_T[predicted_M],
        share_M=np.ones(len(owner_M), np.float32) if share_N is None else share_N[trajectory_M],
    )


def _joined(arrays: Sequence[np.ndarray], dtype: type, each: int) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(np.pad(one, (0, -len(one) % each)) for one in arrays)])
