"""Bytes that the forward pass of one micro-batch keeps for its backward pass, on one rank.

Each term is a tensor that autograd saves: tokens on the rank * elements per token * bytes per element. The
terms are those of Korthikanti et al. (arXiv:2205.05198, section 4), extended by grouped-query and latent
attention, SwiGLU, experts and packed sequences, and listed per kernel, since plain PyTorch saves more than
fused kernels do. Attention keeps no scores: all kernels in use are of the flash kind.

    T tokens of a micro-batch on a rank (of all ranks that share a context: ``actor.microbatch_tokens``)
    t tensor-parallel ranks     S = T / t under sequence parallelism, else T
    H hidden     F feed-forward     q, k, v: dimensions of all heads     b bytes per element of the model

Residual stream and norms cost S * H, everything inside of attention and feed-forward layers T * width / t.
Experts are assumed to be chosen equally often; the tokens of a rank are then T / t * k copies.
"""

from dataclasses import dataclass
from typing import Literal

from slipstream.bridge.model.geometry import DeltaNet, Experts, Geometry, GroupedAttention, LatentAttention
from slipstream.bridge.model.layout import LayerSpec
from slipstream.rollout.tokens.routes import BYTE

Kernels = Literal["fused", "plain"]
"""``fused``: the kernels of a GPU. ``plain``: PyTorch's own operations, as on a CPU."""

FLOAT = 4
"""Bytes of a number in single precision."""
INDEX = 8
"""Bytes of an index."""
DELTA_CHUNK = 64
"""Tokens that linear attention processes at a time, as in ``backend/megatron/delta_net.py``."""


@dataclass(frozen=True)
class Sharing:
    """The ranks that share the tokens and the width of a layer, and the kernels that they run."""

    tensor: int = 1
    sequence: bool = False
    expert: int = 1
    expert_tensor: int = 1
    itemsize: int = 2
    layer_spec: LayerSpec = "transformer_engine"
    kernels: Kernels = "fused"

    @property
    def tokens(self) -> int:
        """Ranks that share the tokens of the residual stream."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True)
class LayerBytes:
    """Bytes per token of a micro-batch for one layer."""

    input: float
    """The input of the layer, which is all that full recomputation keeps."""
    attention: float
    core: float
    """The part of ``attention`` that selective recomputation does not keep; it may be negative."""
    feed_forward: float
    gradients: float
    """Largest excess of gradients over the activations that they replace, in the backward pass."""

    @property
    def kept(self) -> float:
        """Without recomputation."""
        return self.attention + self.feed_forward


def layer_bytes(geometry: Geometry, layer: int, sharing: Sharing) -> LayerBytes:
    """Return the bytes per token of the ``layer``-th layer."""
    mixed = geometry.has_experts(layer)
    experts = geometry.experts if mixed else None
    delta = geometry.delta_of(layer)
    attention, core = (_delta(geometry, delta, sharing), 0.0) if delta else _attention(geometry, sharing)
    feed_forward = (
        _mixture(geometry, experts, sharing)
        if experts
        else _input_norm(geometry, sharing)
        + _activation(geometry, geometry.ffn_hidden / sharing.tensor, sharing)
    )
    if geometry.post_norms:
        around = norm_bytes(geometry.hidden, 1, sharing) / sharing.tokens
        attention, feed_forward = attention + around, feed_forward + around
    return LayerBytes(
        input=geometry.hidden * sharing.itemsize / sharing.tokens,
        attention=attention,
        core=core,
        feed_forward=feed_forward,
        gradients=_gradients(geometry, experts, sharing),
    )


def norm_bytes(width: int, rows: float, sharing: Sharing, *, kept_input: bool = True) -> float:
    """Return the bytes per token of ``rows`` norms over ``width`` elements, without their outputs.

    kept_input: nobody else keeps the input. A fused kernel keeps the input and one number per row. Plain
    operations also keep the normalized input in single precision, and in place of an input in half precision
    its copy in single precision.
    """
    b, elements, per_row = sharing.itemsize, width * rows, rows * FLOAT
    if sharing.kernels == "fused":
        return kept_input * elements * b + per_row
    return (kept_input or b < FLOAT) * elements * FLOAT + elements * FLOAT + per_row


def micro_batch_bytes(geometry: Geometry, sharing: Sharing, *, has_routes: bool = False) -> float:
    """Return the bytes per token of a micro-batch on the device, and of cosines and sines of its positions.

    All layers share both. Ids, positions, targets, places and weights are 8 numbers of 8 bytes; the packed
    attention of the local layer spec has two and a half more. A fused kernel needs no cosines and sines.
    has_routes: with the engine's experts, 2 bytes for each choice.
    """
    numbers = 10.5 if sharing.layer_spec == "local" else 8
    waves = 0 if sharing.kernels == "fused" else 2 * geometry.rotated_dim * sharing.itemsize
    return numbers * INDEX + waves + has_routes * 2 * route_choices(geometry)


def route_choices(geometry: Geometry) -> int:
    """Return the number of experts of a token that are recorded: those of all layers, as if all had some."""
    return 0 if geometry.experts is None else geometry.n_layers * geometry.experts.per_token


def route_bytes(geometry: Geometry) -> int:
    """Return the bytes of a token's experts where they are kept: in the record, and between two passes."""
    return route_choices(geometry) * (1 if geometry.experts and geometry.experts.count <= BYTE else 2)


def taken_bytes(geometry: Geometry, sharing: Sharing) -> float:
    """Return the bytes per token of the keys and values that are gathered for segments which take tokens, and
    of their gradients. They are at most as many as the micro-batch has, and exist in one layer at a time.
    """
    attention = geometry.attention
    if isinstance(attention, LatentAttention):
        width = attention.heads * (attention.plain_dim + attention.rotated_dim + attention.value_dim)
    else:
        width = 2 * attention.kv_heads * attention.head_dim
    return 2 * width / sharing.tensor * sharing.itemsize


def head_bytes(geometry: Geometry, sharing: Sharing) -> float:
    """Return the bytes per token of the final norm, its output, and the hidden states with loss."""
    output = geometry.hidden * sharing.itemsize
    return (norm_bytes(geometry.hidden, 1, sharing) + output) / sharing.tokens + output


def _attention(geometry: Geometry, sharing: Sharing) -> tuple[float, float]:
    """Return the bytes of norm, projections and attention, and what selective recomputation saves of them.

    Flash attention keeps its inputs, its output and one number per head. The packed attention of the local
    layer spec keeps copies of them in the order of their lengths, and its output once more in the pack's.
    Selective recomputation keeps the inputs and the output, which the projection after it needs.
    """
    if isinstance(geometry.attention, LatentAttention):
        return _latent(geometry, geometry.attention, sharing)
    return _grouped(geometry, geometry.attention, sharing)


def _input_norm(geometry: Geometry, sharing: Sharing) -> float:
    """Return the bytes of the norm before a block, with its output, which the block's first layer keeps."""
    hidden = geometry.hidden
    return (norm_bytes(hidden, 1, sharing) + hidden * sharing.itemsize) / sharing.tokens


def _grouped(geometry: Geometry, attention: GroupedAttention, sharing: Sharing) -> tuple[float, float]:
    b, t = sharing.itemsize, sharing.tensor
    heads, groups = attention.heads / t, attention.kv_heads / t
    dim = attention.head_dim + attention.sinks  # one more dimension holds the sinks
    query, key = heads * dim * b, groups * dim * b
    projected, norms = 0.0, 0.0
    if attention.joint_qk_norm:
        projected = query + 2 * key if b == FLOAT else 0.0
        norms = _joint_norm_bytes(attention.head_dim * heads, sharing)
        norms += _joint_norm_bytes(attention.head_dim * groups, sharing, kept_input=False)
    elif attention.qk_norm:
        # Keys and values are views of the fused projection; queries are copied out of it.
        projected = query + 2 * key if sharing.kernels == "fused" or b == FLOAT else 0.0
        norms = norm_bytes(attention.head_dim, heads, sharing)
        norms += norm_bytes(attention.head_dim, groups, sharing, kept_input=False)
    value = 0.0 if projected and sharing.layer_spec != "local" else key
    outside = _input_norm(geometry, sharing) + projected + norms
    inside = query + key + value + query + heads * FLOAT
    if attention.gate:  # the sigmoid in single precision, and its product with the output
        outside += heads * attention.head_dim * FLOAT + query
    if sharing.layer_spec != "local":
        return outside + inside, heads * FLOAT
    inputs = query + key + (0.0 if projected else query + 2 * key)
    return outside + inside + query, inside - inputs


def _joint_norm_bytes(width: float, sharing: Sharing, *, kept_input: bool = True) -> float:
    """Return the bytes per token of a norm over the heads of a rank, which is plain PyTorch on GPUs too.

    It keeps its input in single precision, and the normalized input as it is multiplied with the weight.
    """
    single = (kept_input or sharing.itemsize < FLOAT) * FLOAT
    return width * (single + sharing.itemsize) + FLOAT


def _delta(geometry: Geometry, delta: DeltaNet, sharing: Sharing) -> float:
    """Return the bytes of norm, projections and rule of linear attention, which is always plain PyTorch.

    The rule works in single precision, on chunks of ``DELTA_CHUNK`` tokens. For pairs of tokens of a chunk it
    keeps five numbers, and one state for a chunk.
    """
    b, t = sharing.itemsize, sharing.tensor
    heads, keys, values = delta.value_heads / t, delta.keys / t, delta.values / t
    projected = 2 * (keys + values + heads)
    convolved = 2 * keys + values
    repeated = heads * delta.key_dim
    # Convolution: input, output and the activated output; the lengths of queries and keys.
    mixing = 3 * convolved * b + 2 * FLOAT * delta.key_heads / t
    # Single precision: query, key, weighted key, decayed query and key, correction; values, updates and what
    # remains of them; the gates.
    rule = FLOAT * (6 * repeated + 3 * values + 6 * heads)
    rule += FLOAT * heads * (5 * DELTA_CHUNK + delta.key_dim * delta.value_dim / DELTA_CHUNK)
    # The gate in the dtype of the model is a view of the whole projection.
    gate = values * FLOAT if b < FLOAT else projected * b
    norm = norm_bytes(delta.value_dim, heads, sharing) + 2 * values * b
    return _input_norm(geometry, sharing) + mixing + rule + gate + values * FLOAT + norm + values * b


def _latent(geometry: Geometry, attention: LatentAttention, sharing: Sharing) -> tuple[float, float]:
    b, t = sharing.itemsize, sharing.tensor
    heads = attention.heads / t
    query = heads * (attention.plain_dim + attention.rotated_dim) * b
    value = heads * attention.value_dim * b
    low_rank = norm_bytes(attention.kv_rank, 1, sharing) + attention.kv_rank * b
    if attention.query_rank:
        low_rank += norm_bytes(attention.query_rank, 1, sharing) + attention.query_rank * b
    if sharing.kernels == "fused" or b == FLOAT:
        low_rank += attention.rotated_dim * b  # the norm's input is a view of the wider projection
    outside = _input_norm(geometry, sharing) + low_rank / sharing.tokens
    inside = 2 * query + 2 * value + heads * FLOAT
    if sharing.layer_spec != "local":
        return outside + inside, heads * FLOAT
    return outside + inside + value, value + heads * FLOAT


def _activation(geometry: Geometry, width: float, sharing: Sharing, *, scaled: bool = False) -> float:
    """Return the bytes of an activation, from the output of the first layer to the input of the second.

    A fused kernel, which SwiGLU alone has, keeps the first layer's output (2 F) and its own (F). Plain
    operations also keep silu(gate) and the other factor; ``scaled`` multiplies by the weight of an expert and
    keeps that product as well. The clamped variant keeps the clamped gate and its sigmoid too. A squared ReLU
    has no gate: it keeps the first layer's output, the ReLU and its square.
    """
    if sharing.kernels == "fused" and geometry.activation == "swiglu":
        return 3 * width * sharing.itemsize
    kept = {"clamped_swiglu": 7, "squared_relu": 3}
    elements = kept.get(geometry.activation, 5) + scaled
    return elements * width * sharing.itemsize


def _copies(experts: Experts, sharing: Sharing) -> float:
    """Return how many copies of each token of a micro-batch the experts of a rank compute."""
    return experts.per_token * sharing.expert_tensor / sharing.tokens


def _mixture(geometry: Geometry, experts: Experts, sharing: Sharing) -> float:
    b, copies = sharing.itemsize, _copies(experts, sharing)
    width = experts.ffn_hidden / sharing.expert_tensor
    routed = copies * (geometry.hidden * b + _activation(geometry, width, sharing, scaled=True))
    # Logits, probabilities and the choice: single precision and flags per expert, indices per choice.
    scores = 3 * FLOAT if experts.score == "sigmoid" else 2 * FLOAT
    router = (experts.count * (scores + 2) + experts.per_token * (2 * INDEX + 2 * FLOAT)) / sharing.tokens
    shared = _activation(geometry, experts.shared_ffn_hidden / sharing.tensor, sharing)
    if experts.shared_gate:  # multiplies the output
        shared += geometry.hidden * b / sharing.tokens
    return _input_norm(geometry, sharing) + router + routed + shared


def _gradients(geometry: Geometry, experts: Experts | None, sharing: Sharing) -> float:
    """Return the bytes per token by which gradients of activations exceed what they replace.

    In a feed-forward layer the gradient of the second layer's input (F) exists before anything is freed, and
    a fused SwiGLU writes the gradient of its input (2 F) before it frees that. Plain norms work in single
    precision: about four tensors of the width of the residual stream. The experts of the local layer spec
    run one after the other, those of Transformer Engine together.
    """
    b, fused = sharing.itemsize, sharing.kernels == "fused"
    norm = (2 * b if fused else 4 * FLOAT) * geometry.hidden / sharing.tokens
    inside = (2 if fused else 1) * b
    if experts is None:
        return max(inside * geometry.ffn_hidden / sharing.tensor, norm)
    at_a_time = sharing.expert / experts.count if sharing.layer_spec == "local" else 1.0
    width = inside * experts.ffn_hidden / sharing.expert_tensor * at_a_time
    return max(_copies(experts, sharing) * (width + geometry.hidden * b), norm)
