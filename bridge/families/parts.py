"""Mappings of the parts that decoder families share, for a family to combine."""

from slipstream.bridge.model.geometry import Experts, Geometry, GroupedAttention, LatentAttention
from slipstream.bridge.model.mapping import Columns, Mapping, Mappings, Rows, Vocabulary, Whole

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."


def norm(megatron: str, hf: str, size: int, te: str | None = None) -> Mapping:
    """Map a norm of a layer. ``te``: linear layer into which Transformer Engine fuses the norm before it."""
    fused = f"{_MEGATRON}{te}.layer_norm_weight" if te else None
    return Mapping(f"{_MEGATRON}{megatron}.weight", (f"{_HF}{hf}.weight",), Whole((size,)), fused)


def grouped_attention(geometry: Geometry, attention: GroupedAttention) -> list[Mapping]:
    """Map attention with query, key and value in one parameter.

    Its rows are interleaved by key-value group: [q q .. k v] for each group.
    """
    heads = (attention.heads, attention.kv_heads, attention.kv_heads)
    rows = tuple(count * attention.head_dim for count in heads)

    def fused(kind: str, columns: int | None) -> Mapping:
        return Mapping(
            f"{_MEGATRON}self_attention.linear_qkv.{kind}",
            tuple(f"{_HF}self_attn.{x}_proj.{kind}" for x in "qkv"),
            Rows(rows, columns, attention.kv_heads, "key-value heads"),
        )

    mappings = [
        norm("input_layernorm", "input_layernorm", geometry.hidden, te="self_attention.linear_qkv"),
        fused("weight", geometry.hidden),
    ]
    if attention.qkv_bias:
        mappings.append(fused("bias", None))
    if attention.qk_norm:
        mappings += [
            norm(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", attention.head_dim) for x in "qk"
        ]
    return [*mappings, _output(geometry.hidden, attention.heads * attention.head_dim)]


def latent_attention(geometry: Geometry, attention: LatentAttention) -> list[Mapping]:
    """Map latent attention: every rank holds the down projections whole and a shard of the up projections."""
    heads, hidden = attention.heads, geometry.hidden
    key_dim = attention.plain_dim + attention.rotated_dim

    def down(megatron: str, hf: str, rows: int) -> Mapping:
        name = f"{_MEGATRON}self_attention.{megatron}.weight"
        return Mapping(name, (f"{_HF}self_attn.{hf}.weight",), Whole((rows, hidden)))

    def up(megatron: str, hf: str, dim: int, columns: int) -> Mapping:
        return Mapping(
            f"{_MEGATRON}self_attention.{megatron}.weight",
            (f"{_HF}self_attn.{hf}.weight",),
            Rows((heads * dim,), columns, heads, "attention heads"),
        )

    mappings = [norm("input_layernorm", "input_layernorm", hidden)]
    if attention.query_rank is None:
        mappings.append(up("linear_q_proj", "q_proj", key_dim, hidden))
    else:
        mappings += [
            down("linear_q_down_proj", "q_a_proj", attention.query_rank),
            norm("self_attention.q_layernorm", "self_attn.q_a_layernorm", attention.query_rank),
            up("linear_q_up_proj", "q_b_proj", key_dim, attention.query_rank),
        ]
    return [
        *mappings,
        down("linear_kv_down_proj", "kv_a_proj_with_mqa", attention.kv_rank + attention.rotated_dim),
        norm("self_attention.kv_layernorm", "self_attn.kv_a_layernorm", attention.kv_rank),
        up("linear_kv_up_proj", "kv_b_proj", attention.plain_dim + attention.value_dim, attention.kv_rank),
        _output(hidden, heads * attention.value_dim),
    ]


def _output(hidden: int, inputs: int) -> Mapping:
    return Mapping(
        f"{_MEGATRON}self_attention.linear_proj.weight",
        (f"{_HF}self_attn.o_proj.weight",),
        Columns(hidden, inputs, "attention outputs"),
    )


def gated_mlp(
    hidden: int, ffn_hidden: int, megatron: str, hf: str, *, te: tuple[str, str] | None = None
) -> list[Mapping]:
    """Map the gate and up projection, which are one parameter, and the down projection.

    ``te``: names of the two under Transformer Engine, if they differ.
    """
    label = "feed-forward dimensions"
    per_expert = "{expert}" in megatron
    first, second = (_MEGATRON + name for name in te) if te else (None, None)
    return [
        Mapping(
            f"{_MEGATRON}{megatron}.linear_fc1.weight",
            (f"{_HF}{hf}.gate_proj.weight", f"{_HF}{hf}.up_proj.weight"),
            Rows((ffn_hidden, ffn_hidden), hidden, label=label),
            first,
            per_expert,
        ),
        Mapping(
            f"{_MEGATRON}{megatron}.linear_fc2.weight",
            (f"{_HF}{hf}.down_proj.weight",),
            Columns(hidden, ffn_hidden, label),
            second,
            per_expert,
        ),
    ]


def dense_mlp(geometry: Geometry) -> list[Mapping]:
    return [
        norm("pre_mlp_layernorm", "post_attention_layernorm", geometry.hidden, te="mlp.linear_fc1"),
        *gated_mlp(geometry.hidden, geometry.ffn_hidden, "mlp", "mlp"),
    ]


def mixture(geometry: Geometry, experts: Experts) -> list[Mapping]:
    """Map router, shared experts and experts.

    Transformer Engine has all experts of a rank in one module, with one weight for each.
    """
    hidden = geometry.hidden
    mappings = [
        norm("pre_mlp_layernorm", "post_attention_layernorm", hidden),
        Mapping(f"{_MEGATRON}mlp.router.weight", (f"{_HF}mlp.gate.weight",), Whole((experts.count, hidden))),
    ]
    if experts.bias:
        mappings.append(
            Mapping(
                f"{_MEGATRON}mlp.router.expert_bias",
                (f"{_HF}mlp.gate.e_score_correction_bias",),
                Whole((experts.count,)),
                float32=True,
            )
        )
    if experts.shared_ffn_hidden:
        mappings += gated_mlp(hidden, experts.shared_ffn_hidden, "mlp.shared_experts", "mlp.shared_experts")
    return mappings + gated_mlp(
        hidden,
        experts.ffn_hidden,
        "mlp.experts.local_experts.{expert}",
        "mlp.experts.{expert}",
        te=("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.linear_fc2.weight{expert}"),
    )


def decoder(geometry: Geometry) -> Mappings:
    """Map every parameter of a decoder.

    Tied output weights are the embedding's, so they have no mapping of their own.
    """
    attention, experts = geometry.attention, geometry.experts
    attention_mappings = (
        latent_attention(geometry, attention)
        if isinstance(attention, LatentAttention)
        else grouped_attention(geometry, attention)
    )
    dense = (*attention_mappings, *dense_mlp(geometry))
    mixed = (*attention_mappings, *mixture(geometry, experts)) if experts else ()
    words = Vocabulary(geometry.vocab, geometry.hidden)
    final_norm = Mapping("decoder.final_layernorm.weight", ("model.norm.weight",), Whole((geometry.hidden,)))
    output = Mapping("output_layer.weight", ("lm_head.weight",), words)
    return Mappings(
        embedding=(Mapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), words),),
        layers=tuple(mixed if geometry.has_experts(i) else dense for i in range(geometry.n_layers)),
        head=(final_norm,) if geometry.tied_embeddings else (final_norm, output),
    )
