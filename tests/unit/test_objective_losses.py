"""Policy losses against float64 formulas written here from the papers, token by token, without torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.objective.policy_loss import LOG_RATIO_BOUND
from slipstream.configs.schema import ActorConfig, CorrectionConfig
from slipstream.configs.schema.paths import sections_of
from tests.tries import tries

BEHAVIOUR = ("m2po", "dppo", "aipo", "topr")
SCHEMA = sections_of(ActorConfig.model_fields["objective"])
TYPES = sorted(set(SCHEMA) - {"plugin"})
"""An objective of the user's has tests of its own (``test_trainer_plugins``)."""


def draw(seed: int, n: int, scale: float = 0.5, dtype: torch.dtype = torch.float32) -> Tokens:
    """Random tokens of up to 3 sequences; the advantage is the same all over a sequence."""
    rng = np.random.default_rng(seed)
    owner = np.sort(rng.integers(0, 3, n))
    logp = -rng.exponential(1.0, n)
    proximal = logp + rng.normal(0, scale, n)
    behaviour = proximal + rng.normal(0, scale, n)
    advantage = rng.choice([-1.5, 0.0, 0.7, 2.0], 3)[owner]
    floats = [torch.tensor(x, dtype=dtype) for x in (logp, behaviour, proximal, advantage)]
    lag = torch.tensor(rng.integers(0, 80, n), dtype=torch.int32)
    return Tokens(*floats, lag, torch.tensor(owner, dtype=torch.int64), 3)


def actor(type_: str, *, decoupled: bool = False, correction: dict | None = None, **settings) -> ActorConfig:
    return ActorConfig.model_validate(
        {
            "objective": {"type": type_, **settings},
            "use_decoupled_loss": decoupled,
            "correction": correction or {},
        }
    )


def with_logp(x: Tokens, logp: torch.Tensor) -> Tokens:
    return Tokens(logp, *(getattr(x, name) for name in list(x.__dataclass_fields__)[1:]))


def numbers(x: Tokens) -> dict[str, np.ndarray]:
    short = {"logp_M": "logp", "behaviour_logp_M": "behaviour", "proximal_logp_M": "proximal"}
    short |= {"advantage_M": "advantage", "lag_M": "lag", "owner_M": "owner"}
    return {name: getattr(x, key).double().numpy() for key, name in short.items()}


# ---- the formulas


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(r: float, a: float, low: float, high: float) -> float:
    return -min(r * a, clip(r, 1 - low, 1 + high) * a)


def frozen(type_: str, x: dict[str, np.ndarray], s: dict) -> dict:
    """What the formula holds fixed while the policy moves: the old policy, masks, stop-gradients."""
    old = x["behaviour" if type_ in BEHAVIOUR else "proximal"]
    moved = x["logp"] - old
    if type_ == "m2po":
        kept = list(np.argsort(moved**2, kind="stable"))
        while kept and np.mean([moved[t] ** 2 for t in kept]) > s["threshold"]:
            kept.pop()
        return {"old": old, "kept": set(kept)}
    if type_ == "dppo":
        d = np.exp(x["logp"]) - np.exp(old)
        drop = np.where(x["advantage"] > 0, d > s["mask_high"], d < -s["mask_low"])
        return {"old": old, "kept": set(np.flatnonzero(~drop))}
    if type_ == "cispo":
        return {"old": old, "weight": np.minimum(np.exp(moved), 1 + s["clip_high"])}
    if type_ == "aipo":
        return {"old": old, "weight": np.minimum(np.exp(moved), s["cap"])}
    if type_ == "topr":
        owners = [x["owner"] == owner for owner in x["owner"]]
        products = np.array([math.exp(min(0.0, math.fsum(moved[mine]))) for mine in owners])
        return {"old": old, "weight": np.where(x["advantage"] < 0, products, 1.0)}
    return {"old": old}


def formula(type_: str, logp: np.ndarray, x: dict[str, np.ndarray], s: dict, fixed: dict) -> np.ndarray:
    """The loss of each token in float64; for GSPO the loss of its sequence."""
    losses = []
    for t, (lp, old, a) in enumerate(zip(logp, fixed["old"], x["advantage"], strict=True)):
        r = math.exp(lp - old)
        if type_ == "ppo":
            loss = surrogate(r, a, s["clip_low"], s["clip_high"])
        elif type_ == "dual_clip":
            loss = surrogate(r, a, s["clip_low"], s["clip_high"])
            if a < 0:
                loss = min(loss, -s["bound"] * a)
        elif type_ == "decayed_clip":
            shrink = max(s["floor"], s["decay"] ** x["lag"][t])
            loss = surrogate(r, a, shrink * s["clip_low"], shrink * s["clip_high"])
        elif type_ == "gspo":
            mine = x["owner"] == x["owner"][t]
            together = math.exp(np.mean(logp[mine] - fixed["old"][mine]))
            loss = surrogate(together, a, s["clip_low"], s["clip_high"])
        elif type_ in ("cispo", "aipo", "topr"):
            loss = -fixed["weight"][t] * a * lp
        elif type_ == "sapo":
            tau = s["tau_positive"] if a > 0 else s["tau_negative"]
            loss = -4 / tau / (1 + math.exp(-tau * (r - 1))) * a
        elif type_ == "reinforce":
            loss = -a * lp
        elif type_ == "m2po":
            loss = -r * a if t in fixed["kept"] else 0.0
        elif type_ == "dppo":
            loss = (-r * a if t in fixed["kept"] else 0.0) + s["kl"] * (lp - old) ** 2
        losses.append(loss)
    return np.array(losses)


SETTINGS = {
    "ppo": [{"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.1}],
    "dual_clip": [{"clip_low": 0.2, "clip_high": 0.2, "bound": 1.3}],
    "decayed_clip": [{"clip_low": 0.5, "clip_high": 0.7, "decay": 0.95, "floor": 0.1}],
    "gspo": [{"clip_low": 0.1, "clip_high": 0.2}, {"clip_low": 3e-4, "clip_high": 4e-4}],
    "cispo": [{"clip_high": 0.3}, {"clip_high": 4.0}],
    "aipo": [{"cap": 1.2}, {"cap": 5.0}],
    "sapo": [{"tau_positive": 1.0, "tau_negative": 1.05}, {"tau_positive": 4.0, "tau_negative": 0.3}],
    "topr": [{}],
    "reinforce": [{}],
    "m2po": [{"threshold": 0.04}, {"threshold": 0.5}],
    "dppo": [
        {"mask_low": 0.2, "mask_high": 0.2, "kl": 1e-3},
        {"mask_low": 0.05, "mask_high": 0.1, "kl": 0.5},
    ],
}
CASES = [(type_, s) for type_, many in SETTINGS.items() for s in many]


@pytest.mark.parametrize(("type_", "s"), CASES)
@tries(10)
@given(st.integers(0, 2**31), st.integers(0, 12), st.sampled_from([0.02, 0.3, 2.0]))
def test_a_loss_is_its_papers_formula(type_, s, seed, n, scale):
    x = draw(seed, n, scale, torch.float64)
    actual = token_losses(actor(type_, **s), x)
    fixed = frozen(type_, numbers(x), s)
    expected = formula(type_, numbers(x)["logp"], numbers(x), s, fixed)
    np.testing.assert_allclose(actual.loss_T, expected, rtol=1e-9, atol=1e-12)
    if type_ in ("m2po", "dppo"):
        assert set(np.flatnonzero(~actual.clipped_T.numpy())) == fixed["kept"]
    if type_ in ("cispo", "aipo"):
        assert (actual.clipped_T.numpy() == (actual.ratio_T.numpy() > fixed["weight"] * (1 + 1e-12))).all()
    single = Tokens(
        *(v.float() if torch.is_tensor(v) and v.is_floating_point() else v for v in vars(x).values())
    )
    if type_ not in ("m2po", "dppo"):  # a mask may tip over by rounding
        np.testing.assert_allclose(
            token_losses(actor(type_, **s), single).loss_T, expected, rtol=2e-4, atol=1e-5
        )


@pytest.mark.parametrize(("type_", "s"), CASES)
@tries(10)
@given(st.integers(0, 2**31), st.integers(1, 8), st.sampled_from([0.05, 0.5]))
def test_the_gradient_of_a_loss_is_that_of_finite_differences(type_, s, seed, n, scale):
    x = draw(seed, n, scale, torch.float64)
    owner = x.owner_M.numpy()
    # GSPO is defined as a mean over tokens; the others have no tokens in common.
    share = 1 / np.bincount(owner, minlength=3)[owner] if type_ == "gspo" else np.ones(n)
    leaf = x.logp_M.clone().requires_grad_()
    (torch.tensor(share) * token_losses(actor(type_, **s), with_logp(x, leaf)).loss_T).sum().backward()
    fixed, step = frozen(type_, numbers(x), s), 1e-7

    def total(logp: np.ndarray) -> float:
        return float((share * formula(type_, logp, numbers(x), s, fixed)).sum())

    for t in range(n):
        points = [x.logp_M.numpy() + sign * step * (np.arange(n) == t) for sign in (1, -1)]
        expected = (total(points[0]) - total(points[1])) / (2 * step)
        assert leaf.grad[t].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("type_", ["ppo", "dual_clip", "decayed_clip", "sapo", "m2po", "dppo"])
def test_autograd_agrees_with_itself_where_nothing_is_held_fixed(type_):
    x = draw(3, 12, 0.4, torch.float64)
    config = actor(type_, **SETTINGS[type_][0])
    leaf = x.logp_M.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logp: token_losses(config, with_logp(x, logp)).loss_T, leaf)


def test_every_type_of_the_schema_has_a_loss_and_every_setting_of_it_is_tested():
    assert set(TYPES) == set(SETTINGS)
    for type_ in TYPES:
        kind = SCHEMA[type_]
        assert set(kind.model_fields) - {"type"} == set(SETTINGS[type_][0])
        assert kind().against_behaviour == (type_ in BEHAVIOUR)
        token_losses(actor(type_), draw(0, 3))


def test_every_sequence_mask_of_the_schema_is_applied():
    for type_ in sections_of(CorrectionConfig.model_fields["sequence"]):
        loss = token_losses(actor("ppo", correction={"sequence": {"type": type_}}), draw(0, 3))
        assert loss.masked["sequence"].shape == (3,)


# ---- edges


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n", [0, 1])
def test_no_token_and_one_token_are_well_defined(type_, n):
    x = draw(0, n)
    leaf = x.logp_M.clone().requires_grad_()
    loss = token_losses(actor(type_), with_logp(x, leaf))
    loss.loss_T.sum().backward()
    assert loss.loss_T.shape == loss.ratio_T.shape == loss.clipped_T.shape == (n,)
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("gap", [0.0, 19.0, 21.0, 100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
def test_no_log_ratio_makes_nan_or_infinity_of_a_loss_or_gradient(type_, gap, advantage):
    for proximal, behaviour in ((-gap, 0.0), (0.0, -gap), (-gap, -2 * gap), (-gap, -gap)):
        leaf = torch.full((2,), -1.0, requires_grad=True)
        others = [torch.tensor([-1.0 + v, -1.0]) for v in (behaviour, proximal)]
        x = Tokens(leaf, *others, torch.full((2,), advantage), torch.tensor([0, 5]), torch.tensor([0, 0]), 1)
        for decoupled in {False, type_ not in (*BEHAVIOUR, "sapo")}:
            for token in ({"type": "raw"}, {"type": "cap"}, {"type": "mask"}):
                correction = {"token": token, "sequence": {"type": "kl"}, "negative": {}}
                for settings_ in ({}, {"token": token}, correction):
                    leaf.grad = None
                    config = actor(type_, decoupled=decoupled, correction=settings_)
                    loss = token_losses(config, x)
                    loss.loss_T.sum().backward()
                    for value in (loss.loss_T, leaf.grad, loss.ratio_T):
                        assert value.isfinite().all(), (config, value)
                    if advantage == 0 and type_ != "dppo":  # DPPO adds a KL penalty
                        assert not loss.loss_T.any()
                        assert not leaf.grad.any()


@given(st.floats(-LOG_RATIO_BOUND + 0.01, LOG_RATIO_BOUND - 0.01), st.sampled_from([-2.0, 0.5]))
@settings(deadline=None)
def test_inside_its_bound_a_log_ratio_is_used_as_it_is(gap, advantage):
    x = Tokens(*(torch.tensor([v]) for v in (gap, 0.0, 0.0, advantage)), torch.zeros(1), torch.tensor([0]), 1)
    expected = surrogate(math.exp(np.float32(gap)), advantage, 0.2, 0.28)
    np.testing.assert_allclose(token_losses(actor("ppo"), x).loss_T, [expected], rtol=1e-5)


@given(st.floats(LOG_RATIO_BOUND, 1e5), st.sampled_from([-1.0, 1.0]))
@settings(deadline=None)
def test_the_bound_never_changes_a_result_that_clipping_decides(gap, sign):
    """Ratios above the range with A > 0, below it with A < 0."""
    gap, advantage = sign * gap, sign * 2.0
    x = Tokens(*(torch.tensor([v]) for v in (gap, 0.0, 0.0, advantage)), torch.zeros(1), torch.tensor([0]), 1)
    loss = token_losses(actor("ppo"), x)
    assert loss.clipped_T.all()
    assert loss.loss_T.item() == pytest.approx(-2.56 if sign > 0 else 1.6)


# ---- what the losses are known for


@pytest.mark.parametrize("type_", ["ppo", "dual_clip", "decayed_clip"])
def test_a_token_is_clipped_exactly_when_it_has_no_gradient(type_):
    x = draw(1, 300)
    leaf = x.logp_M.clone().requires_grad_()
    loss = token_losses(actor(type_), with_logp(x, leaf))
    loss.loss_T.sum().backward()
    learns = x.advantage_M != 0
    assert loss.clipped_T.any()
    assert torch.equal(loss.clipped_T[learns], leaf.grad[learns] == 0)
    assert not loss.clipped_T[~learns].any()


def test_without_lag_the_decayed_clip_is_ppo_and_with_much_lag_a_tenth_of_it():
    x = draw(5, 100)
    fresh = Tokens(**{**vars(x), "lag_M": torch.zeros(100, dtype=torch.int32)})
    old = Tokens(**{**vars(x), "lag_M": torch.full((100,), 1000)})
    assert torch.equal(
        token_losses(actor("decayed_clip"), fresh).loss_T, token_losses(actor("ppo"), x).loss_T
    )
    tenth = token_losses(actor("ppo", clip_low=0.02, clip_high=0.028), x).loss_T
    torch.testing.assert_close(token_losses(actor("decayed_clip"), old).loss_T, tenth)


def test_all_objectives_agree_on_data_of_the_present_policy():
    """pi = pi_old = mu: there every one of them is the policy gradient A grad log pi."""
    x = draw(6, 40)
    for type_ in TYPES:
        leaf = x.logp_M.clone().requires_grad_()
        same = Tokens(
            **{**vars(x), "logp_M": leaf, "behaviour_logp_M": x.logp_M, "proximal_logp_M": x.logp_M}
        )
        loss = token_losses(actor(type_), same)
        loss.loss_T.sum().backward()
        torch.testing.assert_close(leaf.grad, -x.advantage_M, msg=type_)
        assert not loss.clipped_T.any()


@tries(10)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_the_second_moment_is_bounded_over_any_union_of_micro_batches(seed, sizes):
    kept = []
    for i, n in enumerate(sizes):
        x = draw(seed + i, n, 0.4, torch.float64)
        stays = ~token_losses(actor("m2po"), x).clipped_T
        kept.append(((x.logp_M - x.behaviour_logp_M) ** 2)[stays])
    kept = torch.cat(kept)
    assert not len(kept) or kept.mean() <= 0.04


# ---- decoupling


def previous_decoupled_ppo(logp, proximal, behaviour, advantage, clip_low, clip_high, cap):
    """The default objective as it was before there were others, operation by operation."""
    ratio = (logp - proximal).clamp(-20.0, 20.0).exp()
    plain = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    weight = (proximal - behaviour).exp().clamp(max=cap).detach()
    return weight * -torch.minimum(plain, clipped)


@pytest.mark.parametrize("scale", [0.01, 0.5, 30.0])
def test_the_default_is_bit_for_bit_the_decoupled_loss_that_it_was(scale):
    x = draw(7, 1000, scale)
    leaves = [x.logp_M.clone().requires_grad_() for _ in range(2)]
    actual = token_losses(ActorConfig(), with_logp(x, leaves[0])).loss_T
    rest = (x.proximal_logp_M, x.behaviour_logp_M, x.advantage_M)
    expected = previous_decoupled_ppo(leaves[1], *rest, 0.2, 0.28, 5.0)
    assert torch.equal(actual, expected)
    actual.sum().backward()
    expected.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("type_", ["ppo", "dual_clip", "decayed_clip", "gspo", "cispo", "reinforce"])
def test_decoupling_applies_the_capped_weight_once_and_without_gradient(type_):
    x = draw(8, 200, 0.8)
    proximal = x.proximal_logp_M.clone().requires_grad_()
    behaviour = x.behaviour_logp_M.clone().requires_grad_()
    leaf, plain_leaf = (x.logp_M.clone().requires_grad_() for _ in range(2))
    decoupled = actor(type_, decoupled=True, correction={"token": {"type": "cap", "cap": 2.0}})
    held = Tokens(
        **{**vars(x), "logp_M": leaf, "proximal_logp_M": proximal.detach(), "behaviour_logp_M": behaviour}
    )
    loss = token_losses(decoupled, held)
    plain = token_losses(actor(type_), with_logp(x, plain_leaf))
    weight = np.minimum(np.exp((x.proximal_logp_M - x.behaviour_logp_M).double().numpy()), 2.0)
    assert (weight == 2.0).any()
    np.testing.assert_allclose(
        loss.loss_T.detach(), weight * plain.loss_T.detach().numpy(), rtol=1e-5, atol=1e-6
    )
    loss.loss_T.sum().backward()
    plain.loss_T.sum().backward()
    assert behaviour.grad is None
    np.testing.assert_allclose(leaf.grad, weight * plain_leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_without_proximal_log_probs_ratios_are_taken_to_the_behaviour_policy():
    x = draw(9, 50)
    bare = Tokens(**{**vars(x), "proximal_logp_M": None})
    as_old = Tokens(**{**vars(x), "proximal_logp_M": x.behaviour_logp_M})
    for type_ in TYPES:
        assert torch.equal(token_losses(actor(type_), bare).loss_T, token_losses(actor(type_), as_old).loss_T)
    with pytest.raises(ValueError, match=r"set actor.recompute_logprobs or actor.interpolate_logprobs"):
        token_losses(actor("ppo", decoupled=True), bare)
