"""Floating-point operations that a model spends on a trajectory, from its geometry. Pure."""

import numpy as np

from slipstream.bridge.model.geometry import Geometry, LatentAttention


def forward_flops(geometry: Geometry, length_N: np.ndarray) -> np.ndarray:
    """Return the operations of a forward pass over trajectories of ``length_N`` tokens, float64 [N].

    Only matrix products count; a multiplication and its addition are two operations. A backward pass takes
    twice as many for every trajectory alike, so ratios hold for whole steps. Attention is causal: a token
    attends to itself and to those before it.
    """
    length_N = length_N.astype(np.float64)
    pair_N = length_N * (length_N + 1) / 2
    return 2.0 * (_per_token(geometry) * length_N + geometry.n_layers * _per_pair(geometry) * pair_N)


def _per_token(geometry: Geometry) -> int:
    """Number of weights that a token is multiplied with, of experts only the chosen ones."""
    dense = 3 * geometry.hidden * geometry.ffn_hidden
    feed_forward = [
        _mixture(geometry) if geometry.has_experts(layer) else dense for layer in range(geometry.n_layers)
    ]
    head = geometry.hidden * geometry.vocab
    return geometry.n_layers * _projections(geometry) + sum(feed_forward) + head


def _mixture(geometry: Geometry) -> int:
    experts = geometry.experts
    assert experts is not None
    width = experts.per_token * experts.ffn_hidden + experts.shared_ffn_hidden
    return geometry.hidden * (3 * width + experts.count)


def _projections(geometry: Geometry) -> int:
    hidden, attention = geometry.hidden, geometry.attention
    if isinstance(attention, LatentAttention):
        query_dim = attention.heads * (attention.plain_dim + attention.rotated_dim)
        query = (
            hidden * query_dim
            if attention.query_rank is None
            else attention.query_rank * (hidden + query_dim)
        )
        down = hidden * (attention.kv_rank + attention.rotated_dim)
        up = attention.kv_rank * attention.heads * (attention.plain_dim + attention.value_dim)
        return query + down + up + attention.heads * attention.value_dim * hidden
    return 2 * hidden * (attention.heads + attention.kv_heads) * attention.head_dim


def _per_pair(geometry: Geometry) -> int:
    """Multiplications for one pair of tokens, over all heads: query with key, result with value."""
    attention = geometry.attention
    if isinstance(attention, LatentAttention):
        return attention.heads * (attention.plain_dim + attention.rotated_dim + attention.value_dim)
    return 2 * attention.heads * attention.head_dim
