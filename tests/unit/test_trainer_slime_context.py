"""Hooks under context parallelism: ranks that share trajectories find the loss of one rank."""

from typing import Any

import numpy as np
import pytest
import torch

from slipstream.backend.batch.context_parallel import share_of
from slipstream.backend.batch.micro_batch import MicroBatch, assemble
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.objective.losses import Tokens
from slipstream.backend.objective.policy_loss import PolicyLoss
from slipstream.configs.schema import ParallelConfig
from tests.ranks import run_ranks
from tests.unit.test_trainer_slime_hooks import HOOKS, batch

SIZE = 2


def micro_batch(size: int = SIZE) -> MicroBatch:
    multiple = ParallelConfig(context=size).trajectory_multiple
    return assemble(batch(0, 6), [3, 0, 4, 5], multiple, trajectory_multiple=multiple)


def hooked(rank: RankSpec, size: int) -> dict[str, Any]:
    """Return what the hooks make of a micro-batch of which ``size`` ranks share every trajectory."""
    from slipstream.backend.megatron.parallel import initialize
    from slipstream.rollout.compat.slime import make_slime_importable
    from slipstream.rollout.compat.slime.arguments import SlimeArguments
    from slipstream.rollout.system.plugins import resolve

    initialize(rank, ParallelConfig(context=size), seed=0, timeout_s=60)
    make_slime_importable()
    from slime.backends.megatron_utils.loss import _chosen

    from slipstream.backend.megatron.groups import groups
    from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets
    from slipstream.backend.trainer.slime.named import NamedHook
    from slipstream.backend.trainer.slime.samples import ContextPlace, Samples
    from slipstream.backend.trainer.slime.step_hooks import HookedLoss, StepData, StepFunctions

    micro = micro_batch(size)
    group = groups.get_context_parallel_group() if size > 1 else None
    place = ContextPlace(size, groups.get_context_parallel_rank(), group)
    samples = Samples(batch(0, 6), micro, place, torch.device("cpu"))
    weigh = NamedHook("custom_tis_function", "of_two_ranks", resolve(f"{HOOKS}.of_two_ranks"))
    reduce = NamedHook("custom_pg_loss_reducer_function", "mean", resolve(f"{HOOKS}.mean_of_units"))
    count = len(micro.index_M)
    generator = torch.Generator().manual_seed(5)
    logp_M = (-torch.rand(count, generator=generator)).requires_grad_()
    advantage_M = torch.randn(count, generator=generator)
    tokens = Tokens(
        logp_M,
        torch.from_numpy(micro.behaviour_logp_M),
        torch.from_numpy(micro.behaviour_logp_M) - 0.1,
        advantage_M,
        torch.zeros(count, dtype=torch.int32),
        torch.from_numpy(micro.owner_M),
        micro.owners,
    )
    args = SlimeArguments(rewards_normalization=False)
    item = PreparedMicroBatch(micro, Scores(None, None, None, None), Targets(advantage_M, None))
    loss = HookedLoss(StepFunctions(args, True, weigh=weigh, reduce=reduce), samples, item, None)
    share_M = torch.ones(count)
    plain = PolicyLoss(-advantage_M * logp_M, torch.ones(count), torch.zeros(count, dtype=torch.bool))
    weighed = loss.weighing(tokens, share_M)(plain)
    total = loss.total(weighed, share_M)
    total.backward()
    halved = NamedHook("rollout_data_postprocess", "halved", resolve(f"{HOOKS}.halved_advantages"))
    data = StepData(StepFunctions(args, True, postprocess=halved), batch(0, 6), [samples])
    [target] = data.targets(0, [item.scores], [item.targets])
    whole = [trajectory.tokens_T for trajectory in samples.trajectories]
    lengths = samples.response_lengths
    index_r, target_r, counts = _chosen(list(map(torch.from_numpy, whole)), samples.total_lengths, lengths)
    ends = [(tokens_T[-n:], tokens_T[-n - 1 : -1]) for tokens_T, n in zip(whole, lengths, strict=True)]
    responses, befores = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*ends, strict=True))
    tokens_t = torch.from_numpy(share_of(micro, size, place.rank).tokens_t)
    assert counts == samples.held_lengths
    assert torch.equal(target_r, torch.cat(samples.held(responses)))
    assert torch.equal(tokens_t[index_r], torch.cat(samples.held(befores)))
    return {
        "loss_M": weighed.loss_T.detach().numpy(),
        "statistics": {name: float(value) for name, value in loss.statistics().items()},
        "gradient_M": logp_M.grad.numpy(),
        "advantage_M": target.advantage_M.numpy(),
        "expected_M": advantage_M.numpy() / 2,
        "held": sum(samples.held_lengths),
    }


@pytest.fixture(scope="module")
def outcomes() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    [alone] = run_ranks(1, hooked, 1)
    return alone, run_ranks(SIZE, hooked, SIZE)


def test_ranks_that_share_trajectories_find_the_loss_of_one_rank(outcomes):
    alone, together = outcomes
    assert sum(rank["held"] for rank in together) == alone["held"]
    assert all(0 < rank["held"] < alone["held"] for rank in together)
    for rank in together:
        np.testing.assert_allclose(rank["loss_M"], alone["loss_M"], rtol=1e-5)
        assert rank["statistics"] == pytest.approx(alone["statistics"], rel=1e-5)
        np.testing.assert_allclose(rank["advantage_M"], rank["expected_M"], rtol=1e-6)


def test_gradients_flow_to_the_rank_that_has_the_token(outcomes):
    alone, together = outcomes
    micro = micro_batch()
    for number, rank in enumerate(together):
        is_held_M = np.zeros(len(micro.index_M), np.bool_)
        share = share_of(micro, SIZE, number)
        start = sum(share.counts[:number])
        held = (share.order_M >= start) & (share.order_M < start + share.counts[number])
        is_held_M[held] = True
        assert not rank["gradient_M"][~is_held_M].any()
    total_M = sum(rank["gradient_M"] for rank in together)
    np.testing.assert_allclose(total_M, alone["gradient_M"], rtol=1e-5)
