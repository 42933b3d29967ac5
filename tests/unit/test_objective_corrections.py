"""Weights, masks and the interpolated proximal policy, against loops over tokens and sequences in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.objective import correction as c
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.policy_loss import trajectory_mean, trajectory_sum
from slipstream.configs.schema import ActorConfig
from tests.tries import tries

OWNERS = 4
LOG_RATIOS = st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 100.0, -100.0, 1e4, -1e4]))


@st.composite
def sequences(draw):
    """log-weights and owners, in order; some owners may have no token."""
    owner = sorted(draw(st.lists(st.integers(0, OWNERS - 1), max_size=12)))
    gap = [draw(LOG_RATIOS) for _ in owner]
    return torch.tensor(gap, dtype=torch.float64), torch.tensor(owner, dtype=torch.int64)


def by_sequence(gap: torch.Tensor, owner: torch.Tensor, statistic) -> list[float]:
    """``statistic`` of the list of log-weights of a token's sequence, for each token."""
    return [
        statistic([g for g, o in zip(gap.tolist(), owner.tolist(), strict=True) if o == mine])
        for mine in owner.tolist()
    ]


def exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@tries(27)
@given(sequences(), st.sampled_from([1.0, 2.0, 5.0, None]))
def test_the_importance_weight_is_the_ratio_up_to_its_cap(case, cap):
    gap, _ = case
    actual = c.importance_weight(gap, cap)
    highest = math.exp(20) if cap is None else cap
    np.testing.assert_allclose(actual, [min(exp(g), highest) for g in gap.tolist()], rtol=1e-12)


@tries(27)
@given(sequences())
def test_the_token_mask_drops_what_is_outside_the_band(case):
    gap, _ = case
    actual = c.outside_band(gap, low=0.5, high=1.5)
    assert actual.tolist() == [not 0.5 <= exp(g) <= 1.5 for g in gap.tolist()]
    assert c.outside_band(gap, low=None, high=1.5).tolist() == [exp(g) > 1.5 for g in gap.tolist()]


def test_a_token_mask_without_a_lower_limit_keeps_what_the_policy_no_longer_samples():
    behaviour, proximal = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-9.0, -1.0, -1.0])
    owner, advantage, lag = torch.zeros(3, dtype=torch.long), torch.ones(3), torch.zeros(3)

    def dropped(low) -> list[bool]:
        config = ActorConfig.model_validate({"correction": {"token": {"type": "mask", "low": low}}})
        x = Tokens(proximal, behaviour, proximal, advantage, lag, owner, 1)
        return token_losses(config, x).masked["token"].tolist()

    assert dropped(0.5) == [True, False, True] and dropped(None) == [False, False, True]


def far(value: float, *bounds: float) -> bool:
    """Not so near to a bound that rounding decides."""
    return all(abs(value - bound) > 1e-9 for bound in bounds)


@tries(27)
@given(sequences())
def test_sequence_masks_drop_whole_sequences_by_their_own_statistic(case):
    gap, owner = case

    def divergence(x: list[float]) -> float:
        return float(np.mean([math.expm1(min(g, 20.0)) - g for g in x]))

    cases = [
        (c.geometric_outside_band, {"low": 0.9, "high": 1.2}, lambda x: exp(float(np.mean(x)))),
        (c.product_outside_band, {"low": 0.5, "high": 2.0}, lambda x: exp(math.fsum(x))),
        (c.divergence_above, {"maximum": 0.05}, divergence),
    ]
    for mask, bounds, statistic in cases:
        actual = mask(gap, owner, OWNERS, **bounds)
        low, high = bounds.get("low", -math.inf), bounds.get("high", bounds.get("maximum"))
        for dropped, value in zip(actual.tolist(), by_sequence(gap, owner, statistic), strict=True):
            assert dropped == (not low <= value <= high) or not far(value, low, high)


@tries(27)
@given(sequences(), st.data())
def test_only_sequences_of_negative_advantage_that_the_policy_has_left_are_dropped(case, data):
    """DeepSeek-V3.2, eq. 9, with mu for its pi_old: sampling probabilities of the engine."""
    gap, owner = case
    of_owner = torch.tensor(data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=4, max_size=4)))
    logp = torch.full_like(gap, -1.0)
    actual = c.left_negative(
        logp, logp + gap, of_owner[owner], owner, OWNERS, delta=0.1, errors=None, mismatch=None
    )
    means = by_sequence(gap, owner, lambda x: float(np.mean(x)))
    for dropped, mean, a in zip(actual.tolist(), means, of_owner[owner].tolist(), strict=True):
        assert dropped == (mean > 0.1 and a < 0) or not far(mean, 0.1)


def test_few_fresh_failures_are_dropped_however_large_the_mismatch_is():
    """log(mu / pi) of an engine that rounds has the mean v / 2 and the variance v under mu."""
    rng = np.random.default_rng(0)
    for deviation in (0.003, 0.02, 0.08):
        for tokens in (20, 300):
            sequences = 2000
            gap = rng.normal(deviation**2 / 2, deviation, sequences * tokens).astype(np.float32)
            owner = torch.arange(sequences).repeat_interleave(tokens)
            gap, negative = torch.from_numpy(gap), -torch.ones(sequences * tokens)

            def share(errors, v, gap=gap, owner=owner, negative=negative, sequences=sequences) -> float:
                zero = torch.zeros_like(gap)
                dropped = c.left_negative(
                    zero, gap, negative, owner, sequences, delta=1e-4, errors=errors, mismatch=v
                )
                return dropped.float().mean().item()

            assert share(2.0, deviation**2) < 0.04  # 0.023 of a normal distribution
            assert share(None, deviation**2) > 0.2
            assert share(2.0, None) == 0
            left = gap + 4 * deviation / np.sqrt(tokens) + 2e-4
            assert share(2.0, deviation**2, gap=left) > 0.9


def test_the_negative_mask_compares_the_current_policy_with_the_behaviour_policy_not_the_proximal_one():
    owner, advantage = torch.zeros(2, dtype=torch.long), torch.tensor([-1.0, -1.0])
    here, far_away = torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, -3.0])
    config = ActorConfig.model_validate({"correction": {"negative": {"delta": 0.1, "errors": None}}})

    def dropped(logp, proximal, behaviour) -> bool:
        x = Tokens(logp, behaviour, proximal, advantage, torch.zeros(2), owner, 1)
        return token_losses(config, x).masked["negative"].all().item()

    assert dropped(logp=far_away, proximal=far_away, behaviour=here)  # stale: left before this step
    assert dropped(logp=far_away, proximal=here, behaviour=here)  # left in this step
    assert not dropped(logp=here, proximal=far_away, behaviour=here)
    assert not dropped(logp=here, proximal=here, behaviour=far_away)


def test_sums_of_sequences_are_at_their_tokens_and_precise_over_long_ones():
    owner = torch.tensor([0] * 100_000 + [2] * 3)
    value = torch.full((100_003,), 0.1)
    assert trajectory_mean(value, owner, 3).unique().item() == np.float32(0.1)
    assert trajectory_sum(value, owner, 3)[0].item() == pytest.approx(100_000 * float(np.float32(0.1)))
    assert trajectory_mean(value[:0], owner[:0], 3).shape == (0,)


def test_corrections_combine_and_dropped_tokens_have_neither_loss_nor_gradient():
    torch.manual_seed(0)
    n = 200
    leaf = (-torch.rand(n)).requires_grad_()
    behaviour = leaf.detach() + 0.3 * torch.randn(n)
    proximal, owner = leaf.detach() + 0.1 * torch.randn(n), torch.arange(n) // 20
    x = Tokens(leaf, behaviour, proximal, (torch.randn(10)[owner]), torch.zeros(n), owner, 10)
    parts = {
        "token": {"type": "mask", "low": 0.7, "high": 1.4},
        "sequence": {"type": "geometric", "low": 0.97, "high": 1.03},
        "negative": {"delta": 0.01, "errors": None},
    }
    config = ActorConfig.model_validate({"correction": parts})
    loss = token_losses(config, x)
    assert set(loss.masked) == set(parts)
    anywhere = torch.stack(list(loss.masked.values())).any(0)
    for reason, dropped in loss.masked.items():
        others = torch.stack([d for name, d in loss.masked.items() if name != reason]).any(0)
        assert (dropped & ~others).any(), f"{reason} drops nothing of its own"
    loss.loss_T.sum().backward()
    assert (loss.loss_T[anywhere] == 0).all()
    assert (leaf.grad[anywhere] == 0).all()
    raw = ActorConfig.model_validate({"correction": {"token": {"type": "raw"}}})
    assert torch.equal(loss.loss_T[~anywhere], token_losses(raw, x).loss_T[~anywhere])


def test_everything_may_be_dropped():
    x = Tokens(*(torch.tensor([v], requires_grad=not i) for i, v in enumerate((-1.0, -9.0, -1.0, 1.0))),
               torch.zeros(1), torch.zeros(1, dtype=torch.long), 1)  # fmt: skip
    config = ActorConfig.model_validate({"correction": {"sequence": {"type": "product"}}})
    loss = token_losses(config, x)
    loss.loss_T.sum().backward()
    assert loss.loss_T.item() == x.logp_M.grad.item() == 0.0


# ---- interpolation


@tries(20)
@given(st.floats(-30, 0), st.floats(-30, 0), st.integers(-1, 1000))
def test_the_interpolated_policy_follows_the_versions(logp, behaviour, lag):
    """a = (v_old - v_mu) / (v_pi - v_mu) in [0, 1], with v_pi the version that the step makes."""
    v_old = 2000
    v_mu, v_pi = v_old - lag, v_old + 1
    a = min(max((v_old - v_mu) / (v_pi - v_mu), 0.0), 1.0) if v_pi != v_mu else 0.0
    leaf = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    actual = c.interpolated_logp(leaf, torch.tensor([behaviour], dtype=torch.float64), torch.tensor([lag]))
    assert not actual.requires_grad
    assert actual.item() == pytest.approx(behaviour + a * (logp - behaviour))


def test_interpolated_fresh_tokens_are_their_own_proximal_policy():
    logp, behaviour = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5])
    assert torch.equal(c.interpolated_logp(logp, behaviour, torch.zeros(2, dtype=torch.int32)), behaviour)
