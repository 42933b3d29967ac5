"""A bonus for short responses, among those of a group that have been rewarded."""

import numpy as np

from slipstream import MicroBatch, Scores, TrainBatch


class Brevity:
    def advantage(self, batch: TrainBatch, micro: MicroBatch, scores: Scores) -> np.ndarray:
        length_N = np.array([each.response_length for each in batch.trajectories], np.float32)
        is_good_N = np.array([(each.reward or 0) > 0 for each in batch.trajectories])
        bonus_N = np.zeros_like(length_N)
        for group in np.unique(batch.group_N):
            members = np.flatnonzero((batch.group_N == group) & is_good_N)
            if len(members) > 1:
                mean = length_N[members].mean()
                bonus_N[members] = (mean - length_N[members]) / mean
        return bonus_N[micro.trajectory_M]  # one number for each token with loss
