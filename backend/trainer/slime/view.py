"""slime's names over micro-batches: ``rollout_data`` of a rank, and ``batch`` of a micro-batch.

Every tensor is a copy: what a hook writes into one changes nothing unless it is read back.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.backend.trainer.prepared import Scores, Targets
from slipstream.backend.trainer.slime.samples import Samples

Lists = dict[str, Any]
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
    """Return the values of all samples of several micro-batches, one behind the other."""
    names = {name: None for each in lists for name in each}
    return {name: [value for each in lists for value in each[name]] for name in names}
