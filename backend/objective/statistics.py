"""Metrics of a training step's tokens: sums and maxima, reduced once at the end of the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.backend.objective import kl
from slipstream.backend.objective.losses import Tokens
from slipstream.backend.objective.names import HOOK
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.backend.objective.typed_torch import typed_dist

TOP_TOKENS = ("top_tokens_kl", "top_tokens")
"""Sums over the tokens at which a teacher's likeliest tokens are known: of the divergence, and of 1."""

LARGEST_LOG_WEIGHT = 100.0
"""Importance weights are reported before their cap; a single token must not make a step's mean infinite."""


def token_statistics(
    *,
    loss: PolicyLoss,
    tokens: Tokens,
    share_M: Tensor,
    entropy_M: Tensor,
    reference_M: Tensor | None,
    measured: Mapping[str, Tensor],
    recomputed: bool,
    weight_cap: float | None,
) -> dict[str, Tensor]:
    """Return sums, and maxima named ``max/...``, over one micro-batch; float64 scalars.

    The micro-batch may have no tokens. The weight of a token is proximal / behaviour, or current / behaviour
    without a proximal policy. Mismatch is measured on tokens of lag 0, for which trainer and engine hold the
    same weights, staleness on the others; both need recomputed log-probs. The divergence from the reference
    is estimated by k3. ``weight_cap``: None if no weight is capped. ``measured``: further values of tokens,
    of which the step reports the means as ``advantage/NAME``.
    """
    ratio_M = loss.ratio_T.double()
    upper_M = tokens.logp_M.detach() if tokens.proximal_logp_M is None else tokens.proximal_logp_M
    gap_M = (upper_M - tokens.behaviour_logp_M).double()
    weight_M = gap_M.clamp(max=LARGEST_LOG_WEIGHT).exp()
    values = {
        "tokens": torch.ones_like(entropy_M),
        "loss": share_M * loss.loss_T.detach(),
        "clipped": loss.clipped_T.float(),
        "approx_kl": ratio_M - 1 - ratio_M.log(),
        "entropy": entropy_M,
        "zero_advantage": (tokens.advantage_M == 0).float(),
        "weight": weight_M,
        "weight_squared": weight_M**2,
    }
    values |= {f"masked/{reason}": dropped_M.float() for reason, dropped_M in loss.masked.items()}
    policy_M = tokens.logp_M.detach()
    if reference_M is not None:
        values["reference_kl"] = kl.estimate(policy_M, reference_M, "k3")
    values |= {f"advantage/{name}": value_M for name, value_M in measured.items()}
    maxima = {"max/ratio": ratio_M}
    if weight_cap is not None:
        values["capped"] = (weight_M > weight_cap).float()
    if recomputed:
        fresh_M = tokens.lag_M == 0
        values |= {
            "drift_kl": torch.expm1(gap_M.clamp(max=LARGEST_LOG_WEIGHT)) - gap_M,
            "fresh": fresh_M.float(),
            "fresh_gap": gap_M.abs() * fresh_M,
            "fresh_square": gap_M**2 * fresh_M,
            "stale": (~fresh_M).float(),
            "stale_gap": gap_M.abs() * ~fresh_M,
        }
        maxima["max/fresh_gap"] = gap_M.abs() * fresh_M
    sums = {name: value_M.double().sum() for name, value_M in values.items()}
    # Every maximum is over values of at least 0, so 0 stands for the maximum of no tokens.
    return sums | {name: value.max() if len(value) else value.sum() for name, value in maxima.items()}


@dataclass
class StepStatistics:
    """Collects the statistics of a training step's micro-batches and updates."""

    lr: float
    """Learning rate of the step."""
    named_by_hooks: bool = False
    """True if ranks may have different statistics, since hooks name some of them."""
    _totals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    _grad_norms: list[float] = field(default_factory=list[float])
    _skipped: int = 0

    def add_update(self, results: Sequence[dict[str, Tensor]], grad_norm: float) -> None:
        """Add one optimizer update; ``results``: the token statistics of its micro-batches."""
        for result in results:
            for name, value in result.items():
                known = self._totals.get(name)
                if known is None:
                    self._totals[name] = value
                else:
                    self._totals[name] = (
                        torch.maximum(known, value) if name.startswith("max/") else known + value
                    )
        self._grad_norms.append(grad_norm)

    def add_skipped(self) -> None:
        """Count an update that no rank has made. Its tokens are in no metric: they may not be finite."""
        self._skipped += 1

    def reduced(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the metrics of the step over all data-parallel ranks. Collective over ``group``.

        Without a single update, these are the learning rate and the number of skipped updates alone.
        """
        metrics = {"train/lr": self.lr, "train/skipped_updates": float(self._skipped)}
        if not self._grad_norms:
            return metrics
        if self.named_by_hooks:
            self._agree_on_names(group)
        names = sorted(self._totals)
        for operation, chosen in (
            (dist.ReduceOp.SUM, [n for n in names if not n.startswith("max/")]),
            (dist.ReduceOp.MAX, [n for n in names if n.startswith("max/")]),
        ):
            values = torch.stack([self._totals[name] for name in chosen])
            typed_dist.all_reduce(values, operation, group)
            self._totals.update(zip(chosen, values, strict=True))
        total = {name: value.item() for name, value in self._totals.items()}
        return metrics | self._metrics(total)

    def _agree_on_names(self, group: dist.ProcessGroup) -> None:
        """Add a sum of 0 for every name that another rank has. Collective over ``group``."""
        by_rank: list[list[str]] = [[]] * group.size()
        typed_dist.all_gather_object(by_rank, list(self._totals), group)
        absent = {name for names in by_rank for name in names} - self._totals.keys()
        self._totals |= {name: torch.zeros_like(self._totals["tokens"]) for name in absent}

    def _metrics(self, total: dict[str, float]) -> dict[str, float]:
        tokens = max(total["tokens"], 1.0)
        metrics = {
            "train/loss": total["loss"] / tokens,
            "train/grad_norm": sum(self._grad_norms) / len(self._grad_norms),
            "train/clip_fraction": total["clipped"] / tokens,
            "train/approx_kl": total["approx_kl"] / tokens,
            "train/entropy": total["entropy"] / tokens,
            "train/zero_advantage_fraction": total["zero_advantage"] / tokens,
            "train/ratio_max": total["max/ratio"],
            "train/importance_weight_mean": total["weight"] / tokens,
            "train/ess": total["weight"] ** 2 / max(total["weight_squared"] * tokens, 1e-300),
        }
        for name, dropped in total.items():
            if name.startswith("masked/"):
                metrics[f"train/masked_{name.removeprefix('masked/')}_fraction"] = dropped / tokens
        if "reference_kl" in total:
            metrics["train/reference_kl"] = total["reference_kl"] / tokens
        if "top_tokens" in total:
            metrics["train/teacher_topk_kl"] = total["top_tokens_kl"] / max(total["top_tokens"], 1.0)
            metrics["train/teacher_topk_fraction"] = total["top_tokens"] / tokens
        metrics |= {name: value / tokens for name, value in total.items() if name.startswith("advantage/")}
        metrics |= {name: value / tokens for name, value in total.items() if name.startswith(HOOK)}
        if "capped" in total:
            metrics["train/importance_weight_capped_fraction"] = total["capped"] / tokens
        if "drift_kl" in total:
            metrics["staleness/kl"] = total["drift_kl"] / tokens
        if total.get("fresh"):
            metrics |= {
                "mismatch/logprob_abs_mean": total["fresh_gap"] / total["fresh"],
                "mismatch/logprob_square_mean": total["fresh_square"] / total["fresh"],
                "mismatch/logprob_abs_max": total["max/fresh_gap"],
                "mismatch/tokens": total["fresh"],
            }
        if total.get("stale"):
            metrics["staleness/logprob_abs_mean"] = total["stale_gap"] / total["stale"]
        return metrics
