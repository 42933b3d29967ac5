"""The gated delta rule in chunks, against its definition token by token."""

import pytest
import torch

from slipstream.backend.megatron.delta_net import CHUNK, gated_delta_rule


def by_definition(query, key, value, beta, decay):
    """S = exp(decay) S;  S = S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)"""
    state = query.new_zeros(query.shape[0], query.shape[2], query.shape[3], value.shape[3])
    outputs = []
    for token in range(query.shape[1]):
        q, k, v, rate, logarithm = (part[:, token] for part in (query, key, value, beta, decay))
        state = state * logarithm.exp()[..., None, None]
        error = rate[..., None] * (v - torch.einsum("nhkv,nhk->nhv", state, k))
        state = state + torch.einsum("nhk,nhv->nhkv", k, error)
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, q) / query.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1)


def inputs(length: int, dtype=torch.float64) -> list[torch.Tensor]:
    """Two segments, three heads, keys of 5 and values of 7 dimensions; strong and weak decays."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, length, 3, *shape, generator=generator, dtype=torch.float64)

    query, key = (torch.nn.functional.normalize(normal(5), dim=-1) for _ in range(2))
    parts = (query, key, normal(7), normal().sigmoid(), -(3 * normal()).exp())
    return [part.to(dtype).requires_grad_() for part in parts]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_chunks_give_the_values_and_gradients_of_single_tokens(length):
    parts = inputs(length)
    result, expected = gated_delta_rule(*parts, chunk=8), by_definition(*parts)
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(result)
    gradients, references = (torch.autograd.grad((x * weights).sum(), parts) for x in (result, expected))
    torch.testing.assert_close(gradients, references)


def test_a_chunk_of_the_usual_length_keeps_single_precision_through_decays_of_any_size():
    """Small decays behind a large one count as exactly as any, and no factor between tokens overflows."""
    parts = inputs(2 * CHUNK + 5, torch.float32)
    result = gated_delta_rule(*parts)
    assert result.dtype is torch.float32
    expected = by_definition(*(part.double() for part in parts))
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(result.sum(), parts))


def test_half_precision_is_computed_in_single():
    parts = inputs(20, torch.bfloat16)
    expected = by_definition(*(part.double() for part in parts)).to(torch.bfloat16)
    assert gated_delta_rule(*parts).dtype is torch.bfloat16
    torch.testing.assert_close(gated_delta_rule(*parts), expected)
