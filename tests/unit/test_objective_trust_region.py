"""What the rules accept for stale data keeps the update near the policy that sampled it."""

import itertools
import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from slipstream.backend.objective.correction import interpolated_logp
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.configs.rules import objective
from slipstream.configs.schema import RunConfig

TYPES = (
    "ppo",
    "dual_clip",
    "decayed_clip",
    "gspo",
    "cispo",
    "sapo",
    "m2po",
    "dppo",
    "aipo",
    "topr",
    "reinforce",
)
PROXIMAL = {"recomputed": (True, False), "interpolated": (False, True), "none": (False, False)}
TOKEN = (None, {"type": "cap"}, {"type": "mask"}, {"type": "raw"})
SEQUENCE = (None, {"type": "geometric"}, {"type": "kl"})
LIKELY = math.log(0.9)
FAR = 8.0
"""A token that the policy samples e^8 times as often, or as seldom, as the policy that sampled it."""
LAG = 4
CAP = 5.0
"""Largest importance weight of a token by default, and largest ratio of cispo and aipo."""


def config_of(type_: str, decoupled: bool, proximal: str, token, sequence, minibatches: int) -> RunConfig:
    recompute, interpolate = PROXIMAL[proximal]
    return RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "actor": {
                "objective": {"type": type_},
                "use_decoupled_loss": decoupled,
                "recompute_logprobs": recompute,
                "interpolate_logprobs": interpolate,
                "correction": {"token": token, "sequence": sequence},
                "minibatches": minibatches,
            },
            "rollout": {
                "max_head_offpolicyness": LAG,
                "batch_size": 4,
                "n_samples_per_prompt": 2,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )


@cache
def recipes() -> list[tuple[str, RunConfig, bool]]:
    """Return every combination of settings: its name, the recipe, and whether the rules accept it."""
    combinations = []
    for settings in itertools.product(TYPES, (True, False), PROXIMAL, TOKEN, SEQUENCE, (1, 2)):
        config = config_of(*settings)
        accepted = not any(violation for rule in objective.RULES for violation in rule.check(config))
        combinations.append((str(settings), config, accepted))
    return combinations


def accepted() -> Iterator[tuple[str, RunConfig]]:
    return ((name, config) for name, config, is_accepted in recipes() if is_accepted)


def push(config: RunConfig, gap: float, advantage: float) -> float:
    """Return how strongly the first update of a step moves a token's log-prob in the direction of its
    advantage: 1 for plain policy gradient with an advantage of 1. gap: log(pi / mu) of the whole trajectory.
    """
    logp_M = torch.full((4,), LIKELY - max(0.0, -gap), requires_grad=True)
    behaviour_M, lag_M = (logp_M - gap).detach(), torch.full((4,), LAG if gap else 0)
    proximal_M = logp_M.detach() if config.actor.recompute_logprobs else None
    if config.actor.interpolate_logprobs:
        proximal_M = interpolated_logp(logp_M, behaviour_M, lag_M)
    tokens = Tokens(
        logp_M, behaviour_M, proximal_M, torch.full((4,), advantage), lag_M, torch.zeros(4).long(), 1
    )
    loss_M = token_losses(config.actor, tokens).loss_T
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), logp_M, allow_unused=True)
    return 0.0 if gradient_M is None else -gradient_M[0].item() * advantage


def test_no_accepted_recipe_pushes_a_token_far_away_from_the_policy_that_sampled_it():
    """The token is more likely by now and has a positive advantage, or less likely and a negative one."""
    strongest = {name: max(push(config, FAR, 1.0), push(config, -FAR, -1.0)) for name, config in accepted()}
    assert len(strongest) > 100
    # An interpolated proximal policy lies between the two, so that cispo caps both steps of the way.
    largest = {name: CAP**2 if "cispo" in name and "interpolated" in name else CAP for name in strongest}
    assert not {name: s for name, s in strongest.items() if s > largest[name] * 1.001}


def test_every_accepted_recipe_tells_stale_tokens_from_fresh_ones():
    """A loss that does not compare with the behaviour policy takes the oldest token for a fresh one."""
    blind = [
        name
        for name, config in accepted()
        if all(
            push(config, gap, advantage) == pytest.approx(push(config, 0.0, advantage))
            for gap, advantage in ((FAR, 1.0), (-FAR, -1.0), (FAR, -1.0), (-FAR, 1.0))
        )
    ]
    assert not blind


def test_a_raw_importance_weight_is_as_dangerous_as_its_refusal_says():
    raw = config_of("ppo", True, "recomputed", {"type": "raw"}, None, 1)
    assert push(raw, FAR, 1.0) == pytest.approx(math.exp(FAR), rel=1e-4)  # 2,981


def test_the_default_recipe_is_accepted_and_bounded():
    default = RunConfig.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": "unused"},
            "data": {"path": "unused.jsonl"},
            "rollout": {
                "max_head_offpolicyness": LAG,
                "batch_size": 4,
                "n_samples_per_prompt": 2,
                "reward": "slipstream.rollout.reward.FinalAnswer",
            },
        }
    )
    assert default.actor.minibatches == 1
    assert not [violation for rule in objective.RULES for violation in rule.check(default)]
    assert push(default, FAR, 1.0) == pytest.approx(CAP)
