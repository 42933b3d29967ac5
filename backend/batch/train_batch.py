"""The batch of one training step, and the check of its staleness. Pure: numpy in, numpy out.

driver: EncodedBatch, headers and bytes ──► every rank: TrainBatch, trajectories
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from slipstream.rollout.tokens.record import decode_trajectory
from slipstream.rollout.tokens.routes import is_known
from slipstream.rollout.tokens.trajectory import (
    Completion,
    Finish,
    Span,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryHeader,
)

TurnAdvantages = Mapping[int, tuple[float | None, ...]]


@dataclass(frozen=True)
class BatchHeader:
    """Values that the driver gives a training step besides trajectories."""

    version: int
    """Policy version that the step starts from."""
    lags: Mapping[int, int] | None = field(default=None, kw_only=True)
    """Lag of each policy version whose tokens carry loss, in updates. None: no restart has come between the
    versions, so that lags are differences of their numbers."""
    turn_advantages: TurnAdvantages = field(default_factory=dict[int, tuple[float | None, ...]], kw_only=True)
    """Advantage of each turn of a live trajectory, by its place in the batch; None: the turn has no score.
    All other trajectories get theirs from their rewards."""
    given_rewards: tuple[float, ...] | None = field(default=None, kw_only=True)
    """Advantage of each trajectory from its reward, as code of the user's gives it in place of the
    recipe's. None: the recipe's is found from rewards."""
    rate_factor: float = field(default=1.0, kw_only=True)
    """Factor of the learning rate of this step."""
    mismatch: float | None = field(default=None, kw_only=True)
    """Mean of log(pi_old / mu)^2 over tokens of lag 0, as earlier steps have measured it; None: not yet."""


@dataclass(frozen=True)
class TrainBatch(BatchHeader):
    """The trajectories that one training step consumes."""

    trajectories: tuple[Trajectory, ...]
    group_N: np.ndarray
    """int64 [N]: number of each trajectory's group; trajectories of one prompt share it."""
    siblings_N: npt.NDArray[np.int64] | None = field(default=None, kw_only=True)
    """int64 [N]: number of each trajectory's episode, ascending from 0; trajectories of one episode share it.
    None: each is an episode of its own."""

    @property
    def episode_N(self) -> npt.NDArray[np.int64]:
        """Number of each trajectory's episode, int64 [N], ascending from 0."""
        return np.arange(len(self.trajectories)) if self.siblings_N is None else self.siblings_N

    def keeping(self, places: Sequence[int]) -> "TrainBatch":
        """Return a batch of the trajectories at ``places``, in this order. The others are not trained.

        The places of one episode's trajectories must be next to each other.
        """
        kept = list(places)
        new_place = {place: number for number, place in enumerate(kept)}
        rewards = self.given_rewards
        return replace(
            self,
            trajectories=tuple(self.trajectories[place] for place in kept),
            group_N=self.group_N[kept],
            turn_advantages={
                new_place[place]: by_turn
                for place, by_turn in self.turn_advantages.items()
                if place in new_place
            },
            siblings_N=_renumbered(self.episode_N[kept]),
            given_rewards=None if rewards is None else tuple(rewards[place] for place in kept),
        )

    def rewarded(self, rewards: Sequence[float | None]) -> "TrainBatch":
        """Return the batch with another reward for each trajectory; None leaves a live one without."""
        return replace(
            self,
            trajectories=tuple(
                replace(trajectory, reward=reward)
                for trajectory, reward in zip(self.trajectories, rewards, strict=True)
            ),
        )

    def lag_T(self, versions_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the lag of each token, given its version. Raises StalenessViolation for unknown versions."""
        if self.lags is None:
            return self.version - versions_T
        versions, index_T = np.unique(versions_T, return_inverse=True)
        unknown = [int(version) for version in versions if int(version) not in self.lags]
        if unknown:
            raise StalenessViolation(f"no lag is known of the versions {unknown} of tokens that carry loss")
        return np.array([self.lags[int(version)] for version in versions], np.int32)[index_T]


def _renumbered(episode_N: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of episodes as 0, 1, ... in the order in which they come."""
    is_new_N = np.append(np.zeros(1, np.int64), (episode_N[1:] != episode_N[:-1]).astype(np.int64))
    return np.cumsum(is_new_N)[: len(episode_N)]


@dataclass(frozen=True)
class EncodedBatch(BatchHeader):
    """A batch as it travels to the ranks. The driver has not looked at its tokens.

    Places in ``turn_advantages`` are those of episodes. ``given_rewards`` are of all trajectories but live
    ones, which come last.
    """

    headers: tuple[TrajectoryHeader, ...]
    """Header of each episode, which may have several trajectories."""
    chunks: npt.NDArray[np.uint8]
    """Chunks of all episodes, one after the other."""
    sizes: tuple[int, ...]
    """Bytes of the chunks of each episode."""
    group_N: np.ndarray
    """int64: number of each episode's group."""
    response_masks: tuple[tuple[int, ...], ...] | None = field(default=None, kw_only=True)
    """0 where code of the user's takes the loss of a token away: for all trajectories but live ones, their
    tokens from the first sampled one on. None: nowhere."""

    def decoded(self) -> TrainBatch:
        """Return the trajectories, those of one episode next to each other. Raises CorruptRecord."""
        episodes: list[tuple[Trajectory, ...]] = []
        data, start = memoryview(self.chunks.data), 0
        for header, size in zip(self.headers, self.sizes, strict=True):
            episodes.append(decode_trajectory(data[start : start + size], header).split())
            start += size
        group_E = self.group_N.copy()
        is_dropped_E = np.array([header.is_dropped for header in self.headers], np.bool_)
        # In a group of its own, an episode without loss is in no statistic that anybody uses.
        group_E[is_dropped_E] = np.min(group_E, initial=0) - 1 - np.arange(is_dropped_E.sum())
        counts = [len(parts) for parts in episodes]
        first = np.cumsum([0, *counts])
        trajectories = [trajectory for parts in episodes for trajectory in parts]
        rewards = self.given_rewards
        if rewards is not None:
            rewards = (*rewards, *[0.0] * (len(trajectories) - len(rewards)))
        for place, mask_R in enumerate(self.response_masks or ()):
            trajectories[place] = _with_response_mask(trajectories[place], mask_R)
        header = {each.name: getattr(self, each.name) for each in fields(BatchHeader)}
        header["turn_advantages"] = {
            int(first[place]): by_turn for place, by_turn in self.turn_advantages.items()
        }
        header["given_rewards"] = rewards
        return TrainBatch(
            **header,
            trajectories=tuple(trajectories),
            group_N=np.repeat(group_E, counts),
            siblings_N=np.repeat(np.arange(len(episodes)), counts),
        )


def _with_response_mask(trajectory: Trajectory, mask_R: Sequence[int]) -> Trajectory:
    """Return a trajectory without the loss of those of its last tokens that have a 0 in ``mask_R``."""
    loss_mask_T = trajectory.loss_mask_T.copy()
    loss_mask_T[len(loss_mask_T) - len(mask_R) :] &= np.array(mask_R, np.bool_)
    return replace(trajectory, loss_mask_T=loss_mask_T)


def demonstrated(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], version: int) -> TrainBatch:
    """Return a batch that teaches the response of each (prompt, response) pair of token ids.

    Each pair becomes a trajectory with reward 1 in a group of its own, as if ``version``, the trainer's own
    policy version, had sampled it.
    """

    def trajectory(prompt: Sequence[int], response: Sequence[int]) -> Trajectory:
        builder = TrajectoryBuilder(prompt)
        n = len(response)
        builder.add_completion(Completion(tuple(response), (0.0,) * n, (Span(version, 0, n),), Finish.STOP))
        return replace(builder.build(), reward=1.0)

    return TrainBatch(version, tuple(trajectory(*pair) for pair in pairs), np.arange(len(pairs)))


class StalenessViolation(RuntimeError):
    """A token that carries loss has a lag above the bound, is from the future, or has no version."""


def check_staleness(batch: TrainBatch, max_lag: int) -> None:
    """Raise StalenessViolation unless every token that carries loss has 0 <= lag <= ``max_lag``."""
    for index, trajectory in enumerate(batch.trajectories):
        version_T = trajectory.versions_T[trajectory.loss_mask_T]
        if (version_T < 0).any():
            raise StalenessViolation(
                f"trajectory {index} of group {batch.group_N[index]} trains tokens that no policy "
                "version sampled"
            )
        lag_T = batch.lag_T(version_T)
        if lag_T.size and not (lag_T.min() >= 0 and lag_T.max() <= max_lag):
            raise StalenessViolation(
                f"trajectory {index} of group {batch.group_N[index]} holds tokens of lag "
                f"{lag_T.min()}..{lag_T.max()} at version {batch.version}; "
                f"rollout.max_head_offpolicyness allows 0..{max_lag}"
            )


def unrouted(batch: TrainBatch, layers: Sequence[bool], per_token: int, experts: int) -> float:
    """Return the share of tokens whose experts no engine has told, without the last one of each trajectory.

    layers: of each layer, whether it has experts. per_token: experts of a token. experts: their number in a
    layer. Raises ValueError for experts of another model, and if an engine has not told those of a layer.
    """
    missing = total = 0
    for index, trajectory in enumerate(batch.trajectories):
        routes_TW, length = trajectory.routes_TW, len(trajectory.tokens_T) - 1
        total += length
        if routes_TW is None:
            missing += length
            continue
        where = f"trajectory {index} of group {batch.group_N[index]}"
        is_known_T = is_known(routes_TW)
        ids_RW = routes_TW[is_known_T]
        highest = int(np.max(ids_RW, initial=0))
        if ids_RW.shape[1] != len(layers) * per_token or highest >= experts:
            raise ValueError(
                f"{where} has routes of {ids_RW.shape[1]} choices, up to expert {highest}; expected "
                f"{len(layers)} layers * {per_token} choices among {experts} experts, as in the trained model"
            )
        ids_RLk = ids_RW.reshape(-1, len(layers), per_token)[:, np.array(layers)]
        if per_token > 1 and (ids_RLk[:, :, 0] == ids_RLk[:, :, 1]).any():
            raise ValueError(
                f"{where} has tokens that take the same expert twice: the engine does not tell its routes; "
                "set rollout.engine.args.moe_runner_backend to triton, or actor.routing_replay to off"
            )
        missing += length - int(np.count_nonzero(is_known_T[:-1]))
    return missing / max(1, total)
