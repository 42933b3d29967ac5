"""The trajectories of a micro-batch as slime's samples: where values of tokens lie, and how they come back.

A sample is a trajectory. Its response are the tokens from the first sampled one on, those of tools included.
slime's lists hold one tensor for each sample, over the response; under context parallelism, most of them hold
only the part of which this rank has the logits.

Shapes: M tokens with loss of a micro-batch, R response tokens of all its samples, r those of this
context-parallel rank, S samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.trainer.prepared import Scores, Targets
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Trajectory


@dataclass(frozen=True)
class ContextPlace:
    """This rank's place among the ranks that share the tokens of each trajectory."""

    size: int
    rank: int
    group: dist.ProcessGroup | None
    """None where ``size`` is 1."""


def response_start(trajectory: Trajectory) -> int:
    """Return the index of the first token of the response. A response has at least one token."""
    is_sampled_T = trajectory.versions_T != UNSAMPLED
    last = len(is_sampled_T) - 1
    return max(1, int(is_sampled_T.argmax())) if is_sampled_T.any() else last


class Samples:
    """The samples of one micro-batch on one rank."""

    def __init__(self, batch: TrainBatch, micro: MicroBatch, context: ContextPlace, device: torch.device):
        self.micro = micro
        self.places = micro.pack
        self.trajectories = [batch.trajectories[place] for place in micro.pack]
        starts = [response_start(trajectory) for trajectory in self.trajectories]
        self.total_lengths = [len(trajectory.tokens_T) for trajectory in self.trajectories]
        self.response_lengths = [
            total - start for total, start in zip(self.total_lengths, starts, strict=True)
        ]
        self._device = device
        self._context = context
        self._count = sum(self.response_lengths)
        offset_S = np.cumsum([0, *self.response_lengths])[:-1] - starts
        self._place_M = self._moved(micro.position_T[micro.index_M] + 1 + offset_S[micro.owner_M])
        held = [self._held(sample) for sample in range(len(starts))]
        self.held_lengths = list(map(len, held))
        """Number of response tokens of each sample that this rank has."""
        first_S = np.cumsum([0, *self.response_lengths])
        joined = [place_r + first for place_r, first in zip(held, first_S, strict=False)]
        self._place_r = self._moved(np.concatenate([np.empty(0, np.int64), *joined]))
        self.behaviour_R = self._moved(self._joined("logprobs_T", starts, np.float32))
        """Log-probs of the policies that sampled the tokens; 0 where none did."""

    def _joined(self, name: str, starts: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
        parts = [
            getattr(trajectory, name)[start:]
            for trajectory, start in zip(self.trajectories, starts, strict=True)
        ]
        return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype)

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _held(self, sample: int) -> np.ndarray:
        """Return the places within a response of the tokens whose logits this rank has, ascending.

        The logits of a token are at the position before it. A trajectory is cut into 2 C chunks of equal
        length, of which rank r has the chunks r and 2 C - 1 - r (``batch.context_parallel``).
        """
        total, length = self.total_lengths[sample], self.response_lengths[sample]
        place_R = np.arange(length)
        size, rank = self._context.size, self._context.rank
        if size == 1:
            return place_R
        chunk_R = (total - length + place_R - 1) // -(-total // (2 * size))
        return place_R[(chunk_R == rank) | (chunk_R == 2 * size - 1 - rank)]

    # ---- from values of tokens to slime's lists

    def spread(self, value_M: Tensor, rest_R: Tensor | None = None) -> Tensor:
        """Return values [R] of all response tokens: ``value_M`` where they carry loss, else ``rest_R`` or 0.

        The result shares no memory with the arguments.
        """
        whole_R = value_M.new_zeros(self._count) if rest_R is None else rest_R.to(value_M.dtype, copy=True)
        return whole_R.index_copy(0, self._place_M, value_M)

    def whole(self, value_R: Tensor) -> list[Tensor]:
        """Return the values of each sample's response."""
        return list(value_R.split(self.response_lengths))

    def held(self, value_R: Tensor) -> list[Tensor]:
        """Return the part of each sample's response that this rank has."""
        return list(value_R[self._place_r].split(self.held_lengths))

    def mask(self) -> Tensor:
        """Return 1 where a response token carries loss, else 0, int32 [R]."""
        return self.spread(torch.ones_like(self._place_M, dtype=torch.int32))

    # ---- and back

    def gathered(self, value_r: Tensor) -> Tensor:
        """Return the values [..., M] of tokens with loss, given those of this rank's response tokens,
        [..., r]. Collective over the context-parallel ranks.

        Gradients flow back to this rank's values only.
        """
        whole_R = value_r.new_zeros(*value_r.shape[:-1], self._count)
        whole_R = whole_R.index_copy(-1, self._place_r, value_r)
        if self._context.size > 1:
            whole_R = _Summed.apply(whole_R, self._context.group)
        return self.chosen(whole_R)

    def chosen(self, value_R: Tensor) -> Tensor:
        """Return the values [..., M] of tokens with loss, given those of all response tokens, [..., R]."""
        return value_R.index_select(-1, self._place_M)

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the context-parallel ranks, without gradient. Collective."""
        total = value.detach().clone()
        if self._context.size > 1:
            dist.all_reduce(total, group=self._context.group)
        return total

    def mean_function(self) -> Callable[[Tensor], Tensor]:
        """Return slime's ``sum_of_sample_mean``: from values [r] to the sum of the means of the recipe's
        units, of which each sample here adds its part; with averaging by token the sum over tokens.
        """
        mask_r = torch.cat([*self.held(self.mask()), self.behaviour_R[:0]])
        share_S = self._moved(self.micro.share_N / np.float32(self.micro.scale or 1.0))
        lengths = torch.tensor(self.held_lengths, device=self._device)
        share_r = share_S.repeat_interleave(lengths)
        return lambda value_r: (value_r * mask_r * share_r).sum()


class _Summed(torch.autograd.Function):
    """The sum over ranks, of which each holds different elements. Its gradient is each rank's own."""

    @staticmethod
    def forward(ctx: object, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad, None


Lists = dict[str, list[Any]]
"""By slime's name: one value for each sample."""

FIXED = ("total_lengths", "response_lengths", "tokens", "rollout_log_probs")
"""Names whose values a hook must leave as they are: they are what was sampled."""


def fixed_lists(samples: Samples, device: torch.device) -> Lists:
    """Return what was sampled: lengths, token ids, and the log-probs of the policies that sampled them."""
    return {
        "total_lengths": list(samples.total_lengths),
        "response_lengths": list(samples.response_lengths),
        "tokens": [torch.from_numpy(each.tokens_T.copy()).to(device) for each in samples.trajectories],
        "rollout_log_probs": samples.held(samples.behaviour_R),
    }


def token_lists(samples: Samples, scores: Scores, targets: Targets | None) -> Lists:
    """Return the values of response tokens, of which each sample has the part that this rank holds.

    ``targets``: None where there are none, or none yet.
    A token without loss has its behaviour log-prob for every other log-prob, and 0 for everything else.
    """
    values = {
        "log_probs": (scores.proximal_M, samples.behaviour_R),
        "ref_log_probs": (scores.reference_M, samples.behaviour_R),
        "teacher_log_probs": (scores.teacher_M, samples.behaviour_R),
        "values": (scores.value_M, None),
        "advantages": (None if targets is None else targets.advantage_M, None),
        "returns": (None if targets is None else targets.return_M, None),
    }
    return {
        name: samples.held(samples.spread(value_M.to(samples.behaviour_R), rest_R))
        for name, (value_M, rest_R) in values.items()
        if value_M is not None
    }


def units_of(samples: Samples, per_token: bool) -> Tensor:
    """Return slime's ``rollout_mask_sums``, float32 [S]: the number by which a sample's sum is divided."""
    if per_token:
        counts = [float(trajectory.response_length) for trajectory in samples.trajectories]
    else:
        counts = (samples.micro.scale / samples.micro.share_N.clip(1e-30)).tolist()
    return torch.tensor(counts, device=samples.behaviour_R.device)


def joined(lists: Sequence[Lists]) -> Lists:
    """Return the values of all samples of several micro-batches, one after the other."""
    names = {name: None for each in lists for name in each}
    return {name: [value for each in lists for value in each[name]] for name in names}
