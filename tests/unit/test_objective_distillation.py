"""The divergence from a teacher's likeliest tokens: against float64 formulas and finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.backend.objective import logprob
from slipstream.backend.objective.distillation import divergence_from_top_tokens, log_rest
from slipstream.backend.objective.logprob import HeadOptions, fused_logprobs
from tests.ranks import run_ranks
from tests.tries import tries


def divergence_by_hand(logits_V: np.ndarray, ids: list[int], teacher: list[float], temperature: float):
    """Sum over the choices and the tail, with the tail's probability as the sum of the other tokens'."""
    x = logits_V.astype(np.float64) / temperature
    logp = x - (np.log(np.exp(x - x.max()).sum()) + x.max())
    rest = [v for v in range(len(x)) if v not in ids]
    total = sum(math.exp(logp[id_]) * (logp[id_] - t) for id_, t in zip(ids, teacher, strict=True))
    if rest:
        tail = np.exp(logp[rest]).sum()
        total += tail * (math.log(tail) - math.log1p(-sum(map(math.exp, teacher))))
    return total


def drawn(seed: int, tokens: int, width: int, vocab: int, k: int, scale: float = 1.0):
    """Hidden states, weight, targets, ids and log-probs of a teacher with a tail, in float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = scale * torch.randn(vocab, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
    target = torch.randint(vocab, (tokens,), generator=generator)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    top = logits.log_softmax(-1).topk(k)
    return hidden, weight, target, top.indices, top.values


@pytest.mark.parametrize("x", [-1e-7, -1e-4, -0.3, -math.log(2), -0.7, -5.0, -40.0])
def test_the_logarithm_of_what_is_left_is_exact_at_both_ends(x):
    exact = float(np.log(-np.expm1(np.longdouble(x))))
    actual = log_rest(torch.tensor(x, dtype=torch.float64)).item()
    assert actual == pytest.approx(max(exact, -23 * math.log(2)), rel=1e-12)
    assert math.isfinite(log_rest(torch.tensor(1e-6, dtype=torch.float64)).item())


@tries(20)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 5),
    vocab=st.integers(2, 30),
    share=st.floats(0, 0.99),
    temperature=st.floats(0.3, 2),
    slice_columns=st.integers(1, 32),
    entropy_gradient=st.booleans(),
)
def test_values_and_gradients_are_those_of_whole_float64_logits(
    seed, tokens, vocab, share, temperature, slice_columns, entropy_gradient
):
    k = 1 + int(share * (vocab - 1))
    hidden, weight, target, ids, teacher = drawn(seed, tokens, 4, vocab, min(k, vocab - 1))
    grads = torch.randn(3, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    whole_h, whole_w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp = ((whole_h @ whole_w.T) / temperature).log_softmax(-1)
    tail_p = 1 - logp.gather(-1, ids).exp().sum(-1)
    tail_q = 1 - teacher.exp().sum(-1)
    chosen = logp.gather(-1, ids)
    expected = (chosen.exp() * (chosen - teacher)).sum(-1) + tail_p * (tail_p.log() - tail_q.log())
    entropy = -(logp.exp() * logp).sum(-1)
    total = grads[0] @ logp.gather(-1, target[:, None])[:, 0] + grads[1] @ expected
    (total + grads[2] @ entropy if entropy_gradient else total).backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "MIN_COLUMNS", slice_columns)
        patch.setattr(logprob, "SLICE_ELEMENTS", {"cpu": 1})
        h, w = hidden.float().requires_grad_(), weight.float().requires_grad_()
        options = HeadOptions(temperature, vocab)
        logp_T, entropy_T, also = fused_logprobs(
            h, w, target, ids, options, entropy_gradient=entropy_gradient
        )
        actual = divergence_from_top_tokens(also, teacher.float())
        total = grads[0].float() @ logp_T + grads[1].float() @ actual
        (total + grads[2].float() @ entropy_T if entropy_gradient else total).backward()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(h.grad.double(), whole_h.grad, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(w.grad.double(), whole_w.grad, rtol=1e-3, atol=2e-4)
    by_hand = [
        divergence_by_hand(row, ids[t].tolist(), teacher[t].tolist(), temperature)
        for t, row in enumerate((hidden @ weight.T).numpy())
    ]
    np.testing.assert_allclose(actual.detach().numpy(), by_hand, rtol=1e-4, atol=2e-5)


def test_the_gradient_is_that_of_finite_differences():
    _, _, _, ids, teacher = drawn(3, 2, 4, 12, 5)
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def divergence(logits):
        return divergence_from_top_tokens(logits.log_softmax(-1).gather(-1, ids), teacher).sum()

    assert torch.autograd.gradcheck(divergence, (logits.requires_grad_(),), eps=1e-6, atol=1e-7)


def test_a_policy_that_agrees_has_no_divergence_and_no_gradient():
    logp = torch.randn(4, 9, dtype=torch.float64).log_softmax(-1).requires_grad_()
    ids = logp.topk(3).indices
    divergence = divergence_from_top_tokens(logp.gather(-1, ids), logp.gather(-1, ids).detach())
    divergence.sum().backward()
    torch.testing.assert_close(divergence, torch.zeros(4, dtype=torch.float64))
    # The gradient of the log-probs is constant over the outcomes: none is left behind a softmax.
    logits = torch.randn(4, 9, dtype=torch.float64).requires_grad_()
    student = logits.log_softmax(-1)
    divergence_from_top_tokens(student.gather(-1, ids), student.gather(-1, ids).detach()).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-12, rtol=0)


def test_choices_that_there_are_not_change_nothing():
    student = torch.tensor([[-1.0, -2.0, -0.1], [-1.0, -2.0, -0.1]], requires_grad=True)
    nan = float("nan")
    teacher = torch.tensor([[-1.5, -2.5, nan], [nan, nan, nan]])
    divergence = divergence_from_top_tokens(student, teacher)
    alone = divergence_from_top_tokens(student[:1, :2], teacher[:1, :2])
    assert divergence.tolist() == [alone.item(), 0.0]
    divergence.sum().backward()
    assert student.grad[0, 2] == 0
    assert student.grad[1].tolist() == [0, 0, 0]
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-6, -1e-6])
def test_choices_with_all_of_the_probability_give_finite_values_and_gradients(gap):
    student = torch.tensor([[math.log(0.5), math.log(0.5) + gap]], requires_grad=True)
    teacher = torch.tensor([[math.log(0.25), math.log(0.75)]])
    divergence = divergence_from_top_tokens(student, teacher)
    divergence.sum().backward()
    assert divergence.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-4)
    assert student.grad.isfinite().all()


CASES = [(seed, temperature) for seed in range(3) for temperature in (0.7, 1.0)]


def taught(hidden, weight, target, ids, teacher, options):
    """The divergences, and the gradients of hidden states and weight."""
    hidden, weight = hidden.float().requires_grad_(), weight.float().requires_grad_()
    logp, _, also = fused_logprobs(hidden, weight, target, ids, options)
    divergence = divergence_from_top_tokens(also, teacher.float())
    (logp.sum() + 2 * divergence.sum()).backward()
    return [tensor.detach().numpy() for tensor in (divergence, hidden.grad, weight.grad)]


def on_two_ranks(rank):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=2
    )
    results = []
    for seed, temperature in CASES:
        hidden, weight, *rest = drawn(seed, 5, 6, 23, 7)
        padded = torch.cat([weight, torch.zeros(1, 6, dtype=torch.float64)])
        options = HeadOptions(temperature, 23, dist.group.WORLD)
        results.append(taught(hidden, padded.chunk(2)[rank.rank], *rest, options))
    return results


def test_over_a_split_head_divergences_are_those_of_the_whole_one_and_gradients_its_parts():
    first, second = run_ranks(2, on_two_ranks)
    for (seed, temperature), one, two in zip(CASES, first, second, strict=True):
        whole = taught(*drawn(seed, 5, 6, 23, 7), HeadOptions(temperature, 23))
        np.testing.assert_allclose(one[0], whole[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(two[0], whole[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one[1] + two[1], whole[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.concatenate([one[2], two[2]])[:-1], whole[2], rtol=1e-4, atol=1e-5)
        assert not two[2][-1].any(), "padding has no gradient"
