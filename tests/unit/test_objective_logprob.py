"""Log-probs and entropies from hidden states, and their gradients, against float64 formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.given_logits import vocab_parallel_logprob
from slipstream.backend.objective import logprob
from slipstream.backend.objective.logprob import HeadOptions, fused_logprob_and_entropy
from tests.ranks import run_ranks
from tests.tries import tries


def reference(logits_TV, target_T, temperature, vocab):
    """Log-probs and entropies; with a gradient where the logits have one."""
    logp_TV = (logits_TV[:, :vocab].double() / temperature).log_softmax(-1)
    return logp_TV.gather(-1, target_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def reference_of_head(hidden, weight, target, temperature, vocab, grad, entropy_grad):
    """Log-probs, entropies, the gradients of hidden states and weight, in float64."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logp, entropy = reference(hidden @ weight.T, target, temperature, vocab)
    (logp @ grad.double() + entropy @ entropy_grad.double()).backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def from_head(hidden, weight, target, *, entropy_gradient=False, **options):
    """Log-probs and entropies under the options."""
    return fused_logprob_and_entropy(
        hidden, weight, target, HeadOptions(**options), entropy_gradient=entropy_gradient
    )


def drawn(seed, tokens, width, vocab, padding=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = scale * torch.randn(vocab + padding, width, generator=generator) / math.sqrt(width)
    target = torch.randint(vocab, (tokens,), generator=generator)
    grad, entropy_grad = torch.randn(2, tokens, generator=generator)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
    return *leaves, target, grad, entropy_grad


@pytest.fixture
def columns(monkeypatch):
    """Sets how many columns a slice has, and how many bytes of logits are kept."""

    def set_to(columns: int, tokens: int, kept: int = 0) -> None:
        monkeypatch.setattr(logprob, "MIN_COLUMNS", columns)
        monkeypatch.setattr(logprob, "SLICE_ELEMENTS", {"cpu": columns * tokens})
        monkeypatch.setattr(logprob, "KEPT_BYTES", kept)

    return set_to


@tries(33)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 7),
    width=st.integers(1, 9),
    vocab=st.integers(1, 60),
    padding=st.integers(0, 9),
    slice_columns=st.integers(1, 70),
    kept=st.sampled_from([0, 200, 10**6]),
    temperature=st.floats(0.2, 3),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    entropy_gradient=st.booleans(),
)
def test_values_and_gradients_are_those_of_whole_float64_logits(
    seed, tokens, width, vocab, padding, slice_columns, kept, temperature, scale, entropy_gradient
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "MIN_COLUMNS", slice_columns)
        patch.setattr(logprob, "SLICE_ELEMENTS", {"cpu": 1})
        patch.setattr(logprob, "KEPT_BYTES", kept)
        hidden, weight, target, grad, entropy_grad = drawn(seed, tokens, width, vocab, padding, scale)
        logp, entropy = from_head(
            hidden, weight, target, temperature=temperature, vocab=vocab, entropy_gradient=entropy_gradient
        )
        assert logp.dtype == entropy.dtype == torch.float32
        assert entropy.requires_grad == entropy_gradient
        if entropy_gradient:
            (logp @ grad + entropy @ entropy_grad).backward()
        else:
            entropy_grad = torch.zeros(tokens)
            logp.backward(grad)
    expected = reference_of_head(hidden, weight, target, temperature, vocab, grad, entropy_grad)
    for actual, exact_value in zip((logp, entropy, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(
            actual.detach().double(), exact_value, rtol=1e-5, atol=3e-5 * max(1, scale)
        )
    assert (weight.grad[vocab:] == 0).all()


@pytest.mark.parametrize("slice_columns", [1000, 4096, 20000])
def test_a_large_vocabulary_is_within_1e_5_of_float64(columns, slice_columns):
    hidden, weight, target, grad, _ = drawn(3, 24, 64, 20000, scale=2.0)
    columns(slice_columns, tokens=24, kept=10**6)
    logp, entropy = from_head(hidden, weight, target, temperature=1.0, vocab=20000)
    logp.backward(grad)
    expected = reference_of_head(hidden, weight, target, 1.0, 20000, grad, torch.zeros(24))
    for actual, exact_value in zip((logp, entropy, hidden.grad, weight.grad), expected, strict=True):
        assert (actual.detach().double() - exact_value).abs().max() < 1e-5


def test_float32_logits_of_bfloat16_operands_lose_nothing(columns):
    hidden, weight, target, grad, _ = drawn(4, 20, 48, 3001, scale=2.0, dtype=torch.bfloat16)
    columns(500, tokens=20)
    expected = reference_of_head(hidden, weight, target, 0.7, 3001, grad, torch.zeros(20))
    exact, entropy = from_head(hidden, weight, target, temperature=0.7, vocab=3001, float32_logits=True)
    assert (exact.detach().double() - expected[0]).abs().max() < 1e-5
    assert (entropy.double() - expected[1]).abs().max() < 1e-5
    exact.backward(grad)
    for actual, exact_value in zip((hidden.grad, weight.grad), expected[2:], strict=True):
        assert actual.dtype is torch.bfloat16
        assert (actual.double() - exact_value).abs().max() < 2e-2 * exact_value.abs().max()

    rounded, _ = from_head(hidden, weight, target, temperature=0.7, vocab=3001)
    logits = (hidden.detach() @ weight.detach().T).double()  # as a bfloat16 head gives them
    of_rounded, _ = reference(logits, target, 0.7, 3001)
    assert (rounded.detach().double() - of_rounded).abs().max() < 1e-5
    assert (rounded.detach().double() - expected[0]).abs().max() > 1e-4


def test_the_weights_gradient_can_go_straight_into_a_float32_buffer(columns):
    hidden, weight, target, grad, _ = drawn(5, 6, 8, 50, padding=3)
    buffer = torch.ones(53, 8)
    columns(7, tokens=6)
    logp, _ = from_head(hidden, weight, target, temperature=0.7, vocab=50, weight_grad=buffer)
    logp.backward(grad)
    expected = reference_of_head(hidden, weight, target, 0.7, 50, grad, torch.zeros(6))
    assert weight.grad is None
    torch.testing.assert_close(buffer.double(), expected[3] + 1, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient(columns):
    hidden, weight, target, grad, _ = drawn(5, 6, 8, 50)
    columns(7, tokens=6)
    logp, _ = from_head(hidden, weight.detach(), target, temperature=0.7, vocab=50)
    logp.backward(grad)
    expected = reference_of_head(hidden, weight, target, 0.7, 50, grad, torch.zeros(6))
    torch.testing.assert_close(hidden.grad.double(), expected[2], rtol=1e-5, atol=1e-5)


def test_a_second_backward_pass_gives_the_same_gradients(columns):
    """Kept logits are gone after the first one."""
    hidden, weight, target, grad, _ = drawn(6, 6, 8, 50)
    columns(7, tokens=6, kept=500)
    logp, _ = from_head(hidden, weight, target, temperature=0.7, vocab=50)
    once = torch.autograd.grad(logp, (hidden, weight), grad, retain_graph=True)
    twice = torch.autograd.grad(logp, (hidden, weight), grad)
    for first, second in zip(once, twice, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [1e4, 1e18])
def test_extreme_logits_give_finite_values_and_gradients(columns, scale):
    hidden = (scale * torch.tensor([[1.0, 0.0], [-1.0, 0.5]])).requires_grad_()
    weight = (scale * torch.tensor([[1.0, 1.0], [-1.0, 0.0], [0.5, -1.0]])).requires_grad_()
    columns(1, tokens=2)
    logp, entropy = from_head(
        hidden, weight, torch.tensor([0, 2]), temperature=1.0, vocab=3, entropy_gradient=True
    )
    (logp.sum() + entropy.sum()).backward()
    for tensor in (logp, entropy, hidden.grad, weight.grad):
        assert tensor.isfinite().all()


def test_without_gradients_no_logits_are_kept(columns, monkeypatch):
    made = []
    init = logprob._Head.__init__
    monkeypatch.setattr(
        logprob._Head,
        "__init__",
        lambda self, *args, **options: made.append(self) or init(self, *args, **options),
    )
    hidden, weight, target, *_ = drawn(6, 6, 8, 50)
    columns(7, tokens=6, kept=10**6)
    with torch.no_grad():
        from_head(hidden, weight, target, temperature=0.7, vocab=50)
    assert not made[0]._kept


# ---- from given logits


@tries(13)
@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 40), st.integers(0, 5), st.integers(1, 200))
def test_given_logits_may_be_overwritten_by_their_gradient(seed, tokens, vocab, padding, block):
    generator = torch.Generator().manual_seed(seed)
    values = 3 * torch.randn(tokens, vocab + padding, generator=generator)
    target = torch.randint(vocab, (tokens,), generator=generator)
    grad, entropy_grad = torch.randn(2, tokens, generator=generator)
    leaf = values.clone().requires_grad_()
    logits = leaf.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "SLICE_ELEMENTS", {"cpu": block})
        logp, entropy = vocab_parallel_logprob(
            logits, target, temperature=0.8, vocab=vocab, entropy_gradient=True, overwrite=True
        )
        (logp @ grad + entropy @ entropy_grad).backward()
    plain = values.double().requires_grad_()
    expected, expected_entropy = reference(plain, target, 0.8, vocab)
    (expected @ grad.double() + expected_entropy @ entropy_grad.double()).backward()
    torch.testing.assert_close(logp.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.detach().double(), expected_entropy.detach(), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(leaf.grad.double(), plain.grad, rtol=1e-4, atol=2e-5)
    assert torch.equal(logits.detach(), leaf.grad)


# ---- over ranks


def cases():
    """Whole, padded, a shard that is nothing but padding, no tokens."""
    for seed, (tokens, rows, vocab) in enumerate(((6, 8, 16), (5, 51, 101), (6, 4, 3), (0, 4, 8))):
        yield drawn(seed, tokens, 7, vocab, 2 * rows - vocab, scale=3.0), vocab


def on_two_ranks(rank):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=2
    )
    logprob.MIN_COLUMNS, logprob.SLICE_ELEMENTS, logprob.KEPT_BYTES = 3, {"cpu": 1}, 100
    results = []
    for (hidden, weight, target, grad, entropy_grad), vocab in cases():
        mine = weight.detach().chunk(2)[rank.rank].clone().requires_grad_()
        logp, entropy = from_head(
            hidden, mine, target, temperature=0.7, vocab=vocab, group=dist.group.WORLD, entropy_gradient=True
        )
        (logp @ grad + entropy @ entropy_grad).backward()
        results.append([tensor.detach().numpy() for tensor in (logp, entropy, hidden.grad, mine.grad)])
    return results


def test_over_a_split_head_values_are_those_of_the_whole_one_and_gradients_its_parts():
    by_rank = run_ranks(2, on_two_ranks)
    for (inputs, vocab), *results in zip(cases(), *by_rank, strict=True):
        hidden, weight, target, grad, entropy_grad = inputs
        expected = reference_of_head(hidden, weight, target, 0.7, vocab, grad, entropy_grad)
        for logp, entropy, _, _ in results:
            np.testing.assert_allclose(logp, expected[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(entropy, expected[1], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(sum(part[2] for part in results), expected[2], rtol=1e-4, atol=5e-5)
        np.testing.assert_allclose(
            np.concatenate([part[3] for part in results]), expected[3], rtol=1e-4, atol=5e-5
        )
