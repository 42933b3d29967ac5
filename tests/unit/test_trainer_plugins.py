"""Code of a user's on trainer ranks: what it computes is used, and what it must not return is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from examples.advantage.brevity import Brevity
from examples.data_source.sums import Sums
from examples.filter.spread import Spread
from examples.metrics.diversity import Diversity
from examples.penalty.huber import Huber
from examples.reward.closeness import Closeness
from examples.transform.shaping import BoundRewards, DropRepeated
from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.objective.losses import Tokens, token_losses
from slipstream.backend.trainer.minibatches import first_recomputed
from slipstream.backend.trainer.prepared import Scores
from slipstream.backend.trainer.targets import find_targets
from slipstream.rollout.tokens.trajectory import Group, Prompt
from tests.unit.test_objective_losses import draw, with_logp
from tests.wrong_inputs import failing_plugins
from tests.wrong_inputs.failing_plugins import batch, config_of, let_fail, plugins_of, problems_of, sampled

CLIPPED = {"type": "plugin", "path": "examples.objective.clipped.Clipped", "args": {"clip_high": 0.3}}
PPO = {"type": "ppo", "clip_high": 0.3}


def losses(objective: dict, x: Tokens, **actor):
    """Return loss, ratio, clipped tokens and the gradient, under the recipe's decoupling and corrections."""
    config = config_of({"objective": objective, **actor})
    plugins = plugins_of({"objective": objective, **actor})
    logp_M = x.logp_M.clone().requires_grad_()
    loss = token_losses(config.actor, with_logp(x, logp_M), own=plugins.objective)
    loss.loss_T.sum().backward()
    return loss.loss_T.detach(), loss.ratio_T, loss.clipped_T, logp_M.grad


@pytest.mark.parametrize(
    "actor",
    [
        {},
        {"use_decoupled_loss": False},
        {"correction": {"token": {"type": "mask", "low": 0.7, "high": 1.4}}},
        {"correction": {"sequence": {"type": "geometric", "low": 0.9, "high": 1.1}, "negative": {}}},
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_ppo_written_by_a_user_is_ours_bit_for_bit(seed, actor):
    x = draw(seed, 64)
    for own, ours in zip(losses(CLIPPED, x, **actor), losses(PPO, x, **actor), strict=True):
        assert own.dtype == ours.dtype
        assert torch.equal(own, ours)


def test_micro_batches_change_nothing():
    x = draw(3, 60)
    parts = [x.owner_M == owner for owner in range(3)]

    def part(member_M: torch.Tensor) -> Tokens:
        values = {name: value[member_M] for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
        return replace(x, **values)

    whole = losses(CLIPPED, x)
    for number, value in enumerate(whole):
        split = torch.cat([losses(CLIPPED, part(member_M))[number] for member_M in parts])
        assert torch.equal(split, value)


def test_an_objective_may_return_a_tensor_alone():
    class Plain:
        def loss(self, tokens, old_logp_M):
            return -tokens.advantage_M * tokens.logp_M

    plugins = plugins_of({"objective": CLIPPED})
    plugins.objective._plugin.object = Plain()
    x = with_logp(draw(0, 8), draw(0, 8).logp_M.requires_grad_())
    loss = plugins.objective(x, x.proximal_logp_M)
    assert torch.equal(loss.loss_T, -x.advantage_M * x.logp_M)
    assert torch.allclose(loss.ratio_T, (x.logp_M - x.proximal_logp_M).exp().detach())
    assert not loss.clipped_T.any()


@pytest.mark.parametrize("case", failing_plugins.CASES, ids=lambda case: case.name)
def test_what_a_plug_in_must_not_return_is_named_with_its_file_and_line(case):
    message = let_fail(case)
    assert not problems_of(case, message), message


def test_numbers_that_are_not_finite_already_are_no_fault_of_the_objective():
    plugins = plugins_of({"objective": CLIPPED})
    x = draw(0, 8)
    x = with_logp(replace(x, advantage_M=x.advantage_M * torch.nan), x.logp_M.requires_grad_())
    assert plugins.objective(x, x.proximal_logp_M).loss_T.isnan().all()


# ---- advantages


def test_a_term_is_weighted_and_added_to_the_others():
    term = {"type": "plugin", "path": "examples.advantage.brevity.Brevity", "weight": 0.5}
    settings = {"advantage": [{"type": "reward", "estimator": "reward"}, term]}
    actor, plugins = config_of(settings).actor, plugins_of(settings)
    lengths = TrainBatch(
        0, (sampled(1.0, 2), sampled(1.0, 6), sampled(0.0, 1), sampled(1.0, 3)), np.array([0, 0, 0, 1])
    )
    micro = assemble(lengths, [0, 1, 2, 3])
    scores = Scores(None, None, None, None)
    [target] = find_targets(actor, None, lengths, [micro], [scores], None, plugins)
    # Mean length of good ones: 4. The last is alone in its group.
    assert target.advantage_M.tolist() == [1.25] * 2 + [0.75] * 6 + [0.0] + [1.0] * 3
    assert target.measured["plugin_mean"].tolist() == [0.25] * 2 + [-0.25] * 6 + [0.0] * 4
    assert (Brevity().advantage(lengths, micro, scores) == 2 * target.measured["plugin_mean"].numpy()).all()


def test_a_term_gets_proximal_log_probs_of_every_mini_batch_if_it_asks_for_them():
    term = {"type": "plugin", "path": "examples.advantage.brevity.Brevity"}
    assert first_recomputed(config_of({"advantage": [term]}).actor, None) == 1
    assert first_recomputed(config_of({"advantage": [{**term, "needs_logprobs": True}]}).actor, None) == 0


# ---- penalties


def test_a_penalty_written_by_a_user_takes_the_place_of_the_estimate():
    from slipstream.backend.objective import kl

    logp_M, reference_M, behaviour_M = torch.tensor([[-1.0, -2.0], [-1.5, -5.0], [-1.1, -2.0]])
    penalty = plugins_of({"kl": {"penalty": "examples.penalty.huber.Huber"}}).penalty
    expected_M = torch.tensor([0.125, 2.5]) * (logp_M - behaviour_M).exp()
    assert torch.allclose(kl.in_loss(logp_M, reference_M, behaviour_M, penalty), expected_M)
    assert torch.equal(Huber(1.0).estimate(logp_M, reference_M), penalty(logp_M, reference_M))


# ---- transforms


def test_rewards_are_bounded_and_repeated_responses_are_dropped():
    rewarded = BoundRewards(0.0, 0.75).transform(batch())
    assert [each.reward for each in rewarded.trajectories] == [0.75, 0.0, 0.75, 0.5]
    dropped = DropRepeated(at_least=1).transform(batch())
    assert (len(dropped.trajectories), dropped.group_N.tolist()) == (2, [0, 1])
    assert [each.reward for each in dropped.trajectories] == [1.0, 1.0]
    assert len(DropRepeated(at_least=3).transform(batch()).trajectories) == 3


def test_transforms_are_applied_in_their_order():
    path = "examples.transform.shaping"
    transforms = [{"path": f"{path}.DropRepeated", "args": {"at_least": 1}}, f"{path}.BoundRewards"]
    made = plugins_of({"transforms": transforms}).transformed(batch())
    assert len(made.trajectories) == 2


def test_keeping_moves_places_and_numbers_episodes_anew():
    whole = replace(
        batch(),
        siblings_N=np.array([0, 0, 1, 2]),
        turn_advantages={3: (0.5,)},
        given_rewards=(1.0, 2.0, 3.0, 4.0),
    )
    kept = whole.keeping([1, 3])
    assert kept.episode_N.tolist() == [0, 1]
    assert kept.turn_advantages == {1: (0.5,)}
    assert kept.given_rewards == (2.0, 4.0)
    assert kept.group_N.tolist() == [0, 1]


# ---- metrics, sources, filters, rewards


def test_metrics_of_a_batch_are_named_behind_their_prefix():
    plugins = plugins_of({"metrics": ["examples.metrics.diversity.Diversity"]})
    assert plugins.measured(batch(), {}) == {"batch/distinct_fraction": 0.0, "batch/good_length": 3.0}
    assert Diversity().metrics(batch().keeping([0, 2]), {})["distinct_fraction"] == 1.0


def test_the_prompts_of_the_example_depend_on_their_position_alone():
    source = Sums(seed=3, operands=5)
    assert source.prompts(0, 10)[4:7] == Sums(seed=3, operands=5).prompts(4, 3)
    row = source.prompts(7, 1)[0]
    assert row["label"] == str(sum(map(int, row["prompt"][1::2])) % 10)


def test_the_examples_of_a_reward_and_a_filter_do_what_they_say():
    assert Closeness().score(Prompt(0, "2+2", "4"), "it is 3", sampled(0.0)) == {
        "reward": 0.5,
        "has_number": 1.0,
    }
    group = Group(0, Prompt(0, "?"), 0, (sampled(1.0), sampled(0.0)))
    assert Spread().keep(group)
    assert not Spread().keep(replace(group, trajectories=group.trajectories[:1]))
