"""Floating-point operations that a model spends on a trajectory, from its geometry. Pure."""

import numpy as np

from slipstream.bridge.model.geometry import DeltaNet, Geometry, Indexer, LatentAttention


def forward_flops(geometry: Geometry, length_N: np.ndarray) -> np.ndarray:
    """Return the operations of a forward pass over trajectories of ``length_N`` tokens, float64 [N].

    Only matrix products count; a multiplication and its addition are two operations. A backward pass takes
    twice as many for every trajectory alike, so ratios hold for whole steps. Attention is causal: a token
    attends to itself and to those before it, in a layer with a window or an indexer to a limited number.
    Linear attention takes the same for every token: the kernels that process chunks of tokens take more, by a
    factor that does not depend on the trajectory.
    """
    length_N = length_N.astype(np.float64)
    total_N = _per_token(geometry) * length_N
    for layer in range(geometry.n_layers):
        if geometry.delta_of(layer):
            continue
        total_N += _per_pair(geometry) * _pairs(length_N, _reach(geometry, layer))
        total_N += _per_score(geometry) * _pairs(length_N, None)
    return 2.0 * total_N


def _indexer(geometry: Geometry) -> Indexer | None:
    return geometry.attention.indexer if isinstance(geometry.attention, LatentAttention) else None


def _reach(geometry: Geometry, layer: int) -> int | None:
    """Return the largest number of tokens that a token attends to; None: all up to itself."""
    window, indexer = geometry.window_of(layer), _indexer(geometry)
    return window.tokens if window else indexer.tokens if indexer else None


def _pairs(length_N: np.ndarray, reach: int | None) -> np.ndarray:
    """Return the pairs of tokens in which one attends to the other."""
    beyond_N = 0.0 if reach is None else np.maximum(length_N - reach, 0.0)
    return length_N * (length_N + 1) / 2 - beyond_N * (beyond_N + 1) / 2


def _per_score(geometry: Geometry) -> int:
    """Multiplications of an indexer for one pair of tokens: query with key, and the weights of its heads."""
    indexer = _indexer(geometry)
    return 0 if indexer is None else indexer.heads * (indexer.dim + 1)


def _per_token(geometry: Geometry) -> int:
    """Multiplications of a token by itself, outside of attention between pairs; of experts the chosen."""
    dense = (2 + geometry.gated) * geometry.hidden * geometry.ffn_hidden
    layers = range(geometry.n_layers)
    feed_forward = sum(_mixture(geometry) if geometry.has_experts(layer) else dense for layer in layers)
    mixing = sum(
        _linear_attention(geometry.hidden, delta) if delta else _projections(geometry)
        for delta in map(geometry.delta_of, layers)
    )
    return mixing + feed_forward + geometry.hidden * geometry.vocab


def _mixture(geometry: Geometry) -> int:
    experts = geometry.experts
    assert experts is not None
    width = experts.per_token * experts.ffn_hidden + experts.shared_ffn_hidden
    return geometry.hidden * (3 * width + experts.count + experts.shared_gate)


def _linear_attention(hidden: int, delta: DeltaNet) -> int:
    """Return the multiplications of the projections and, with a key and a value for each value head, of the
    rule: state with key, key with value, state with query.
    """
    projections = hidden * (2 * delta.keys + 3 * delta.values + 2 * delta.value_heads)
    return projections + 3 * delta.value_heads * delta.key_dim * delta.value_dim


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
        indexer = attention.indexer
        chosen = 0
        if indexer is not None and attention.query_rank is not None:
            chosen = attention.query_rank * indexer.heads * indexer.dim
            chosen += hidden * (indexer.dim + indexer.heads)
        return query + down + up + chosen + attention.heads * attention.value_dim * hidden
    heads = (2 + attention.gate) * attention.heads + 2 * attention.kv_heads
    return hidden * heads * attention.head_dim


def _per_pair(geometry: Geometry) -> int:
    """Multiplications for one pair of tokens, over all heads: query with key, result with value."""
    attention = geometry.attention
    if isinstance(attention, LatentAttention):
        return attention.heads * (attention.plain_dim + attention.rotated_dim + attention.value_dim)
    return 2 * attention.heads * attention.head_dim
