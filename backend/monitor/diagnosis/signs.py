"""Signs that a run shows: functions from evidence to a weight and figures, or None. Pure.

A weight is the share of the learning signal that the sign explains, from 0 to 1.
"""

import math
from collections.abc import Callable, Mapping
from statistics import fmean, median, variance

from slipstream.backend.monitor.diagnosis.evidence import Evidence
from slipstream.rollout.control.drift import DriftLimits

Sign = tuple[float, str]
"""Weight, and the figures in words."""

LAST_STEPS = 10
"""Steps that stand for the state of a run now. One batch is noisy, and older steps may be those of a
warm-up."""

FEWEST_STEPS = 4
"""A trend over fewer steps is noise."""


def now(evidence: Evidence, tag: str) -> float | None:
    """Return the median of a tag's finite values over the last steps; None: it has none."""
    values = [value for value in evidence.series.get(tag, ())[-LAST_STEPS:] if math.isfinite(value)]
    return median(values) if values else None


ERRORS = 3.0
"""Standard errors by which a later half must be above an earlier one: in two hundred runs that stay as they
are, about one seems to rise."""


def rises(evidence: Evidence, tag: str = "reward/mean") -> bool:
    """True if the later half of a tag's values is above the earlier one by more than their noise."""
    values = [value for value in evidence.series.get(tag, ()) if math.isfinite(value)]
    half = len(values) // 2
    if half < FEWEST_STEPS:
        return False
    first, last = values[:half], values[-half:]
    error = math.sqrt((variance(first) + variance(last)) / half)
    return fmean(last) - fmean(first) > max(ERRORS * error, 1e-9)


def is_warm(evidence: Evidence) -> bool:
    """True if the learning rate has had its full value for some steps."""
    return evidence.steps >= (evidence.setting("actor.optimizer.warmup_steps") or 0) + FEWEST_STEPS


def share_of_ends(evidence: Evidence, end: str) -> float:
    """Return the share of the groups that have ended which have ended so."""
    total = sum(evidence.groups.values())
    return evidence.groups.get(end, 0) / total if total else 0.0


# ---- nothing reaches the trainer


SKIPPED = 0.02
"""Share of updates. A single one is what `run.max_skipped_updates` is for."""


def skipped_updates(evidence: Evidence) -> Sign | None:
    skipped = sum(evidence.series.get("train/skipped_updates", ()))
    updates = evidence.steps * int(evidence.setting("actor.minibatches") or 1)
    if not updates or skipped < max(2, SKIPPED * updates):
        return None
    share = min(1.0, skipped / updates)
    return max(0.5, share), f"{skipped:.0f} of {updates} updates skipped ({share:.0%})"


FAILED = 0.1
"""Share of groups. Below it, single prompts are to blame, whose groups other prompts replace."""

MOST_LETTERS = 200
"""Letters of a line of a reason that are shown."""

TIME_OUT = "rollout.judging.timeout_s"
"""Stands in the reason of a group whose reward has taken too long."""


def failures(evidence: Evidence, *, late: bool) -> Sign | None:
    """Return the sign of rewards that take too long, or of groups that fail for another reason."""
    share = share_of_ends(evidence, "failed")
    reasons = [reason for reason in evidence.failures if (TIME_OUT in reason) == late]
    ours, all_ = sum(evidence.failures[reason] for reason in reasons), sum(evidence.failures.values())
    if share < FAILED or (all_ and 2 * ours < all_) or (late and not ours):
        return None
    example = max(reasons, key=lambda reason: evidence.failures[reason], default="")
    return max(0.5, share), f"{share:.0%} of the groups have failed{_said(example)}"


def _said(reason: str) -> str:
    """Return the place and the error of a reason, whose first and last lines they are."""
    lines = [line.strip()[:MOST_LETTERS] for line in reason.splitlines() if line.strip()]
    return "".join(f"; {line}" for line in dict.fromkeys((lines[0], lines[-1]))) if lines else ""


MASKED = 0.3
"""Share of tokens. Corrections that are meant drop a few per cent."""

MASKS = {
    "actor.correction.token": "train/masked_token_fraction",
    "actor.correction.sequence": "train/masked_sequence_fraction",
    "actor.correction.negative": "train/masked_negative_fraction",
    "rollout.hooks": "train/masked_hook_fraction",
}


def masked(evidence: Evidence) -> Sign | None:
    if now(evidence, "train/tokens") == 0:
        return 1.0, "no token carries loss (train/tokens is 0)"
    shares = {who: now(evidence, tag) or 0.0 for who, tag in MASKS.items()}
    who = max(shares, key=lambda each: shares[each])
    return _share(shares[who], MASKED, f"of the tokens get no loss, by {who}")


TRUNCATED = 0.3


def truncated(evidence: Evidence) -> Sign | None:
    limit = evidence.setting("rollout.sampling.max_new_tokens")
    return _share(
        now(evidence, "rollout/truncated_fraction"), TRUNCATED, f"of the responses end at {limit} tokens"
    )


FILTERED = 0.8
"""Share of groups. Filters of groups with equal rewards drop half of them and more in healthy runs."""


def filtered(evidence: Evidence) -> Sign | None:
    return _share(share_of_ends(evidence, "filtered"), FILTERED, "of the groups rejected by the filter")


def _share(share: float | None, least: float, words: str) -> Sign | None:
    return None if share is None or share < least else (share, f"{share:.0%} {words}")


# ---- rewards say nothing


def every_reward(evidence: Evidence, fits: Callable[[float], bool]) -> Sign | None:
    """Return the sign of a reward that every episode of the last steps has, if its value ``fits``."""
    means = evidence.series.get("reward/mean", ())[-LAST_STEPS:]
    spreads = evidence.series.get("reward/std", ())[-LAST_STEPS:]
    if not means or max(spreads, default=1.0) > 1e-6 or max(means) - min(means) > 1e-6:
        return None
    return (1.0, f"every reward is {means[-1]:g}") if fits(means[-1]) else None


EQUAL = 0.7
"""Share of tokens. At the end of a run that has learned, most groups are all right: `rises` excuses it."""


def equal_groups(evidence: Evidence) -> Sign | None:
    return _share(
        now(evidence, "train/zero_advantage_fraction"), EQUAL, "of the tokens in groups of equal rewards"
    )


LOW_ENTROPY = 0.01
"""Nats per token: nearly every token is the likeliest one, and the samples of a group are alike."""


def low_entropy(evidence: Evidence) -> Sign | None:
    entropy = now(evidence, "train/entropy")
    if entropy is None or entropy > LOW_ENTROPY:
        return None
    temperature = evidence.setting("rollout.sampling.temperature")
    return 1.0, f"entropy {entropy:.2g} nats per token at temperature {temperature}"


FEW_PROMPTS = 0.1
"""Different prompts for each trained group: ten passes over the data."""


def few_prompts(evidence: Evidence) -> Sign | None:
    groups, prompts = evidence.logged_groups, evidence.prompts
    held_out = evidence.series.get("eval/reward", ())
    follows = bool(held_out) and held_out[-1] > held_out[0]
    if follows or groups < 2 * LAST_STEPS or prompts > FEW_PROMPTS * groups:
        return None
    return 1 - prompts / groups, f"{prompts} different prompts in {groups} groups"


# ---- the policy of the data is another one


MISMATCH = 0.05
"""Nats. bfloat16 engines differ by 0.01 to 0.02."""


def mismatch(evidence: Evidence) -> Sign | None:
    gap = now(evidence, "mismatch/logprob_abs_mean")
    if gap is None or gap < MISMATCH:
        return None
    return min(1.0, 0.6 + gap), f"log-probs differ by {gap:.3g} nats at lag 0"


EXPIRED = 0.1
"""Share of groups. Those that are slow, and often long, are missing in what is trained."""

EXPIRED_TURNS = 0.5
"""Share of live users' turns. Some of their sessions end without a word that a turn could be judged by."""

LEAST_ESS = 0.5


def stale(evidence: Evidence) -> Sign | None:
    share, ess = share_of_ends(evidence, "expired"), now(evidence, "train/ess")
    gap, lag = now(evidence, "mismatch/logprob_abs_mean") or 0.0, now(evidence, "staleness/token_mean") or 0.0
    if share >= EXPIRED:
        return max(0.5, share), f"{share:.0%} of the groups given up as too old"
    expired, trained = now(evidence, "live/expired") or 0.0, now(evidence, "live/trained") or 0.0
    if expired and expired / (expired + trained) >= EXPIRED_TURNS:
        turns = expired / (expired + trained)
        return turns, f"{turns:.0%} of the turns of live users given up as too old"
    if ess is not None and ess < LEAST_ESS and lag > 0 and gap < MISMATCH:
        return 1 - ess, f"effective sample size {ess:.0%}, mean lag {lag:.1f} versions"
    return None


# ---- steps are too large or too small


HIGH_KL = 0.05
"""Nats per token within one step. Clipping holds healthy steps near 0.001; 0.1 has ruined a run."""

HIGH_DRIFT = 1.0
"""Nats per token between the policy that sampled and the one that trains."""

EXPLODING = 20.0
"""Gradient norm, as a multiple of that of the first steps."""


def rate_too_high(evidence: Evidence) -> Sign | None:
    if rises(evidence):
        return None
    words = f"lr {now(evidence, 'train/lr') or math.nan:.2g}"
    for tag, high, where in (
        ("train/approx_kl", HIGH_KL, "within a step"),
        ("staleness/kl", HIGH_DRIFT, "from the policy that sampled"),
    ):
        # After a collapse nothing moves any more: the third largest value remembers.
        largest = sorted(filter(math.isfinite, evidence.series.get(tag, ())))[-3:]
        if len(largest) == 3 and largest[0] > high:
            return 1.0, f"KL {largest[0]:.2g} nats {where}, {words}"
    norms = [value for value in evidence.series.get("train/grad_norm", ()) if math.isfinite(value)]
    first, last = median(norms[:3] or [0.0]), now(evidence, "train/grad_norm")
    if len(norms) >= FEWEST_STEPS and last is not None and last > EXPLODING * first > 0:
        return 0.9, f"gradient norm {first:.2g} -> {last:.2g}, {words}"
    return None


NO_SIGNAL = 0.95
"""Share of tokens with advantage 0 from which no rate moves the policy."""

LOW_KL = 1e-8
"""Nats per token within one step, or since the data was sampled. Float32 rounding alone makes 1e-14."""


def rate_too_low(evidence: Evidence) -> Sign | None:
    # In the first update of a step the ratio is 1, and with the data of lag 0 the drift is 0.
    moves = [now(evidence, "train/approx_kl")] if (evidence.setting("actor.minibatches") or 1) > 1 else []
    moves += [now(evidence, "staleness/kl")] if (now(evidence, "staleness/token_mean") or 0) > 0 else []
    known, rate = [move for move in moves if move is not None], now(evidence, "train/lr")
    has_signal = (now(evidence, "train/zero_advantage_fraction") or 0.0) < NO_SIGNAL
    if not known or max(known) > LOW_KL or rate is None or not has_signal or not is_warm(evidence):
        return None
    return 0.8, f"the policy moves by a KL of {max(known):.2g} nats, lr {rate:.2g}"


SLOWED = 0.5
"""Share of the rate or of the groups in flight that a limit of drift leaves."""


NEAR = 0.7
"""Strain at which a limit of drift may be what slows a run."""


def drift_limit(evidence: Evidence) -> Sign | None:
    drift = evidence.setting("actor.drift")
    if not isinstance(drift, Mapping) or not is_warm(evidence):
        return None
    kl, ess = now(evidence, "staleness/kl") or 0.0, now(evidence, "train/ess") or 1.0
    strain = DriftLimits(drift.get("kl"), drift.get("ess")).strain(kl, ess)
    left, what = _rate_left(evidence), "of the learning rate"
    if drift.get("slows") == "admission":
        # Few groups are in flight also where engines hold few, and at the end of a run.
        left, what = _groups_left(evidence) if strain > NEAR else None, "of the groups in flight"
    if left is None or left > SLOWED:
        return None
    return max(0.8, 1 - left), f"leaves {left:.0%} {what}; strain {strain:.2g}, where 1 is the limit"


def _rate_left(evidence: Evidence) -> float | None:
    rates, full = evidence.series.get("train/lr", ()), evidence.setting("actor.optimizer.lr")
    decay = evidence.setting("actor.optimizer.decay.type")
    # Older steps may be those of the warm-up.
    return median(rates[-FEWEST_STEPS:]) / full if rates and full and decay in (None, "constant") else None


def _groups_left(evidence: Evidence) -> float | None:
    places = ("rollout/groups_in_flight", "rollout/groups_ready")
    groups = sum(now(evidence, tag) or 0.0 for tag in places)
    bound, batch = (evidence.setting(f"rollout.{name}") for name in ("max_head_offpolicyness", "batch_size"))
    return groups / ((bound + 1) * batch) if isinstance(bound, int) and isinstance(batch, int) else None


CLIPPED = 0.3
"""Share of the tokens whose advantage is not 0. Bounds that are meant act on a few per cent."""

BY_SEQUENCE = "gspo"
"""Objective whose bound acts on whole sequences, and by design on a large share of them."""


def clipped(evidence: Evidence) -> Sign | None:
    fraction, zero = now(evidence, "train/clip_fraction"), now(evidence, "train/zero_advantage_fraction")
    signal = 1 - (zero or 0.0)
    if fraction is None or signal <= 0 or evidence.setting("actor.objective.type") == BY_SEQUENCE:
        return None
    words = "of the tokens with an advantage at the objective's bound"
    return _share(min(1.0, fraction / signal), CLIPPED, words)
