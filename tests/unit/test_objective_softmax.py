"""The softmax over a split vocabulary, by log-probs from given logits, against float64 formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.given_logits import vocab_parallel_logprob
from tests.ranks import run_ranks
from tests.tries import tries


def reference_logprob(logits, target, temperature, vocab):
    logp = (logits[:, :vocab].double() / temperature).log_softmax(-1)
    chosen = logp.gather(-1, target[:, None])[:, 0]
    entropy = -(logp.exp() * torch.where(logp.exp() > 0, logp, 0.0)).sum(-1)
    return chosen, entropy


@tries(20)
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
    logits = torch.tensor(np.random.default_rng(0).normal(0, 10, (5, 33))).bfloat16()
    target = torch.arange(5)
    logp, _ = vocab_parallel_logprob(logits, target, temperature=0.7, vocab=33)
    torch.testing.assert_close(
        logp.double(), reference_logprob(logits, target, 0.7, 33)[0], rtol=1e-6, atol=1e-5
    )


@tries(10)
@given(st.integers(0, 2**31), st.floats(0.2, 3), st.integers(0, 3), st.sampled_from([1.0, 50.0]))
def test_the_gradient_is_that_of_the_plain_formula(seed, temperature, padding, scale):
    torch.manual_seed(seed)
    logits = (scale * torch.randn(4, 9 + padding)).requires_grad_()
    target, grad = torch.randint(9, (4,)), torch.randn(4)
    logp, _ = vocab_parallel_logprob(logits, target, temperature=temperature, vocab=9)
    (actual,) = torch.autograd.grad(logp, logits, grad)
    plain = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(
        reference_logprob(plain, target, temperature, 9)[0], plain, grad.double()
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    assert (actual[:, 9:] == 0).all()


def test_the_gradient_is_that_of_finite_differences():
    logits = torch.tensor(np.random.default_rng(0).normal(0, 1, (1, 7)), dtype=torch.float32)
    target, temperature = torch.tensor([3]), 0.8
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


@tries(10)
@given(st.integers(0, 2**31), st.floats(0.2, 3), st.integers(0, 3), st.sampled_from([0.0, 1.0, 50.0]))
def test_the_entropy_of_the_bonus_and_its_gradient_are_those_of_the_plain_formula(
    seed, temperature, padding, scale
):
    torch.manual_seed(seed)
    logits = (scale * torch.randn(4, 9 + padding)).requires_grad_()
    grad = torch.randn(4)
    actual = differentiable_entropy(logits, temperature=temperature, vocab=9)
    actual.backward(grad)
    plain = logits.detach().double().requires_grad_()
    logp = (plain[:, :9] / temperature).log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1)
    expected.backward(grad.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(logits.grad.double(), plain.grad, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("value", [1e4, -1e4, 3e38, -math.inf])
def test_extreme_logits_give_a_finite_entropy_and_gradient(value):
    logits = torch.tensor([[value, 0.0, 1.0], [0.0, value, 1.0]], requires_grad=True)
    actual = differentiable_entropy(logits, temperature=1.0, vocab=3)
    actual.sum().backward()
    assert actual.isfinite().all()
    assert logits.grad.isfinite().all()


def test_no_tokens_are_no_log_probs():
    logits = torch.zeros(0, 5, requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.zeros(0, dtype=torch.long), temperature=1.0, vocab=5)
    logp.sum().backward()
    assert logp.shape == entropy.shape == (0,)


def vocabulary_cases():
    """Vocabularies that fill two ranks, that are padded, and that leave a shard with nothing but padding."""
    torch.manual_seed(5)
    for columns, vocab in ((8, 16), (51, 101), (4, 3)):
        logits = 10 * torch.randn(6, 2 * columns)
        yield logits, torch.randint(vocab, (6,)), torch.randn(6), vocab


def on_two_ranks(rank):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=2
    )
    results = []
    for logits, target, grad, vocab in vocabulary_cases():
        mine = logits.chunk(2, dim=-1)[rank.rank].clone().requires_grad_()
        logp, entropy = vocab_parallel_logprob(
            mine, target, temperature=0.7, vocab=vocab, group=dist.group.WORLD
        )
        logp.backward(grad)
        results.append((logp.detach().numpy(), entropy.numpy(), mine.grad.numpy()))
        mine = mine.detach().requires_grad_()
        spread = differentiable_entropy(mine, temperature=0.7, vocab=vocab, group=dist.group.WORLD)
        spread.backward(grad)
        results[-1] += (spread.detach().numpy(), mine.grad.numpy())
    empty, _ = vocab_parallel_logprob(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), temperature=1.0, vocab=8, group=dist.group.WORLD
    )
    assert empty.shape == (0,)
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, on_two_ranks)


def test_log_probs_over_a_split_vocabulary_are_those_over_the_whole_one(two_ranks):
    for i, (logits, target, grad, vocab) in enumerate(vocabulary_cases()):
        plain = logits.double().requires_grad_()
        logp, entropy = reference_logprob(plain, target, 0.7, vocab)
        logp.backward(grad.double())
        for results in two_ranks:
            np.testing.assert_allclose(results[i][0], logp.detach(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(results[i][1], entropy.detach(), rtol=1e-5, atol=1e-5)
        whole = np.concatenate([results[i][2] for results in two_ranks], axis=-1)
        np.testing.assert_allclose(whole, plain.grad, rtol=1e-5, atol=1e-6)
        plain.grad = None
        logp = (plain[:, :vocab] / 0.7).log_softmax(-1)
        (-(logp.exp() * logp).sum(-1)).backward(grad.double())
        for results in two_ranks:
            np.testing.assert_allclose(results[i][3], entropy.detach(), rtol=1e-5, atol=1e-5)
        whole = np.concatenate([results[i][4] for results in two_ranks], axis=-1)
        np.testing.assert_allclose(whole, plain.grad, rtol=1e-4, atol=1e-5)
