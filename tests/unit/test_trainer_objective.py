"""Log-probs, entropies and statistics against float64 formulas written here."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.given_logits import vocab_parallel_logprob
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.statistics import StepStatistics, token_statistics
from slipstream.configs.schema import ActorConfig
from tests.ranks import run_ranks


def arrays(seed: int, n: int, *scales: float) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(0, scale, n), dtype=torch.float32) for scale in scales]


# ---- log-probs


def reference_logprob(logits, target, temperature, vocab):
    logp = (logits[:, :vocab].double() / temperature).log_softmax(-1)
    chosen = logp.gather(-1, target[:, None])[:, 0]
    entropy = -(logp.exp() * torch.where(logp.exp() > 0, logp, 0.0)).sum(-1)
    return chosen, entropy


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(0, 3),
    st.floats(0.05, 5),
    st.sampled_from([0.0, 1.0, 30.0, 1e4]),
)
def test_logprobs_and_entropies_are_those_of_a_float64_log_softmax(
    seed, tokens, vocab, padding, temperature, scale
):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(tokens, vocab + padding, generator=generator)
    target = torch.randint(vocab, (tokens,), generator=generator)
    logp, entropy = vocab_parallel_logprob(logits, target, temperature=temperature, vocab=vocab)
    expected, expected_entropy = reference_logprob(logits, target, temperature, vocab)
    assert logp.dtype == entropy.dtype == torch.float32
    rounding = 2.0**-22 * float(logits.abs().max()) / temperature  # of the float32 logits, once divided
    torch.testing.assert_close(logp.double(), expected, rtol=1e-6, atol=1e-5 + rounding)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=2e-5 + rounding)


def test_bfloat16_logits_lose_nothing_but_their_own_rounding():
    logits = (10 * arrays(0, 5 * 33, 1.0)[0].view(5, 33)).bfloat16()
    target = torch.arange(5)
    logp, _ = vocab_parallel_logprob(logits, target, temperature=0.7, vocab=33)
    torch.testing.assert_close(
        logp.double(), reference_logprob(logits, target, 0.7, 33)[0], rtol=1e-6, atol=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.2, 3), st.integers(0, 3), st.sampled_from([1.0, 50.0]))
def test_the_gradient_is_that_of_the_plain_formula(seed, temperature, padding, scale):
    torch.manual_seed(seed)
    logits = (scale * torch.randn(4, 9 + padding)).requires_grad_()
    target, grad = torch.randint(9, (4,)), torch.randn(4)
    logp, _ = vocab_parallel_logprob(logits, target, temperature=temperature, vocab=9)
    (found,) = torch.autograd.grad(logp, logits, grad)
    plain = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(
        reference_logprob(plain, target, temperature, 9)[0], plain, grad.double()
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert (found[:, 9:] == 0).all()


def test_the_gradient_is_that_of_finite_differences():
    logits, target, temperature = arrays(0, 7, 1.0)[0][None], torch.tensor([3]), 0.8
    leaf = logits.clone().requires_grad_()
    vocab_parallel_logprob(leaf, target, temperature=temperature, vocab=7)[0].sum().backward()
    for column in range(7):
        step = torch.zeros(1, 7, dtype=torch.float64)
        step[0, column] = 1e-6
        above, below = (
            reference_logprob(logits.double() + sign * step, target, temperature, 7)[0].item()
            for sign in (1, -1)
        )
        assert leaf.grad[0, column].item() == pytest.approx((above - below) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("value", [1e4, -1e4, 3e38])
def test_extreme_logits_give_finite_values_and_gradients(value):
    logits = torch.tensor([[value, 0.0, 1.0], [0.0, value, value]], requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.tensor([0, 2]), temperature=1.0, vocab=3)
    logp.sum().backward()
    assert logp.isfinite().all()
    assert entropy.isfinite().all()
    assert logits.grad.isfinite().all()


def test_a_logit_of_minus_infinity_is_a_token_of_no_probability():
    logits = torch.tensor([[-math.inf, 0.0, 0.0]], requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.tensor([1]), temperature=1.0, vocab=3)
    logp.sum().backward()
    assert logp.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad.tolist() == [[0.0, 0.5, -0.5]]


def differentiable_entropy(logits, **distribution):
    any_token = torch.zeros(len(logits), dtype=torch.long)
    return vocab_parallel_logprob(logits, any_token, **distribution, entropy_gradient=True)[1]


def test_the_entropy_has_no_gradient_and_says_so():
    logits = torch.ones(3, 5, requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.zeros(3, dtype=torch.long), temperature=1.0, vocab=5)
    assert logp.requires_grad
    assert not entropy.requires_grad


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.2, 3), st.integers(0, 3), st.sampled_from([0.0, 1.0, 50.0]))
def test_the_entropy_of_the_bonus_and_its_gradient_are_those_of_the_plain_formula(
    seed, temperature, padding, scale
):
    torch.manual_seed(seed)
    logits = (scale * torch.randn(4, 9 + padding)).requires_grad_()
    grad = torch.randn(4)
    found = differentiable_entropy(logits, temperature=temperature, vocab=9)
    found.backward(grad)
    plain = logits.detach().double().requires_grad_()
    logp = (plain[:, :9] / temperature).log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1)
    expected.backward(grad.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logits.grad.double(), plain.grad, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("value", [1e4, -1e4, 3e38, -math.inf])
def test_extreme_logits_give_a_finite_entropy_and_gradient(value):
    logits = torch.tensor([[value, 0.0, 1.0], [0.0, value, 1.0]], requires_grad=True)
    found = differentiable_entropy(logits, temperature=1.0, vocab=3)
    found.sum().backward()
    assert found.isfinite().all()
    assert logits.grad.isfinite().all()


def test_no_tokens_are_no_log_probs():
    logits = torch.zeros(0, 5, requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.zeros(0, dtype=torch.long), temperature=1.0, vocab=5)
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,)


def vocabulary_cases():
    """(columns of one rank, vocabulary): whole, padded, and with a shard that is nothing but padding."""
    torch.manual_seed(5)
    for columns, vocab in ((8, 16), (51, 101), (4, 3)):
        logits = 10 * torch.randn(6, 2 * columns)
        yield logits, torch.randint(vocab, (6,)), torch.randn(6), vocab


def objective_on_two_ranks(rank):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=2
    )
    found = []
    for logits, target, grad, vocab in vocabulary_cases():
        mine = logits.chunk(2, dim=-1)[rank.rank].clone().requires_grad_()
        logp, entropy = vocab_parallel_logprob(
            mine, target, temperature=0.7, vocab=vocab, group=dist.group.WORLD
        )
        logp.backward(grad)
        found.append((logp.detach().numpy(), entropy.numpy(), mine.grad.numpy()))
        mine = mine.detach().requires_grad_()
        spread = differentiable_entropy(mine, temperature=0.7, vocab=vocab, group=dist.group.WORLD)
        spread.backward(grad)
        found[-1] += (spread.detach().numpy(), mine.grad.numpy())
    empty, _ = vocab_parallel_logprob(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), temperature=1.0, vocab=8, group=dist.group.WORLD
    )
    assert empty.shape == (0,)
    statistics = StepStatistics()
    for seed in ((1, 2), (3, 4))[rank.rank]:
        statistics.add_update([measured(seed)], grad_norm=1.0 + seed, lr=0.5, succeeded=seed != 2)
    return found, statistics.reduced(dist.group.WORLD)


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, objective_on_two_ranks)


def test_log_probs_over_a_split_vocabulary_are_those_over_the_whole_one(two_ranks):
    for i, (logits, target, grad, vocab) in enumerate(vocabulary_cases()):
        plain = logits.double().requires_grad_()
        logp, entropy = reference_logprob(plain, target, 0.7, vocab)
        logp.backward(grad.double())
        for found, _ in two_ranks:
            np.testing.assert_allclose(found[i][0], logp.detach(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found[i][1], entropy.detach(), rtol=1e-5, atol=1e-5)
        whole = np.concatenate([found[i][2] for found, _ in two_ranks], axis=-1)
        np.testing.assert_allclose(whole, plain.grad, rtol=1e-5, atol=1e-6)
        plain.grad = None
        logp = (plain[:, :vocab] / 0.7).log_softmax(-1)
        (-(logp.exp() * logp).sum(-1)).backward(grad.double())
        for found, _ in two_ranks:
            np.testing.assert_allclose(found[i][3], entropy.detach(), rtol=1e-5, atol=1e-5)
        whole = np.concatenate([found[i][4] for found, _ in two_ranks], axis=-1)
        np.testing.assert_allclose(whole, plain.grad, rtol=1e-4, atol=1e-5)


# ---- statistics


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
        teacher_M=None,
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
        "train/behaviour_weight_mean": weight.mean(),
        "train/behaviour_weight_capped_fraction": (weight > cap).mean(),
        "train/ess": weight.sum() ** 2 / (len(weight) * (weight**2).sum()),
        "mismatch/logprob_abs_mean": gap[fresh].mean(),
        "mismatch/logprob_abs_max": gap[fresh].max(),
        "mismatch/tokens": fresh.sum(),
        "staleness/logprob_abs_mean": gap[~fresh].mean(),
    }


def test_the_metrics_of_a_step_are_those_of_all_its_tokens_on_all_ranks(two_ranks):
    expected = expected_metrics([measured_inputs(seed) for seed in (1, 2, 3, 4)])
    for rank, (_, found) in enumerate(two_ranks):
        own = {
            "train/grad_norm": (2.5, 4.5)[rank],
            "train/lr": 0.5,
            "train/skipped_updates": (1.0, 0.0)[rank],
        }
        assert found == pytest.approx({**expected, **own}, rel=1e-5)


def metrics_of(*results: dict[str, torch.Tensor]) -> dict[str, float]:
    statistics = StepStatistics()
    statistics.add_update(list(results), grad_norm=1.0, lr=0.1, succeeded=True)
    return statistics._metrics({name: value.item() for name, value in statistics._totals.items()})


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 1000))
def test_metrics_do_not_depend_on_how_tokens_are_cut_into_micro_batches(sizes, seed):
    parts = [measured_inputs(seed + i, n) for i, n in enumerate(sizes)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    found = metrics_of(*(statistics_of(part) for part in parts))
    assert found == pytest.approx(metrics_of(statistics_of(whole)), rel=1e-6)


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
    found = metrics_of(statistics_of(x, None, use_decoupled_loss=False, recompute_logprobs=False))
    weight = np.exp((x["logp"] - x["behaviour"]).double().numpy())
    assert found["train/behaviour_weight_mean"] == pytest.approx(weight.mean(), rel=1e-5)
    assert found["train/ess"] == pytest.approx(weight.sum() ** 2 / (40 * (weight**2).sum()), rel=1e-5)
    assert "train/behaviour_weight_capped_fraction" not in found
    assert not any(name.startswith(("mismatch/", "staleness/")) for name in found)


def test_dropped_tokens_are_counted_by_reason():
    x = measured_inputs(0)
    correction = {
        "token": {"type": "mask", "low": 0.8, "high": 1.3},
        "sequence": {"type": "geometric", "low": 0.9, "high": 1.1},
        "negative": {"delta": 0.1},
    }
    found = metrics_of(statistics_of(x, None, correction=correction))
    weight = (x["proximal"] - x["behaviour"]).double().exp()
    outside = ((weight < 0.8) | (weight > 1.3)).double().mean().item()
    assert 0 < outside < 1
    assert found["train/masked_token_fraction"] == pytest.approx(outside)
    assert {"train/masked_sequence_fraction", "train/masked_negative_fraction"} <= set(found)
    assert not any("masked" in name for name in metrics_of(statistics_of(x)))


def test_the_loss_is_reported_as_it_is_averaged():
    x = measured_inputs(0)
    twice = metrics_of(statistics_of(x | {"share": torch.full((40,), 2.0)}))
    assert twice["train/loss"] == pytest.approx(2 * metrics_of(statistics_of(x))["train/loss"])


def test_an_extreme_token_leaves_every_metric_finite():
    x = measured_inputs(0, 3)
    for gap in (100.0, -100.0, 1e4, -1e4):
        far = x | {"logp": x["proximal"] + gap, "behaviour": x["proximal"] - torch.tensor([gap, 0.0, 0.0])}
        found = metrics_of(statistics_of(far))
        assert all(math.isfinite(value) for value in found.values()), found
        assert found["train/approx_kl"] >= 0
        assert 0 <= found["train/ess"] <= 1 + 1e-9


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
