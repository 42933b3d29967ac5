"""Hooks that decide about the loss of a micro-batch.

token losses of the objective
    |  custom_tis_function: weighs and drops, in the place of the importance weight
    |  actor.correction: drops
    |  tokens that rollout_data_postprocess has taken the loss of
    |  custom_pg_loss_reducer_function: one number of them, in the place of the recipe's mean
total of the micro-batch

custom_loss_function gives the total itself, from logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.backend.objective.losses import Tokens, Weigh
from slipstream.backend.objective.names import HOOK
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.backend.trainer.prepared import PreparedMicroBatch
from slipstream.backend.trainer.slime.named import NamedHook
from slipstream.backend.trainer.slime.returned import (
    checked_list,
    checked_metrics,
    checked_scalar,
    checked_tensor,
    checked_tuple,
    require_finite,
)
from slipstream.backend.trainer.slime.samples import Samples
from slipstream.backend.trainer.slime.view import fixed_lists, token_lists, units_of
from slipstream.rollout.compat.slime.arguments import SlimeArguments

if TYPE_CHECKING:  # Megatron can only be imported once the rank has joined its groups
    from slipstream.backend.megatron.packed_model import LanguageModel


@dataclass(frozen=True)
class LossFunctions:
    """The hooks of a recipe that decide about losses; None where it names none."""

    args: SlimeArguments
    per_token: bool
    """True if the recipe averages over tokens."""
    weigh: NamedHook | None
    reduce: NamedHook | None
    loss: NamedHook | None


class HookedLoss:
    """The loss of one micro-batch under a recipe's hooks. Used once, in the order of its methods."""

    def __init__(
        self, functions: LossFunctions, samples: Samples, item: PreparedMicroBatch, kept_M: Tensor | None
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

    @property
    def replaces_loss(self) -> bool:
        """True if the recipe's loss, its entropy bonus and its penalty are the hook's concern."""
        return self._functions.loss is not None

    def weighing(self, tokens: Tokens, share_M: Tensor) -> Weigh | None:
        """Return what weighs the losses of ``tokens``; None: the importance weight, as without hooks."""
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
        """Return the losses without those of tokens whose loss a hook has taken away."""
        if self._kept_M is None:
            return loss
        return replace(
            loss,
            loss_T=torch.where(self._kept_M, loss.loss_T, 0.0),
            masked=loss.masked | {"hook": ~self._kept_M | loss.masked.get("hook", ~self._kept_M)},
        )

    def total(self, loss: PolicyLoss, share_M: Tensor) -> Tensor:
        """Return the sum of token losses of the micro-batch, as Megatron divides it."""
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

    def _batch(self, policy: "LanguageModel") -> dict[str, Any]:
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
        """Return the sums of the hooks' metrics, and the loss if it is not the recipe's mean."""
        return self._metrics
