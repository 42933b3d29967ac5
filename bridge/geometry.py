"""The shape of a decoder-only transformer: what a mapping and the Megatron config are derived from.

Read from an HF config by a family. Imports no torch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from slipstream.bridge.hf_config import UnsupportedModel, numbers, refuse
from slipstream.bridge.rope import Rope


@dataclass(frozen=True)
class GroupedAttention:
    """Query heads share key-value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    """A norm on each head's query and key."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values come out of narrow projections."""

    heads: int
    query_rank: int | None
    """None: queries are projected at once."""
    kv_rank: int
    plain_dim: int
    """Of a head's query and key, not rotated."""
    rotated_dim: int
    value_dim: int


Attention = GroupedAttention | LatentAttention


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of some layers' feed-forward network."""

    count: int
    per_token: int
    ffn_hidden: int
    dense_layers: tuple[int, ...]
    """Layers that have none."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    """The weights of the chosen experts sum to one (before ``scaling``)."""
    bias: bool = False
    """A bias per expert that decides which are chosen, and nothing else."""
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    """Experts are chosen from the best of these groups."""
    shared_ffn_hidden: int = 0
    """Of the experts that every token goes through, together."""


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
    """Layers behind the last that a checkpoint may hold for multi-token prediction. They are not mapped."""

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the Megatron embedding: the vocabulary rounded up to a multiple of ``tensor``."""
        return -(-self.vocab // tensor) * tensor

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        if isinstance(self.attention, LatentAttention):
            return self.attention.rotated_dim
        return int(self.attention.head_dim * self.rope.fraction)


def grouped_attention(
    hf: dict[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False
) -> GroupedAttention:
    hidden, heads = numbers(hf, "hidden_size", "num_attention_heads")
    kv_heads = hf.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{hf.get('model_type')}: {heads} attention heads do not divide into {kv_heads} key-value groups"
        )
    return GroupedAttention(heads, kv_heads, hf.get("head_dim") or hidden // heads, qkv_bias, qk_norm)


def geometry_of(
    hf: dict[str, Any], attention: Attention, rope: Rope, *, experts: Experts | None = None
) -> Geometry:
    """What all families read alike. Raises UnsupportedModel for what would silently differ."""
    refuse(
        hf,
        hidden_act=("silu",),
        mlp_bias=(False, None),
        use_sliding_window=(False, None),
        quantization_config=(None,),
    )
    layers, hidden, ffn_hidden, vocab, positions = numbers(
        hf,
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    return Geometry(
        family=hf["model_type"],
        n_layers=layers,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        vocab=vocab,
        max_positions=positions,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        init_std=hf.get("initializer_range", 0.02),
        attention=attention,
        rope=rope,
        experts=experts,
        extra_layers=hf.get("num_nextn_predict_layers") or 0,
    )
