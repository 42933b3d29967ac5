"""Classes of a user's for trainer ranks, each wrong in one way."""

from dataclasses import replace

import numpy as np
import torch

from slipstream.backend.objective.policy_loss import PolicyLoss

HERE = "tests.wrong_inputs.their_plugins"


# ---- objectives


class Scalar:
    def loss(self, tokens, old_logp_M):
        return -(tokens.logp_M * tokens.advantage_M).mean()


class Half:
    def loss(self, tokens, old_logp_M):
        return -(tokens.logp_M * tokens.advantage_M).to(torch.bfloat16)


class NotANumber:
    def loss(self, tokens, old_logp_M):
        return -tokens.logp_M * tokens.advantage_M + torch.log(torch.zeros_like(tokens.logp_M) - 1)


class Detached:
    def loss(self, tokens, old_logp_M):
        return -(tokens.logp_M.detach() * tokens.advantage_M)


class Nothing:
    def loss(self, tokens, old_logp_M):
        return None


class Misspelt:
    def loss(self, tokens, old_logp_M):
        return -tokens.logp * tokens.advantage_M


class ClippedAsNumbers:
    def loss(self, tokens, old_logp_M):
        ones_M = torch.ones_like(tokens.logp_M)
        return PolicyLoss(-tokens.logp_M * tokens.advantage_M, ones_M, ones_M)


# ---- advantages, penalties


class OfTrajectories:
    def advantage(self, batch, micro, scores):
        return np.array([each.reward for each in batch.trajectories])


class OfWholeNumbers:
    def advantage(self, batch, micro, scores):
        return np.ones(len(micro.target_M), np.int64)


class Infinite:
    def advantage(self, batch, micro, scores):
        return np.full(len(micro.target_M), np.inf, np.float32)


class Mean:
    def estimate(self, logp_M, reference_logp_M):
        return (logp_M - reference_logp_M).mean()


class OfProbabilities:
    def estimate(self, logp_M, reference_logp_M):
        return torch.log(logp_M)


# ---- transforms


class Changing:
    def transform(self, batch):
        batch.trajectories[0].reward = 0.0


class Trajectories:
    def transform(self, batch):
        return batch.trajectories


class Shortened:
    def transform(self, batch):
        return replace(batch, trajectories=batch.trajectories[:2])


class NoneLeft:
    def transform(self, batch):
        return batch.keeping([])


class BadReward:
    def transform(self, batch):
        return batch.rewarded([float("nan")] * len(batch.trajectories))


class Later:
    def transform(self, batch):
        return replace(batch, version=batch.version + 1)


class AllLoss:
    def transform(self, batch):
        return replace(
            batch,
            trajectories=tuple(
                replace(each, loss_mask_T=np.ones_like(each.loss_mask_T)) for each in batch.trajectories
            ),
        )


# ---- metrics


class Text:
    def metrics(self, batch, trained):
        return {"note": "good"}


class Listed:
    def metrics(self, batch, trained):
        return [1.0]


class Spaced:
    def metrics(self, batch, trained):
        return {"two words": 1.0}


class DividedByZero:
    def metrics(self, batch, trained):
        return {"x": 1 / (len(batch.trajectories) - len(batch.group_N))}


# ---- data sources


class Empty:
    def prompts(self, start, count):
        return []


class TooMany:
    def prompts(self, start, count):
        return [{"prompt": "1"}] * (count + 1)


class Unasked:
    def prompts(self, start, count):
        return [{"question": "1+1?"}]


class Opened:
    def prompts(self, start, count):
        return [{"prompt": "1+1?", "label": open}]


class Unreachable:
    def prompts(self, start, count):
        raise ConnectionError("no route to the store")
