"""Advantages, penalties, KL estimates and averages against numpy, and against exact expectations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.objective import advantage as adv
from slipstream.backend.objective import kl
from slipstream.backend.objective.averaging import mean_scale, token_shares
from slipstream.configs.schema.advantage import RewardTerm
from tests.tries import tries

REWARDS = st.sampled_from([0.0, 0.1, 1.0, -2.5, 7.0])


@st.composite
def groups(draw):
    """Rewards, groups and numbers of tokens of up to 5 groups, shuffled."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    group = np.repeat(draw(st.permutations(range(7, 7 + len(sizes)))), sizes)
    reward = np.array([draw(REWARDS) for _ in group], np.float32)
    tokens = np.array([draw(st.integers(1, 50)) for _ in group])
    order = np.array(draw(st.permutations(range(len(group)))))
    return reward[order], group[order], tokens[order]


def expected_advantages(name: str, reward, group, tokens) -> np.ndarray:
    reward = reward.astype(np.float64)
    advantage = np.zeros(len(reward))
    for i, group_number in enumerate(group):
        mine = reward[group == group_number]
        others = np.delete(reward, i)[np.delete(group, i) == group_number]
        if name == "grpo":
            advantage[i] = (reward[i] - mine.mean()) / ((mine.std(ddof=1) if len(mine) > 1 else 0.0) + 1e-6)
        elif name in ("dr_grpo", "reinforce_pp_baseline"):
            advantage[i] = reward[i] - mine.mean()
        elif name == "rloo":
            advantage[i] = reward[i] - others.mean() if len(others) else 0.0
        else:
            advantage[i] = reward[i]
    if name.startswith("reinforce_pp"):
        every = np.repeat(advantage, tokens)  # one value per token of the batch
        advantage = (advantage - every.mean()) / (every.std() + 1e-8)
    return advantage


@pytest.mark.parametrize("name", sorted(adv.ADVANTAGES))
@tries(20)
@given(groups())
def test_advantages_are_numpys_whatever_the_order_of_the_groups(name, case):
    reward, group, tokens = case
    actual = adv.ADVANTAGES[name](*map(torch.tensor, (reward, group, tokens))).numpy()
    assert actual.dtype == np.float32
    expected = expected_advantages(name, reward, group, tokens)
    if name.startswith("reinforce_pp") and np.ptp(expected) < 1e-3:
        # Only rounding is left of it, and that divided by rounding.
        assert np.abs(actual).max() <= 1.0 + 1e-6
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(adv.ADVANTAGES.keys() - {"reward"}))
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e6])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_equal_rewards_have_advantage_zero(name, reward, n):
    group, tokens = torch.zeros(n, dtype=torch.long), torch.arange(1, n + 1)
    assert adv.ADVANTAGES[name](torch.full((n,), reward), group, tokens).tolist() == [0.0] * n


def test_the_registry_holds_the_advantages_of_the_schema():
    names = RewardTerm.model_fields["estimator"].annotation
    assert {*adv.ADVANTAGES, "gae"} == set(names.__args__)


@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 200), st.floats(0.1, 5))
def test_the_overlong_penalty_is_that_of_dapo_with_its_sign_turned(length, start, buffer, penalty):
    limit = start + buffer
    if length <= limit - buffer:
        punished = 0.0
    elif length <= limit:
        punished = ((limit - buffer) - length) / buffer
    else:
        punished = -1.0
    actual = adv.overlong_penalty(torch.tensor([length]), start=start, end=limit, penalty=penalty)
    assert actual.item() == pytest.approx(-penalty * punished, rel=1e-6)


# ---- tokens


@tries(20)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 9), max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_differences_within_each_sequence(seed, lengths, discount, decay):
    rng = np.random.default_rng(seed)
    rewards, values, expected = [], [], []
    for n in lengths:
        reward, value = rng.normal(size=(2, n))
        following = np.append(value, 0.0)
        delta = [reward[t] + discount * following[t + 1] - value[t] for t in range(n)]
        expected += [sum((discount * decay) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        rewards += reward.tolist()
        values += value.tolist()
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    reward, value = (torch.tensor(x, dtype=torch.float64) for x in (rewards, values))
    actual = adv.generalized_advantage(reward, value, owner, discount=discount, decay=decay)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


def test_gae_without_discount_is_the_return_minus_the_value():
    reward, value = torch.tensor([0.0, 0.0, 3.0]), torch.tensor([0.5, 1.0, 2.0])
    owner = torch.zeros(3, dtype=torch.long)
    for decay, expected in ((1.0, [2.5, 2.0, 1.0]), (0.0, [0.5, 1.0, 1.0])):
        advantage = adv.generalized_advantage(reward, value, owner, discount=1.0, decay=decay)
        assert advantage.tolist() == expected


@tries(13)
@given(st.lists(st.floats(-2, 2), max_size=5), st.floats(0, 1), st.data())
def test_a_token_gets_the_rewards_from_its_turn_on(reward, discount, data):
    turn = data.draw(st.lists(st.integers(-1, len(reward) - 1), max_size=10))
    actual = adv.rewards_to_go(
        torch.tensor(reward, dtype=torch.float64), torch.tensor(turn, dtype=torch.long), discount=discount
    )
    for value, k in zip(actual.tolist(), turn, strict=True):
        ahead = sum(discount ** (j - k) * reward[j] for j in range(k, len(reward))) if k >= 0 else 0.0
        assert value == pytest.approx(ahead, abs=1e-9)


def test_the_teachers_gap_sums_to_minus_the_divergence_from_it():
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    gap = adv.teacher_gap(teacher, policy.requires_grad_())
    assert not gap.requires_grad
    divergence = (policy.exp() * (policy - teacher)).sum()
    assert (policy.exp() * gap).sum().item() == pytest.approx(-divergence.item())


def test_a_scalar_reward_and_a_token_level_gap_add_up():
    actual = adv.weighted_sum([(1.0, torch.tensor([2.0])), (0.5, torch.tensor([1.0, -1.0, 0.0]))])
    assert actual.tolist() == [2.5, 1.5, 2.0]


# ---- KL


def distributions(seed: int) -> list[torch.Tensor]:
    """Logits of pi, ref and mu over 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(3, 6, generator=generator, dtype=torch.float64))


def exact_kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(-1)
    return (logp.exp() * (logp - reference.log_softmax(-1))).sum()


@tries(10)
@given(st.integers(0, 2**31), st.sampled_from(["k1", "k2", "k3"]))
def test_in_the_loss_value_and_gradient_are_those_of_the_divergence_in_expectation(seed, estimator):
    """The expectation over mu is written out, so that there is no sampling noise."""
    policy, reference, behaviour = distributions(seed)
    policy.requires_grad_()
    mu = behaviour.log_softmax(-1)
    logp = policy.log_softmax(-1)
    mean = (mu.exp() * kl.in_loss(logp, reference.log_softmax(-1), mu, estimator)).sum()
    (actual,) = torch.autograd.grad(mean, policy)
    expected = exact_kl(policy, reference)
    (gradient,) = torch.autograd.grad(expected, policy)
    if estimator != "k2":
        assert mean.item() == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(actual, gradient)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_the_naive_estimate_has_the_right_mean_but_for_k2(estimator, unbiased):
    policy, reference, _ = distributions(1)
    logp, ref = policy.log_softmax(-1), reference.log_softmax(-1)
    mean = (logp.exp() * kl.estimate(logp, ref, estimator)).sum().item()
    assert (mean == pytest.approx(exact_kl(policy, reference).item())) is unbiased
    x = (logp - ref).numpy()
    formula = {"k1": x, "k2": x**2 / 2, "k3": np.exp(-x) - 1 + x}[estimator]
    np.testing.assert_allclose(kl.estimate(logp, ref, estimator), formula, rtol=1e-9, atol=1e-12)


def test_the_naive_gradients_are_wrong_in_the_ways_that_the_docs_say():
    policy, reference, _ = distributions(2)
    policy.requires_grad_()
    ref = reference.log_softmax(-1)
    (right,) = torch.autograd.grad(exact_kl(policy, reference), policy)
    naive = {}
    for estimator in ("k1", "k2", "k3"):
        logp = policy.log_softmax(-1)
        mean = (logp.detach().exp() * kl.estimate(logp, ref, estimator)).sum()
        (naive[estimator],) = torch.autograd.grad(mean, policy)
    torch.testing.assert_close(naive["k1"], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(naive["k2"], right)
    assert not torch.allclose(naive["k3"], right, rtol=0.05)


def test_k1_in_the_reward_has_the_divergences_gradient_through_the_policy_gradient():
    policy, reference, _ = distributions(3)
    policy.requires_grad_()
    logp, ref = policy.log_softmax(-1), reference.log_softmax(-1)
    shaped = -0.5 * kl.estimate(logp.detach(), ref, "k1")
    (actual,) = torch.autograd.grad((logp.detach().exp() * shaped * logp).sum(), policy)
    (right,) = torch.autograd.grad(-0.5 * exact_kl(policy, reference), policy)
    torch.testing.assert_close(actual, right)


@pytest.mark.parametrize("gap", [0.0, 100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_extreme_ratios_leave_every_estimate_finite(gap, estimator):
    for reference, behaviour in ((gap, 0.0), (0.0, gap), (gap, gap), (gap, -gap)):
        leaf = torch.zeros(1, requires_grad=True)
        actual = kl.estimate(leaf, torch.tensor([reference]), estimator)
        if estimator != "k2":
            actual = actual + kl.in_loss(
                leaf, torch.tensor([reference]), torch.tensor([behaviour]), estimator
            )
        actual.sum().backward()
        assert actual.isfinite().all()
        assert leaf.grad.isfinite().all()


# ---- averaging


def mean_of_means(losses, units) -> float:
    """The mean over units of the mean over all of their tokens; units without tokens do not count."""
    by_unit = [
        np.concatenate([loss for loss, unit in zip(losses, units, strict=True) if unit == number])
        for number in set(units)
    ]
    return np.mean([loss.mean() for loss in by_unit if len(loss)])


@tries(27)
@given(
    groups(),
    st.integers(0, 2**31),
    st.sampled_from(["token", "sequence", "prompt", "constant"]),
    st.booleans(),
)
def test_shares_make_of_a_token_mean_the_mean_that_is_asked_for(case, seed, averaging, some_are_empty):
    _, group, tokens = case
    if some_are_empty:
        tokens = np.where(np.arange(len(tokens)) % 3 == 1, 0, tokens)
    rng = np.random.default_rng(seed)
    episode = np.cumsum(rng.random(len(tokens)) < 0.7)
    loss = [rng.normal(size=n) for n in tokens]
    if averaging == "token":
        expected = np.concatenate(loss).mean()
    elif averaging == "sequence":
        expected = mean_of_means(loss, episode)
    elif averaging == "constant":
        sums = [sum(x.sum() for x, e in zip(loss, episode, strict=True) if e == n) for n in set(episode)]
        expected = np.mean([total / 37 for total in sums])
    else:
        expected = mean_of_means(loss, group)
    share = token_shares(averaging, tokens, group, episode, length=37)
    assert share.dtype == np.float32
    summed = sum(float(s) * loss_T.sum() for s, loss_T in zip(share, loss, strict=True))
    assert summed / tokens.sum() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("averaging", ["token", "sequence", "prompt", "constant"])
def test_a_mini_batch_without_tokens_has_shares(averaging):
    share = token_shares(averaging, np.zeros(3, np.int64), np.array([1, 1, 2]), np.arange(3), length=5)
    assert np.isfinite(share).all()


@tries(13)
@given(groups(), st.integers(0, 2**31), st.sampled_from(["sequence", "prompt", "constant"]))
def test_the_scale_takes_a_sum_over_units_to_the_sum_of_token_losses(case, seed, averaging):
    _, group, tokens = case
    episode = np.cumsum(np.random.default_rng(seed).random(len(tokens)) < 0.7)
    units = len(set(group if averaging == "prompt" else episode))
    assert mean_scale(averaging, tokens, group, episode) == pytest.approx(tokens.sum() / units)


def test_a_sum_over_tokens_needs_a_length_to_divide_by():
    with pytest.raises(ValueError, match="length of at least 1, and the length is None"):
        token_shares("constant", np.ones(1, np.int64), np.zeros(1), np.zeros(1))
