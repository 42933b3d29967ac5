"""The sizes and variants of a decoder-only transformer. Imports no torch.

A family reads a geometry from an HF config. The mappings and the Megatron config follow from it.
"""

from dataclasses import dataclass
from typing import Literal

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


Attention = GroupedAttention | LatentAttention


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
    experts: Experts | None = None
    extra_layers: int = 0
    """Layers for multi-token prediction that a checkpoint may hold after the last one. They are unmapped."""

    def padded_vocab(self, tensor: int) -> int:
        """Return the rows of Megatron's embedding: the vocabulary rounded up to a multiple of ``tensor``."""
        return -(-self.vocab // tensor) * tensor

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

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


def geometry_of(
    hf: HfConfig, attention: Attention, rope: Rope, *, experts: Experts | None = None
) -> Geometry:
    """Read the settings that all families share.

    Raises UnsupportedModel for a setting that would change the model without an error.
    """
    refuse(
        hf,
        hidden_act=("silu",),
        mlp_bias=(False, None),
        use_sliding_window=(False, None),
        quantization_config=(None,),
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
        norm_eps=number(hf, "rms_norm_eps", 1e-6),
        init_std=number(hf, "initializer_range", 0.02),
        attention=attention,
        rope=rope,
        experts=experts,
        extra_layers=integer(hf, "num_nextn_predict_layers") or 0,
    )
