"""Hooks that see a training step on a rank: its part of the batch, and then the loss of each micro-batch.

scores, targets ──► rollout_data ──► custom_advantage_function ──► rollout_data_postprocess ──► targets
                                          sets advantages          changes advantages, returns,
                                                                   takes loss away

token losses of the objective
    |  custom_tis_function: weighs and drops, in place of the importance weight
    |  actor.correction: drops
    |  tokens that rollout_data_postprocess has taken the loss of
    |  custom_pg_loss_reducer_function: one number of them, in place of the recipe's mean
total of the micro-batch

custom_loss_function gives the total itself, from logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.advantage import group_centred, group_normalized
from slipstream.backend.objective.losses import Tokens, Weigh
from slipstream.backend.objective.names import HOOK
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.backend.trainer.hooks import MicroBatchLoss
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets
from slipstream.backend.trainer.slime.named import (
    NamedHook,
    checked_list,
    checked_metrics,
    checked_scalar,
    checked_tensor,
    checked_tuple,
    require_finite,
)
from slipstream.backend.trainer.slime.samples import (
    FIXED,
    Lists,
    Samples,
    fixed_lists,
    joined,
    token_lists,
    units_of,
)
from slipstream.rollout.compat.slime.arguments import SlimeArguments
from slipstream.rollout.tokens.trajectory import Finish

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.packed_model import LanguageModel


@dataclass(frozen=True)
class StepFunctions:
    """The hooks of a recipe that see a training step; None where it names none."""

    args: SlimeArguments
    per_token: bool
    """True if the recipe averages over tokens."""
    advantage: NamedHook | None = None
    postprocess: NamedHook | None = None
    weigh: NamedHook | None = None
    reduce: NamedHook | None = None
    loss: NamedHook | None = None


class StepData:
    """A rank's part of the batch of one training step, under slime's names."""

    def __init__(self, functions: StepFunctions, batch: TrainBatch, samples: Sequence[Samples]) -> None:
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

    def _view(self, scores: Sequence[Scores], targets: Sequence[Targets | None]) -> dict[str, object]:
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
        self, hook: NamedHook, data: dict[str, object], targets: Sequence[Targets]
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

    def _values(self, hook: NamedHook, data: dict[str, object], name: str) -> list[Tensor]:
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

    def _read_masks(self, hook: NamedHook, data: dict[str, object]) -> None:
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

    def _require_fixed(self, hook: NamedHook, data: dict[str, object]) -> None:
        """Raise HookError if a hook has changed what was sampled."""
        sampled = joined([fixed_lists(each, each.behaviour_R.device) for each in self._samples])
        for name in FIXED:
            if not _are_equal(data.get(name), sampled[name]):
                raise hook.wrong(f'changes rollout_data["{name}"], which is what the engines have sampled')


def _are_equal(values: object, expected: Sequence[object]) -> bool:
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


class HookedLoss(MicroBatchLoss):
    """The loss of one micro-batch under a recipe's hooks."""

    def __init__(
        self, functions: StepFunctions, samples: Samples, item: PreparedMicroBatch, kept_M: Tensor | None
    ) -> None:
        """``kept_M``: False where a hook has taken away the loss of a token; None: nowhere."""
        self._functions = functions
        self._samples = samples
        self._item = item
        self._kept_M = kept_M
        self._mask_R = samples.mask()
        if kept_M is not None:
            self._mask_R = samples.spread(kept_M.to(torch.int32))
        self._is_idle = not samples.places
        self._metrics: dict[str, Tensor] = {}
        self.replaces_loss = functions.loss is not None

    def weighing(self, tokens: Tokens, share_M: Tensor) -> Weigh | None:
        hook = self._functions.weigh
        if hook is None:
            return None
        return lambda loss: loss if self._is_idle else self._weighed(hook, tokens, share_M, loss)

    def _weighed(self, hook: NamedHook, tokens: Tokens, share_M: Tensor, loss: PolicyLoss) -> PolicyLoss:
        samples = self._samples
        old_M = tokens.logp_M.detach() if tokens.proximal_logp_M is None else tokens.proximal_logp_M
        loss_r = torch.cat(samples.held(samples.spread(loss.loss_T)))
        result = hook(
            self._functions.args,
            pg_loss=loss_r,
            train_log_probs=samples.held(samples.spread(old_M, samples.behaviour_R)),
            rollout_log_probs=samples.held(samples.behaviour_R),
            loss_masks=samples.whole(self._mask_R.clone()),
            total_lengths=list(samples.total_lengths),
            response_lengths=list(samples.response_lengths),
        )
        weighed, masks, metrics = checked_tuple(hook, result, ("loss", "masks", "metrics"))
        weighed_r = checked_tensor(hook, "the loss", weighed, tuple(loss_r.shape))
        mask_M = samples.chosen(self._checked_masks(hook, masks))
        loss_M = torch.where(mask_M > 0, samples.gathered(weighed_r.to(loss.loss_T)) * mask_M, 0.0)
        require_finite(hook, "the loss", loss_M, (loss.loss_T, old_M, tokens.behaviour_logp_M))
        self._add_metrics(hook, checked_metrics(hook, metrics), share_M, len(loss_r))
        return replace(loss, loss_T=loss_M, masked=loss.masked | {"hook": mask_M == 0})

    def _checked_masks(self, hook: NamedHook, masks: object) -> Tensor:
        """Return the masks of a hook, float32 [R]; the reducer gets them too. Raises HookError."""
        mask_R = checked_list(
            hook,
            "the masks",
            masks,
            self._samples.response_lengths,
            dtype=torch.float32,
            device=self._mask_R.device,
        )
        if not bool(((mask_R >= 0) & (mask_R <= 1)).all()):
            raise hook.wrong("gives masks with values outside 0 to 1")
        self._mask_R = mask_R
        return mask_R

    def _add_metrics(
        self, hook: NamedHook, metrics: Mapping[str, object], share_M: Tensor, held: int
    ) -> None:
        """Add the metrics of response tokens: [r] each, or one number for all."""
        rows: list[Tensor] = []
        for name, value in metrics.items():
            row = torch.as_tensor(value).detach().to(share_M)
            if row.numel() != 1 or held == 1:
                row = checked_tensor(hook, f"the metric {name!r}", row.reshape(-1), (held,))
            rows.append(row.reshape(-1).expand(held))
        if rows:
            values_KM = self._samples.gathered(torch.stack(rows)).double()
            sums_K = torch.where(values_KM.isfinite(), values_KM * share_M, 0.0).sum(-1)
            self._metrics |= {HOOK + name: total for name, total in zip(metrics, sums_K, strict=True)}

    def kept(self, loss: PolicyLoss) -> PolicyLoss:
        if self._kept_M is None:
            return loss
        return replace(
            loss,
            loss_T=torch.where(self._kept_M, loss.loss_T, 0.0),
            masked=loss.masked | {"hook": ~self._kept_M | loss.masked.get("hook", ~self._kept_M)},
        )

    def total(self, loss: PolicyLoss, share_M: Tensor) -> Tensor:
        hook = self._functions.reduce
        if hook is None or self._is_idle:
            return (share_M * loss.loss_T).sum()
        samples = self._samples
        reducer = hook(
            list(samples.total_lengths),
            list(samples.response_lengths),
            samples.whole(self._mask_R.clone()),
            self._functions.per_token,
        )
        if not callable(reducer):
            raise hook.wrong(f"returns a {type(reducer).__name__}, expected a function of token losses")
        returned = replace(hook, function=reducer)
        loss_r = torch.cat(samples.held(samples.spread(loss.loss_T)))
        value = checked_scalar(returned, "the loss", returned(loss_r))
        require_finite(returned, "the loss", value, (loss.loss_T,))
        return self._scaled(value)

    def custom_total(self, policy: "LanguageModel", hidden_1TH: Tensor) -> Tensor:
        """Return the total that ``custom_loss_function`` finds from logits. Only if ``replaces_loss``."""
        hook, samples = self._functions.loss, self._samples
        assert hook is not None
        logits_1TV = policy.logits(hidden_1TH)
        if self._is_idle:
            return self._scaled(logits_1TV.sum() * 0)
        batch = self._batch(policy)
        result = hook(self._functions.args, batch, logits_1TV, samples.mean_function())
        value, metrics = checked_tuple(hook, result, ("loss", "metrics"))
        loss = checked_scalar(hook, "the loss", value)
        require_finite(hook, "the loss", loss, (logits_1TV,))
        for name, metric in checked_metrics(hook, metrics).items():
            number = torch.as_tensor(metric).detach().double()
            if number.numel() != 1:
                raise hook.wrong(
                    f"gives the metric {name!r} of shape {list(number.shape)}, expected a number"
                )
            number = number.reshape(()).to(logits_1TV.device)
            self._metrics[HOOK + name] = samples.summed(number) * samples.micro.scale
        return self._scaled(loss)

    def _batch(self, policy: "LanguageModel") -> dict[str, object]:
        """Return slime's ``batch``: the micro-batch by slime's names; None where a value was not computed."""
        samples, device = self._samples, self._mask_R.device
        held = policy.on_device(samples.micro)
        mask_t = torch.zeros_like(held.tokens_t, dtype=torch.int32).index_fill(0, held.index_m, 1)
        absent = dict.fromkeys(
            ("log_probs", "ref_log_probs", "teacher_log_probs", "values", "advantages", "returns")
        )
        fixed = fixed_lists(samples, device)
        return {
            **absent,
            **fixed,
            **token_lists(samples, self._item.scores, self._item.targets),
            "unconcat_tokens": fixed["tokens"],
            "tokens": held.tokens_t[None].clone(),
            "packed_seq_params": held.pack,
            "loss_masks": samples.whole(self._mask_R.clone()),
            "full_loss_masks": mask_t[None],
            "rollout_mask_sums": units_of(samples, self._functions.per_token),
        }

    def _scaled(self, value: Tensor) -> Tensor:
        total = value * self._samples.micro.scale
        self._metrics["loss"] = self._samples.summed(total).double()
        return total

    def statistics(self) -> dict[str, Tensor]:
        return self._metrics
