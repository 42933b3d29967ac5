"""Statistics of a training step against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.statistics import StepStatistics, token_statistics
from slipstream.configs.schema import ActorConfig
from tests.ranks import run_ranks
from tests.tries import tries


def arrays(seed: int, n: int, *scales: float) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(0, scale, n), dtype=torch.float32) for scale in scales]


def measured_inputs(seed: int, n: int = 40) -> dict[str, torch.Tensor]:
    logp, proximal, behaviour, advantage, entropy = arrays(seed, n, 0.3, 0.3, 0.6, 1.0, 1.0)
    advantage[::5] = 0
    lag = torch.tensor(np.random.default_rng(seed).integers(0, 3, n))
    return {
        "logp": logp,
        "proximal": proximal,
        "behaviour": behaviour,
        "advantage": advantage,
        "entropy": entropy.abs(),
        "lag": lag,
    }


def statistics_of(x: dict[str, torch.Tensor], cap: float | None = 1.5, **actor) -> dict[str, torch.Tensor]:
    if cap is not None:
        actor |= {"correction": {"token": {"type": "cap", "cap": cap}} | actor.get("correction", {})}
    config = ActorConfig.model_validate(actor)
    n = len(x["logp"])
    tokens = Tokens(
        x["logp"],
        x["behaviour"],
        x.get("proximal"),
        x["advantage"],
        x["lag"],
        torch.arange(n) * 3 // max(n, 1),
        3,
    )
    return token_statistics(
        loss=token_losses(config, tokens),
        tokens=tokens,
        share_M=x.get("share", torch.ones(n)),
        entropy_M=x["entropy"],
        reference_M=None,
        measured={},
        recomputed=config.recompute_logprobs,
        weight_cap=cap,
    )


def measured(seed: int) -> dict[str, torch.Tensor]:
    return statistics_of(measured_inputs(seed))


def expected_metrics(parts: list[dict[str, torch.Tensor]], cap: float = 1.5) -> dict[str, float]:
    """Directly over all tokens, in numpy."""
    x = {name: np.concatenate([part[name].double().numpy() for part in parts]) for name in parts[0]}
    ratio, weight = np.exp(x["logp"] - x["proximal"]), np.exp(x["proximal"] - x["behaviour"])
    gap, fresh = np.abs(x["proximal"] - x["behaviour"]), x["lag"] == 0
    clipped = np.where(x["advantage"] > 0, ratio > 1.28, ratio < 0.8) & (x["advantage"] != 0)
    bounded = np.minimum(ratio * x["advantage"], np.clip(ratio, 0.8, 1.28) * x["advantage"])
    loss = -np.minimum(weight, cap) * bounded
    return {
        "train/loss": loss.mean(),
        "train/clip_fraction": clipped.mean(),
        "train/approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "train/entropy": x["entropy"].mean(),
        "train/zero_advantage_fraction": (x["advantage"] == 0).mean(),
        "train/ratio_max": ratio.max(),
        "train/importance_weight_mean": weight.mean(),
        "train/importance_weight_capped_fraction": (weight > cap).mean(),
        "train/ess": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
        "mismatch/logprob_abs_mean": gap[fresh].mean(),
        "mismatch/logprob_square_mean": (gap[fresh] ** 2).mean(),
        "mismatch/logprob_abs_max": gap[fresh].max(),
        "mismatch/tokens": fresh.sum(),
        "staleness/logprob_abs_mean": gap[~fresh].mean(),
        "staleness/kl": (weight - 1 - np.log(weight)).mean(),
    }


def on_two_ranks(rank):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=2
    )
    statistics, without_updates = StepStatistics(0.5), StepStatistics(0.25)
    for seed in ((1, 2), (3, 4))[rank.rank]:
        statistics.add_update([measured(seed)], grad_norm=1.0 + seed)
        statistics.add_skipped()
        without_updates.add_skipped()
    return statistics.reduced(dist.group.WORLD), without_updates.reduced(dist.group.WORLD)


def test_the_metrics_of_a_step_are_those_of_all_its_tokens_on_all_ranks():
    expected = expected_metrics([measured_inputs(seed) for seed in (1, 2, 3, 4)])
    for rank, (actual, without_updates) in enumerate(run_ranks(2, on_two_ranks)):
        of_rank = {
            "train/grad_norm": (2.5, 4.5)[rank],
            "train/lr": 0.5,
            "train/skipped_updates": 2.0,
        }
        assert actual == pytest.approx({**expected, **of_rank}, rel=1e-5)
        assert without_updates == {"train/lr": 0.25, "train/skipped_updates": 2.0}


def metrics_of(*results: dict[str, torch.Tensor]) -> dict[str, float]:
    statistics = StepStatistics(0.1)
    statistics.add_update(list(results), grad_norm=1.0)
    return statistics._metrics({name: value.item() for name, value in statistics._totals.items()})


@tries(10)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 1000))
def test_metrics_do_not_depend_on_how_tokens_are_cut_into_micro_batches(sizes, seed):
    parts = [measured_inputs(seed + i, n) for i, n in enumerate(sizes)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    actual = metrics_of(*(statistics_of(part) for part in parts))
    assert actual == pytest.approx(metrics_of(statistics_of(whole)), rel=1e-6)


def test_the_effective_sample_size_is_one_for_equal_weights_and_one_over_n_for_a_single_one():
    x = measured_inputs(0, 10)
    x["behaviour"] = x["proximal"] - 0.7
    assert metrics_of(statistics_of(x))["train/ess"] == pytest.approx(1.0)
    x["behaviour"] = x["proximal"] + torch.tensor([0.0] + [60.0] * 9)
    assert metrics_of(statistics_of(x))["train/ess"] == pytest.approx(0.1)


def test_mismatch_and_staleness_are_reported_only_for_lags_that_occur():
    x = measured_inputs(0, 10)
    fresh = metrics_of(statistics_of(x | {"lag": torch.zeros(10, dtype=torch.long)}))
    assert fresh["mismatch/tokens"] == 10
    assert "staleness/logprob_abs_mean" not in fresh
    stale = metrics_of(statistics_of(x | {"lag": torch.ones(10, dtype=torch.long)}))
    assert not any(name.startswith("mismatch/") for name in stale)
    assert stale["staleness/logprob_abs_mean"] > 0


def test_without_proximal_log_probs_the_weights_are_current_over_behaviour():
    x = {name: value for name, value in measured_inputs(0).items() if name != "proximal"}
    actual = metrics_of(statistics_of(x, None, use_decoupled_loss=False, recompute_logprobs=False))
    weight = np.exp((x["logp"] - x["behaviour"]).double().numpy())
    assert actual["train/importance_weight_mean"] == pytest.approx(weight.mean(), rel=1e-5)
    assert actual["train/ess"] == pytest.approx(weight.sum() ** 2 / (40 * (weight**2).sum()), rel=1e-5)
    assert "train/importance_weight_capped_fraction" not in actual
    assert not any(name.startswith(("mismatch/", "staleness/")) for name in actual)


def test_dropped_tokens_are_counted_by_reason():
    x = measured_inputs(0)
    correction = {
        "token": {"type": "mask", "low": 0.8, "high": 1.3},
        "sequence": {"type": "geometric", "low": 0.9, "high": 1.1},
        "negative": {"delta": 0.1, "errors": None},
    }
    actual = metrics_of(statistics_of(x, None, correction=correction))
    weight = (x["proximal"] - x["behaviour"]).double().exp()
    outside = ((weight < 0.8) | (weight > 1.3)).double().mean().item()
    assert 0 < outside < 1
    assert actual["train/masked_token_fraction"] == pytest.approx(outside)
    assert {"train/masked_sequence_fraction", "train/masked_negative_fraction"} <= set(actual)
    assert not any("masked" in name for name in metrics_of(statistics_of(x)))


def test_the_loss_is_reported_as_it_is_averaged():
    x = measured_inputs(0)
    twice = metrics_of(statistics_of(x | {"share": torch.full((40,), 2.0)}))
    assert twice["train/loss"] == pytest.approx(2 * metrics_of(statistics_of(x))["train/loss"])


def test_an_extreme_token_leaves_every_metric_finite():
    x = measured_inputs(0, 3)
    for gap in (100.0, -100.0, 1e4, -1e4):
        far = x | {"logp": x["proximal"] + gap, "behaviour": x["proximal"] - torch.tensor([gap, 0.0, 0.0])}
        actual = metrics_of(statistics_of(far))
        assert all(math.isfinite(value) for value in actual.values()), actual
        assert actual["train/approx_kl"] >= 0
        assert 0 <= actual["train/ess"] <= 1 + 1e-9


def test_the_divergence_of_nearly_equal_policies_is_not_rounding_noise():
    x = measured_inputs(0, 1000)
    x["proximal"] = x["proximal"] - 2.0
    x["logp"] = x["proximal"] + 1e-3
    assert metrics_of(statistics_of(x))["train/approx_kl"] == pytest.approx(5e-7, rel=0.01)


def test_a_micro_batch_without_tokens_changes_no_metric():
    whole, empty = measured(1), statistics_of({k: v[:0] for k, v in measured_inputs(2).items()})
    assert metrics_of(whole, empty) == metrics_of(whole) == metrics_of(empty, whole)
    nothing = metrics_of(empty)
    assert nothing["train/loss"] == 0
    assert all(math.isfinite(value) for value in nothing.values())
