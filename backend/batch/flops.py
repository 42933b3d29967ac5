"""What a model computes for a trajectory, from its geometry. Pure."""

import numpy as np

from slipstream.bridge.model.geometry import Geometry, LatentAttention


def forward_flops(geometry: Geometry, length_N: np.ndarray) -> np.ndarray:
    """float64 [N]: floating-point operations of a forward pass over trajectories of ``length_N`` tokens.

    Matrix products only, a multiplication and its addition being two operations. A backward pass takes twice
    as many for every trajectory alike, so that ratios hold for whole steps. Attention is causal: a token
    meets itself and those before it.
    """
    length_N = length_N.astype(np.float64)
    pair_N = length_N * (length_N + 1) / 2
    return 2.0 * (_per_token(geometry) * length_N + geometry.n_layers * _per_pair(geometry) * pair_N)


def _per_token(geometry: Geometry) -> int:
    """Weights that a token is multiplied with; of experts, those of the chosen ones."""
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
    """Multiplications of a query with one key and of the result with its value, over all heads."""
    attention = geometry.attention
    if isinstance(attention, LatentAttention):
        return attention.heads * (attention.plain_dim + attention.rotated_dim + attention.value_dim)
    return 2 * attention.heads * attention.head_dim
