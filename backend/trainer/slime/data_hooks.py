"""Hooks that see a rank's whole part of a batch, before it is trained on.

scores, targets ──► rollout_data ──► custom_advantage_function ──► rollout_data_postprocess ──► targets
                                          sets advantages          changes advantages, returns,
                                                                   takes loss away
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.advantage import group_centred, group_normalized
from slipstream.backend.trainer.prepared import Scores, Targets
from slipstream.backend.trainer.slime.named import NamedHook
from slipstream.backend.trainer.slime.returned import checked_list, require_finite
from slipstream.backend.trainer.slime.samples import Samples
from slipstream.backend.trainer.slime.view import FIXED, Lists, fixed_lists, joined, token_lists, units_of
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.tokens.trajectory import Finish


@dataclass(frozen=True)
class DataFunctions:
    """The hooks of a recipe that see a rank's part of a batch; None where it names none."""

    args: SlimeArguments
    per_token: bool
    advantage: NamedHook | None
    postprocess: NamedHook | None


class StepData:
    """A rank's part of the batch of one training step, under slime's names."""

    def __init__(self, functions: DataFunctions, batch: TrainBatch, samples: Sequence[Samples]) -> None:
        """``samples``: those of each micro-batch of the rank."""
        self._functions = functions
        self._batch = batch
        self._samples = samples
        self.kept: dict[int, Tensor] = {}
        """By identity of the micro-batch: False where a hook has taken away the loss of a token, bool [M]."""

    def targets(
        self, step: int, scores: Sequence[Scores], targets: Sequence[Targets | None]
    ) -> list[Targets | None]:
        """Return the targets as the hooks leave them. ``targets``: None except on the last pipeline stage."""
        result = list(targets)
        advantage, postprocess = self._functions.advantage, self._functions.postprocess
        if not any(samples.places for samples in self._samples):
            return result
        present = [target for target in targets if target is not None]
        if advantage is not None and present:
            data = self._view(scores, [None] * len(targets))
            advantage(self._functions.args, data)
            if "advantages" not in data:
                raise advantage.wrong('sets no rollout_data["advantages"]')
            result = self._read(advantage, data, present)
        if postprocess is not None:
            data = self._view(scores, result)
            postprocess(self._functions.args, step, data)
            if present:
                result = self._read(postprocess, data, [each for each in result if each is not None])
                self._read_masks(postprocess, data)
        return result

    # ---- the view

    def _view(self, scores: Sequence[Scores], targets: Sequence[Targets | None]) -> dict[str, Any]:
        by_micro: list[Lists] = []
        for samples, score, target in zip(self._samples, scores, targets, strict=True):
            masks = samples.whole(samples.mask())
            units = list(units_of(samples, self._functions.per_token))
            lists = token_lists(samples, score, target)
            fixed = fixed_lists(samples, samples.behaviour_R.device)
            by_micro.append({**fixed, **lists, "loss_masks": masks, "rollout_mask_sums": units})
        data = joined(by_micro)
        places = [place for samples in self._samples for place in samples.places]
        rewards, raw = self._rewards(places)
        finishes = [self._batch.trajectories[place].finish for place in places]
        like = data.get("log_probs") or data["rollout_log_probs"]
        return {
            **data,
            "rollout_mask_sums": torch.stack(data["rollout_mask_sums"]),
            "rewards": rewards,
            "raw_reward": raw,
            "truncated": [int(finish is Finish.LENGTH) for finish in finishes],
            "sample_indices": list(places),
            "rollout_ids": [int(self._batch.episode_N[place]) for place in places],
            "kl": [torch.zeros_like(each) for each in like],
        }

    def _rewards(self, places: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return rewards as slime normalizes them within groups, and as they are."""
        batch, args = self._batch, self._functions.args
        raw = [trajectory.reward or 0.0 for trajectory in batch.trajectories]
        reward_N, group_N = torch.tensor(raw, dtype=torch.float64), torch.from_numpy(batch.group_N)
        if batch.given_rewards is not None:
            reward_N = torch.tensor(batch.given_rewards)
        elif args.rewards_normalization:
            normalize = group_normalized if args.grpo_std_normalization else group_centred
            reward_N = normalize(reward_N, group_N)
        rewards = reward_N.tolist()
        return [rewards[place] for place in places], [raw[place] for place in places]

    # ---- what is read back

    def _read(
        self, hook: NamedHook, data: dict[str, Any], targets: Sequence[Targets]
    ) -> list[Targets | None]:
        """Return the targets that ``data`` holds after ``hook``. Raises HookError."""
        self._require_fixed(hook, data)
        advantages = self._values(hook, data, "advantages")
        returns: Sequence[Tensor | None] = [target.return_M for target in targets]
        if all(return_M is not None for return_M in returns) and "returns" in data:
            returns = self._values(hook, data, "returns")
        return [
            replace(target, advantage_M=self._without_live(samples, target, advantage_M), return_M=return_M)
            for samples, target, advantage_M, return_M in zip(
                self._samples, targets, advantages, returns, strict=True
            )
        ]

    def _without_live(self, samples: Samples, target: Targets, advantage_M: Tensor) -> Tensor:
        """Return the hook's advantages, but those of live turns as they are: their judges give them."""
        live = self._batch.turn_advantages.keys()
        if not live:
            return advantage_M
        is_live_M = torch.tensor([place in live for place in samples.micro.trajectory_M.tolist()])
        return torch.where(is_live_M.to(advantage_M.device), target.advantage_M, advantage_M)

    def _values(self, hook: NamedHook, data: dict[str, Any], name: str) -> list[Tensor]:
        """Return the values [M] of each micro-batch. Raises HookError."""
        lengths = [length for samples in self._samples for length in samples.held_lengths]
        like = self._samples[0].behaviour_R
        values = checked_list(
            hook, f'rollout_data["{name}"]', data.get(name), lengths, dtype=like.dtype, device=like.device
        )
        by_micro = values.split([sum(samples.held_lengths) for samples in self._samples])
        gathered = [samples.gathered(each) for samples, each in zip(self._samples, by_micro, strict=True)]
        for value_M in gathered:
            require_finite(hook, f'rollout_data["{name}"]', value_M)
        return gathered

    def _read_masks(self, hook: NamedHook, data: dict[str, Any]) -> None:
        lengths = [length for samples in self._samples for length in samples.response_lengths]
        like = self._samples[0].behaviour_R
        name = 'rollout_data["loss_masks"]'
        masks = checked_list(
            hook, name, data.get("loss_masks"), lengths, dtype=like.dtype, device=like.device
        )
        if not bool(((masks == 0) | (masks == 1)).all()):
            raise hook.wrong(f"gives {name} with other values than 0 and 1")
        for samples, mask_R in zip(
            self._samples, masks.split([sum(each.response_lengths) for each in self._samples]), strict=True
        ):
            kept_M = samples.chosen(mask_R) > 0
            if not bool(kept_M.all()):
                self.kept[id(samples.micro)] = kept_M

    def _require_fixed(self, hook: NamedHook, data: dict[str, Any]) -> None:
        """Raise HookError if a hook has changed what was sampled."""
        sampled = joined([fixed_lists(each, each.behaviour_R.device) for each in self._samples])
        for name in FIXED:
            if not _are_equal(data.get(name), sampled[name]):
                raise hook.wrong(f'changes rollout_data["{name}"], which is what the engines have sampled')


def _are_equal(values: object, expected: Sequence[Any]) -> bool:
    if not isinstance(values, list | tuple) or len(values) != len(expected):
        return False
    for value, other in zip(values, expected, strict=True):
        if isinstance(other, Tensor):
            same = isinstance(value, Tensor) and torch.equal(value, other)
        else:
            same = value == other
        if not same:
            return False
    return True
