"""Log-probs, advantages, losses and statistics against float64 formulas written here from the papers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.objective.advantage import group_normalized
from backend.objective.logprob import vocab_parallel_logprob
from backend.objective.policy_loss import LOG_RATIO_BOUND, decoupled_ppo, ppo
from backend.objective.statistics import StepStatistics, token_statistics
from tests.ranks import run_ranks

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


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


def test_the_entropy_has_no_gradient_and_says_so():
    logits = torch.ones(3, 5, requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.zeros(3, dtype=torch.long), temperature=1.0, vocab=5)
    assert logp.requires_grad
    assert not entropy.requires_grad


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


# ---- losses


def ppo_reference(logp, old, advantage, clip_low=0.2, clip_high=0.28):
    """PPO eq. 7 with DAPO's two clip ranges, per token, in float64."""
    ratio = np.exp(np.asarray(logp, np.float64) - np.asarray(old, np.float64))
    advantage = np.asarray(advantage, np.float64)
    return -np.minimum(ratio * advantage, np.clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)


def test_ppo_is_the_papers_formula():
    logp, old, advantage = arrays(0, 200, 0.5, 0.5, 2.0)
    loss = ppo(logp, old, advantage, **CLIP)
    np.testing.assert_allclose(loss.loss_T, ppo_reference(logp, old, advantage), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss.ratio_T, (logp - old).double().exp(), rtol=1e-5)
    assert (loss.weight_T == 1).all()


def test_a_token_is_clipped_exactly_when_it_has_no_gradient():
    logp, old, advantage = arrays(1, 300, 0.5, 0.5, 2.0)
    leaf = logp.requires_grad_()
    loss = ppo(leaf, old, advantage, **CLIP)
    loss.loss_T.sum().backward()
    assert loss.clipped_T.any()
    assert torch.equal(loss.clipped_T, leaf.grad == 0)
    beyond = torch.where(advantage > 0, loss.ratio_T > 1.28, loss.ratio_T < 0.8)
    assert torch.equal(loss.clipped_T, beyond)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_gradient_of_a_loss_is_that_of_finite_differences(decoupled):
    logp, proximal, behaviour, advantage = arrays(2, 50, 0.4, 0.4, 0.8, 2.0)
    leaf = logp.clone().requires_grad_()
    if decoupled:
        loss = decoupled_ppo(leaf, proximal, behaviour, advantage, weight_cap=2.0, **CLIP)
        weight = np.minimum(np.exp((proximal - behaviour).double().numpy()), 2.0)
    else:
        loss, weight = ppo(leaf, proximal, advantage, **CLIP), 1.0
    loss.loss_T.sum().backward()
    step = 1e-6
    above = weight * ppo_reference(logp.double() + step, proximal, advantage)
    below = weight * ppo_reference(logp.double() - step, proximal, advantage)
    np.testing.assert_allclose(leaf.grad, (above - below) / (2 * step), rtol=1e-4, atol=1e-5)


def test_the_decoupled_loss_applies_the_capped_behaviour_weight_once_and_without_gradient():
    logp, proximal, behaviour, advantage = arrays(3, 400, 0.4, 0.4, 1.5, 2.0)
    leaves = [tensor.clone().requires_grad_() for tensor in (logp, behaviour)]
    loss = decoupled_ppo(leaves[0], proximal, leaves[1], advantage, weight_cap=2.0, **CLIP)
    weight = np.minimum(np.exp((proximal - behaviour).double().numpy()), 2.0)
    assert (weight == 2.0).any()
    np.testing.assert_allclose(loss.weight_T, weight, rtol=1e-5)
    np.testing.assert_allclose(
        loss.loss_T.detach(), weight * ppo_reference(logp, proximal, advantage), rtol=1e-5, atol=1e-6
    )
    assert not loss.weight_T.requires_grad
    loss.loss_T.sum().backward()
    assert leaves[1].grad is None
    plain = logp.clone().requires_grad_()
    ppo(plain, proximal, advantage, **CLIP).loss_T.sum().backward()
    np.testing.assert_allclose(leaves[0].grad, weight * plain.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_with_behaviour_equal_to_proximal_the_decoupled_loss_is_ppo():
    logp, proximal, advantage = arrays(4, 50, 0.4, 0.4, 2.0)
    decoupled = decoupled_ppo(logp, proximal, proximal, advantage, weight_cap=5.0, **CLIP)
    assert torch.equal(decoupled.loss_T, ppo(logp, proximal, advantage, **CLIP).loss_T)


@pytest.mark.parametrize("gap", [0.0, 19.0, 21.0, 100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_no_log_ratio_makes_nan_or_infinity_of_a_loss_or_gradient(gap, advantage):
    advantage_T = torch.tensor([advantage])
    for which in ("ratio", "weight", "both"):
        leaf = torch.zeros(1, requires_grad=True)
        proximal = torch.full((1,), -gap if which != "weight" else 0.0)
        behaviour = proximal - (gap if which != "ratio" else 0.0)
        loss = decoupled_ppo(leaf, proximal, behaviour, advantage_T, weight_cap=5.0, **CLIP)
        loss.loss_T.sum().backward()
        for value in (loss.loss_T, leaf.grad, loss.ratio_T, loss.weight_T):
            assert value.isfinite().all(), (which, value)
        if advantage == 0:
            assert loss.loss_T.item() == leaf.grad.item() == 0


@given(st.floats(-LOG_RATIO_BOUND + 0.01, LOG_RATIO_BOUND - 0.01), st.sampled_from([-2.0, 0.5]))
@settings(deadline=None)
def test_inside_its_bound_a_log_ratio_is_used_as_it_is(gap, advantage):
    loss = ppo(torch.tensor([gap]), torch.zeros(1), torch.tensor([advantage]), **CLIP)
    expected = ppo_reference([np.float32(gap)], [0.0], [advantage])
    np.testing.assert_allclose(loss.loss_T, expected, rtol=1e-5)


@given(st.floats(LOG_RATIO_BOUND, 1e5), st.sampled_from([-1.0, 1.0]))
@settings(deadline=None)
def test_the_bound_never_changes_a_result_that_clipping_decides(gap, sign):
    """Ratios above the range with A > 0, below it with A < 0."""
    loss = ppo(torch.tensor([sign * gap]), torch.zeros(1), torch.tensor([sign * 2.0]), **CLIP)
    assert loss.clipped_T.all()
    assert loss.loss_T.item() == pytest.approx(-2.56 if sign > 0 else 1.6)


# ---- advantages


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_group_advantages_are_numpys_whatever_the_order_of_the_groups(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    group = np.repeat(data.draw(st.permutations(range(7, 7 + len(sizes)))), sizes)
    reward = np.array([data.draw(st.sampled_from([0.0, 0.1, 1.0, -2.5, 7.0])) for _ in group], np.float32)
    order = data.draw(st.permutations(range(len(group))))
    group, reward = group[order], reward[order]
    found = group_normalized(torch.tensor(reward), torch.tensor(group)).numpy()
    assert found.dtype == np.float32
    for one in np.unique(group):
        mine = reward[group == one].astype(np.float64)
        spread = mine.std(ddof=1) if len(mine) > 1 else 0.0
        np.testing.assert_allclose(
            found[group == one], (mine - mine.mean()) / (spread + 1e-6), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_group_of_equal_rewards_has_advantage_zero(reward, n):
    assert group_normalized(torch.full((n,), reward), torch.zeros(n, dtype=torch.long)).tolist() == [0.0] * n


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


def statistics_of(x: dict[str, torch.Tensor], cap: float = 1.5) -> dict[str, torch.Tensor]:
    loss = decoupled_ppo(x["logp"], x["proximal"], x["behaviour"], x["advantage"], weight_cap=cap, **CLIP)
    return token_statistics(
        loss=loss,
        entropy_M=x["entropy"],
        advantage_M=x["advantage"],
        lag_M=x["lag"],
        behaviour_logp_M=x["behaviour"],
        proximal_logp_M=x["proximal"],
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
    loss = np.minimum(weight, cap) * ppo_reference(x["logp"], x["proximal"], x["advantage"])
    return {
        "train/loss": loss.mean(),
        "train/clip_fraction": clipped.mean(),
        "train/approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "train/entropy": x["entropy"].mean(),
        "train/zero_advantage_fraction": (x["advantage"] == 0).mean(),
        "train/ratio_max": ratio.max(),
        "train/tokens": len(ratio),
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


def test_without_recomputed_log_probs_nothing_is_said_about_weights():
    x = measured_inputs(0)
    loss = ppo(x["logp"], x["behaviour"], x["advantage"], **CLIP)
    found = metrics_of(
        token_statistics(
            loss=loss,
            entropy_M=x["entropy"],
            advantage_M=x["advantage"],
            lag_M=x["lag"],
            behaviour_logp_M=x["behaviour"],
            proximal_logp_M=None,
            weight_cap=5.0,
        )
    )
    assert "train/ess" not in found
    assert not any(name.startswith(("mismatch/", "staleness/")) for name in found)


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
    assert nothing["train/tokens"] == 0
    assert all(math.isfinite(value) for value in nothing.values())
