"""The sizes and variants of a decoder-only transformer. Imports no torch.

A family reads a geometry from an HF config. The mappings and the Megatron config follow from it.
"""

from dataclasses import dataclass
from typing import Literal, cast

from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integer, integers, number, refuse
from slipstream.bridge.model.rope import Rope


@dataclass(frozen=True)
class GroupedAttention:
    """Attention in which several query heads share a key-value head."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    """A norm on each head's query and key."""
    joint_qk_norm: bool = False
    """The norm of queries spans all heads, and so does that of keys (MiniMax-M2)."""
    gate: bool = False
    """The outputs are multiplied by the sigmoid of a gate, which is projected together with the query."""
    sinks: bool = False
    """Each head has a learned logit that takes part in its softmax and has no value (gpt-oss)."""
    scale: float | None = None
    """Factor of the products of queries and keys; None: 1 / sqrt(head_dim)."""


@dataclass(frozen=True)
class Indexer:
    """The part of sparse attention (DeepSeek-V3.2) that chooses the tokens that a token attends to."""

    heads: int
    dim: int
    tokens: int
    """Number of tokens that are chosen, of the token itself and those before it."""
    interleaved: bool = False
    """The pairs of dimensions that are rotated together are adjacent, as in the attention itself."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values come from low-rank projections."""

    heads: int
    query_rank: int | None
    """None: queries come from one full projection."""
    kv_rank: int
    plain_dim: int
    """Dimensions of a head's query and key that are not rotated."""
    rotated_dim: int
    value_dim: int
    indexer: Indexer | None = None
    """None: a token attends to all tokens before it."""


Attention = GroupedAttention | LatentAttention

Activation = Literal["swiglu", "geglu", "clamped_swiglu", "squared_relu"]
"""``geglu``: GELU in its approximation by tanh. ``clamped_swiglu``: that of gpt-oss, see ``CLAMP``.
``squared_relu``: relu(x) ** 2, without a gate."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "relu2": "squared_relu",
}
"""By the name that a config has for them."""

CLAMP = 7.0
"""gpt-oss: gate and up projection are limited to this; then gate * sigmoid(1.702 * gate) * (up + 1)."""


@dataclass(frozen=True)
class Window:
    """Attention of some layers to the last tokens alone."""

    tokens: int
    """Number of tokens that a token attends to, itself included."""
    layers: tuple[int, ...]
    rope: Rope | None = None
    """Rotary embedding of these layers; None: that of the other layers."""


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention with a gated delta rule (Yang et al., arXiv:2412.06464), as Qwen3-Next has it."""

    key_heads: int
    """Heads of queries and keys. Each serves the same number of value heads."""
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the causal convolution of queries, keys and values spans."""
    interleaved: bool
    """HF has two projections, whose rows are interleaved by key head. Otherwise it has four, one for queries,
    keys and values and one for each kind of gate, and no rows are interleaved."""

    @property
    def keys(self) -> int:
        """Dimensions of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Dimensions of the values of all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which replaces the feed-forward network of some layers."""

    count: int
    per_token: int
    ffn_hidden: int
    dense_layers: tuple[int, ...]
    """Layers without experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    """The weights of the chosen experts sum to one (before ``scaling``)."""
    bias: bool = False
    """A bias per expert that affects which experts are chosen, but not their weights."""
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    """Experts are chosen from this many of the ``groups``, the best ones."""
    shared_ffn_hidden: int = 0
    """Hidden size of all shared experts together, which every token passes through."""
    shared_gate: bool = False
    """The output of the shared experts is multiplied by the sigmoid of a gate."""


@dataclass(frozen=True)
class Geometry:
    family: str
    n_layers: int
    hidden: int
    ffn_hidden: int
    vocab: int
    max_positions: int
    tied_embeddings: bool
    norm_eps: float
    init_std: float
    attention: Attention
    rope: Rope
    window: Window | None = None
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose queries and keys are not rotated."""
    layer_norms: bool = False
    """Norms subtract the mean, and have biases."""
    pre_norms: bool = True
    """The inputs of attention and of feed-forward networks have norms."""
    post_norms: bool = False
    """Their outputs have norms."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and of feed-forward networks."""
    logit_scale: float = 1.0
    activation: Activation = "swiglu"
    linear_biases: bool = False
    """Every linear layer of the decoder has a bias, those of the router and the experts too."""
    experts: Experts | None = None
    delta: DeltaNet | None = None
    """Linear attention of the layers in ``delta_layers``, which have it in place of ``attention``."""
    delta_layers: tuple[int, ...] = ()
    centered_norms: bool = False
    """Norms multiply by one plus their weight."""
    extra_layers: int = 0
    """Layers for multi-token prediction that a checkpoint may hold after the last one. They are unmapped."""
    extra_prefix: str | None = None
    """Prefix of the tensors of such layers, if a checkpoint holds them apart from the decoder's layers."""

    def padded_vocab(self, tensor: int) -> int:
        """Return the rows of Megatron's embedding: the vocabulary rounded up to a multiple of ``tensor``."""
        return -(-self.vocab // tensor) * tensor

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def delta_of(self, layer: int) -> DeltaNet | None:
        """Return the linear attention of a layer; None if the layer has ``attention``."""
        return self.delta if layer in self.delta_layers else None

    def window_of(self, layer: int) -> Window | None:
        """Return the window of a layer's attention; None: the layer attends to all tokens."""
        return self.window if self.window is not None and layer in self.window.layers else None

    @property
    def gated(self) -> bool:
        """The activation in feed-forward networks multiplies a second projection, the up projection."""
        return self.activation != "squared_relu"

    @property
    def rotated_dim(self) -> int:
        """Rotated dimensions of a head."""
        if isinstance(self.attention, LatentAttention):
            return self.attention.rotated_dim
        return int(self.attention.head_dim * self.rope.fraction)


def grouped_attention(hf: HfConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> GroupedAttention:
    """Read the attention of all families but DeepSeek's. Raises UnsupportedModel."""
    hidden, heads = integers(hf, "hidden_size", "num_attention_heads")
    kv_heads = integer(hf, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{hf.get('model_type')}: {heads} attention heads do not divide into {kv_heads} key-value groups"
        )
    return GroupedAttention(heads, kv_heads, integer(hf, "head_dim") or hidden // heads, qkv_bias, qk_norm)


def window_of(hf: HfConfig, *, every: int, rope: Rope | None = None) -> Window | None:
    """Read which layers attend within ``sliding_window`` tokens.

    ``every``: without ``layer_types``, each layer whose number, counted from 1, is a multiple of this
    attends to all tokens. Raises UnsupportedModel.
    """
    (layers,) = integers(hf, "num_hidden_layers")
    stated = hf.get("layer_types")
    default = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds = cast("list[object]", stated) if isinstance(stated, list) else default
    known = {"sliding_attention", "full_attention"}
    if len(kinds) != layers or not known.issuperset(map(str, kinds)):
        raise UnsupportedModel(
            f"{hf.get('model_type')}: layer_types is {kinds!r} in config.json, expected {layers} times "
            "'full_attention' or 'sliding_attention'"
        )
    within = tuple(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
    if not within:
        return None
    (tokens,) = integers(hf, "sliding_window")
    return Window(tokens, within, rope)


def geometry_of(
    hf: HfConfig,
    attention: Attention,
    rope: Rope,
    *,
    experts: Experts | None = None,
    act: str = "silu",
    eps: str = "rms_norm_eps",
) -> Geometry:
    """Read the settings that all families share.

    ``act``: the only value of ``hidden_act`` that the family has. ``eps``: its name for the setting of that
    meaning. Raises UnsupportedModel for a setting that would change the model without an error.
    """
    refuse(
        hf,
        hidden_act=(act,),
        mlp_bias=(False, None),
        use_sliding_window=(False, None),
        attn_logit_softcapping=(None,),
        final_logit_softcapping=(None,),
        attention_multiplier=(None,),
        embedding_multiplier=(None, 1),
        residual_multiplier=(None, 1),
        logits_scaling=(None, 1),
        clip_qkv=(None,),
    )
    layers, hidden, ffn_hidden, vocab, positions = integers(
        hf,
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    return Geometry(
        family=str(hf["model_type"]),
        n_layers=layers,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        vocab=vocab,
        max_positions=positions,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=number(hf, eps, 1e-6),
        init_std=number(hf, "initializer_range", 0.02),
        attention=attention,
        rope=rope,
        activation=ACTIVATIONS[act],
        experts=experts,
        extra_layers=integer(hf, "num_nextn_predict_layers") or 0,
    )
