"""Mappings of the parts that decoder families share, for a family to combine."""

from collections.abc import Iterable
from dataclasses import replace

from slipstream.bridge.model.geometry import DeltaNet, Experts, Geometry, GroupedAttention, LatentAttention
from slipstream.bridge.model.mapping import (
    OUTPUT,
    Columns,
    Mapping,
    Mappings,
    RowRun,
    Rows,
    Runs,
    Split,
    Vocabulary,
    Whole,
)

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

    mappings: list[Mapping] = []
    if geometry.pre_norms:
        mappings.append(
            norm("input_layernorm", "input_layernorm", geometry.hidden, te="self_attention.linear_qkv")
        )
    mappings.append(_gated_qkv(geometry, attention) if attention.gate else fused("weight", geometry.hidden))
    if attention.qkv_bias:
        mappings.append(fused("bias", None))
    if attention.joint_qk_norm:
        mappings += [
            Mapping(
                f"{_MEGATRON}self_attention.{x}_layernorm.weight",
                (f"{_HF}self_attn.{x}_norm.weight",),
                Rows((size,), None, attention.kv_heads, "key-value heads"),
            )
            for x, size in zip("qk", rows, strict=False)
        ]
    elif attention.qk_norm:
        mappings += [
            norm(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", attention.head_dim) for x in "qk"
        ]
    if attention.sinks:
        mappings.append(
            Mapping(
                f"{_MEGATRON}self_attention.core_attention.softmax_offset",
                (f"{_HF}self_attn.sinks",),
                Rows((attention.heads,), None, attention.kv_heads, "key-value heads"),
            )
        )
    if geometry.linear_biases:
        bias = f"{_MEGATRON}self_attention.linear_proj.bias"
        mappings.append(Mapping(bias, (f"{_HF}self_attn.o_proj.bias",), Whole((geometry.hidden,))))
    return [*mappings, _output(geometry.hidden, attention.heads * attention.head_dim)]


def _gated_qkv(geometry: Geometry, attention: GroupedAttention) -> Mapping:
    """Map query, key and value of gated attention.

    HF has the query and the gate of each head one after the other. Megatron has all queries of a key-value
    group, then their gates, then key and value.
    """
    dim, heads, groups = attention.head_dim, attention.heads, attention.kv_heads
    per_group = heads // groups
    shares = [
        RowRun(0, (2 * head + part) * dim, dim, stride=2 * per_group * dim)
        for part in (0, 1)
        for head in range(per_group)
    ]
    return Mapping(
        f"{_MEGATRON}self_attention.linear_qkv.weight",
        tuple(f"{_HF}self_attn.{x}_proj.weight" for x in "qkv"),
        Runs(
            tuple((rows * dim, geometry.hidden) for rows in (2 * heads, groups, groups)),
            groups,
            (*shares, RowRun(1, 0, dim, stride=dim), RowRun(2, 0, dim, stride=dim)),
            by_unit=True,
            label="key-value heads",
        ),
    )


def delta_net(geometry: Geometry, delta: DeltaNet) -> list[Mapping]:
    """Map linear attention. Ranks share its key heads, each with its value heads.

    Megatron's projection has queries, keys, values, gates of the output, and the two gates of the rule (beta
    and alpha), each of all heads of the rank.
    """
    hidden, heads, label = geometry.hidden, delta.key_heads, "linear key heads"
    per_head = delta.value_heads // heads
    key, value = delta.key_dim, per_head * delta.value_dim
    convolved = (
        RowRun(0, 0, key, stride=key),
        RowRun(0, delta.keys, key, stride=key),
        RowRun(0, 2 * delta.keys, value, stride=value),
    )
    if delta.interleaved:
        names, stride = ("in_proj_qkvz", "in_proj_ba"), 2 * (key + value)
        rows = (heads * stride, 2 * delta.value_heads)
        runs = (
            RowRun(0, 0, key, stride),
            RowRun(0, key, key, stride),
            RowRun(0, 2 * key, value, stride),
            RowRun(0, 2 * key + value, value, stride),
            RowRun(1, 0, per_head, stride=2 * per_head),
            RowRun(1, per_head, per_head, stride=2 * per_head),
        )
    else:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        rows = (2 * delta.keys + delta.values, delta.values, delta.value_heads, delta.value_heads)
        runs = (
            *convolved,
            RowRun(1, 0, value, stride=value),
            RowRun(2, 0, per_head, stride=per_head),
            RowRun(3, 0, per_head, stride=per_head),
        )

    def mapping(megatron: str, split: Split, *hf: str) -> Mapping:
        return Mapping(
            f"{_MEGATRON}self_attention.{megatron}", tuple(f"{_HF}linear_attn.{name}" for name in hf), split
        )

    projection = Runs(tuple((n, hidden) for n in rows), heads, runs, by_unit=False, label=label)
    channels = ((2 * delta.keys + delta.values, 1, delta.kernel),)
    convolution = Runs(channels, heads, convolved, by_unit=False, label=label)
    per_value_head = Rows((delta.value_heads,), None, heads, label)
    return [
        norm("input_layernorm", "input_layernorm", hidden, te="self_attention.in_proj"),
        mapping("in_proj.weight", projection, *(f"{name}.weight" for name in names)),
        mapping("conv1d.weight", convolution, "conv1d.weight"),
        mapping("dt_bias", per_value_head, "dt_bias"),
        # The logarithm of a rate: rounding it to half precision would change decays by half a percent.
        replace(mapping("A_log", per_value_head, "A_log"), float32=True),
        mapping("out_norm.weight", Whole((delta.value_dim,)), "norm.weight"),
        mapping("out_proj.weight", Columns(hidden, delta.values, "linear values"), "out_proj.weight"),
    ]


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
        *_indexer(hidden, attention),
        _output(hidden, heads * attention.value_dim),
    ]


def _indexer(hidden: int, attention: LatentAttention) -> list[Mapping]:
    """Map the indexer of sparse attention, which every rank holds whole and does not train."""
    indexer, rank = attention.indexer, attention.query_rank
    if indexer is None or rank is None:
        return []
    shapes = {
        "wq_b.weight": (indexer.heads * indexer.dim, rank),
        "wk.weight": (indexer.dim, hidden),
        "k_norm.weight": (indexer.dim,),
        "k_norm.bias": (indexer.dim,),
        "weights_proj.weight": (indexer.heads, hidden),
    }
    return [
        Mapping(
            f"{_MEGATRON}self_attention.indexer.{name}",
            (f"{_HF}self_attn.indexer.{name}",),
            Whole(shape),
            float32=name.startswith("k_norm"),
            frozen=True,
        )
        for name, shape in shapes.items()
    ]


def _output(hidden: int, inputs: int) -> Mapping:
    return Mapping(
        f"{_MEGATRON}self_attention.linear_proj.weight",
        (f"{_HF}self_attn.o_proj.weight",),
        Columns(hidden, inputs, "attention outputs"),
    )


def feed_forward(
    hidden: int,
    ffn_hidden: int,
    megatron: str,
    hf: str,
    *,
    gated: bool = True,
    te: tuple[str, str] | None = None,
) -> list[Mapping]:
    """Map the gate and up projection, which are one parameter, and the down projection.

    ``gated``: there is a gate. ``te``: names of the two under Transformer Engine, if they differ.
    """
    label = "feed-forward dimensions"
    per_expert = "{expert}" in megatron
    first, second = (_MEGATRON + name for name in te) if te else (None, None)
    into = ("gate_proj", "up_proj") if gated else ("up_proj",)
    return [
        Mapping(
            f"{_MEGATRON}{megatron}.linear_fc1.weight",
            tuple(f"{_HF}{hf}.{name}.weight" for name in into),
            Rows((ffn_hidden,) * len(into), hidden, label=label),
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
        *feed_forward(geometry.hidden, geometry.ffn_hidden, "mlp", "mlp", gated=geometry.gated),
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
                frozen=True,
            )
        )
    if experts.shared_ffn_hidden:
        hf = "mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts"
        mappings += feed_forward(hidden, experts.shared_ffn_hidden, "mlp.shared_experts", hf)
    if experts.shared_gate:
        gate = f"{_MEGATRON}mlp.shared_experts.gate_weight"
        mappings.append(Mapping(gate, (f"{_HF}mlp.shared_expert_gate.weight",), Whole((1, hidden))))
    return mappings + feed_forward(
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
    linear_mappings = delta_net(geometry, geometry.delta) if geometry.delta else []
    dense_mappings = dense_mlp(geometry)
    mixture_mappings = mixture(geometry, experts) if experts else []

    def of_layer(layer: int) -> tuple[Mapping, ...]:
        mixing = linear_mappings if geometry.delta_of(layer) else attention_mappings
        return (*mixing, *(mixture_mappings if geometry.has_experts(layer) else dense_mappings))

    return with_words(geometry, map(of_layer, range(geometry.n_layers)))


def decoder_with_post_norms(geometry: Geometry, norms: tuple[str, str, str]) -> Mappings:
    """Map a dense decoder with norms on the outputs of attention and of the feed-forward networks.

    ``norms``: HF's names of the norms after attention, before the feed-forward network and after it. That
    before it is not mapped if the model has no such norms.
    """
    attention, hidden = geometry.attention, geometry.hidden
    assert isinstance(attention, GroupedAttention)
    after_attention, before, after = norms
    inputs = [norm("pre_mlp_layernorm", before, hidden, te="mlp.linear_fc1")] if geometry.pre_norms else []
    layer = (
        *grouped_attention(geometry, attention),
        norm("post_attention_layernorm", after_attention, hidden),
        *inputs,
        *feed_forward(hidden, geometry.ffn_hidden, "mlp", "mlp", gated=geometry.gated),
        norm("post_mlp_layernorm", after, hidden),
    )
    return with_words(geometry, [layer] * geometry.n_layers)


def with_words(geometry: Geometry, layers: Iterable[tuple[Mapping, ...]]) -> Mappings:
    """Return the mappings of a decoder with these layers: add the embedding, the last norm and the head."""
    words = Vocabulary(geometry.vocab, geometry.hidden)
    final_norm = Mapping("decoder.final_layernorm.weight", ("model.norm.weight",), Whole((geometry.hidden,)))
    output = Mapping(OUTPUT, ("lm_head.weight",), words)
    return Mappings(
        embedding=(Mapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), words),),
        layers=tuple(layers),
        head=(final_norm,) if geometry.tied_embeddings else (final_norm, output),
    )


def with_norm_biases(mappings: Mappings) -> Mappings:
    """Return mappings whose norms have biases."""

    def bias(weight: str) -> str:
        return weight.removesuffix("weight") + "bias"

    def biases(mappings: Iterable[Mapping]) -> Iterable[Mapping]:
        for each in mappings:
            if each.megatron.endswith("norm.weight"):
                te = bias(each.te) if each.te else None
                yield replace(each, megatron=bias(each.megatron), hf=tuple(map(bias, each.hf)), te=te)

    layers = tuple((*layer, *biases(layer)) for layer in mappings.layers)
    return replace(mappings, layers=layers, head=(*mappings.head, *biases(mappings.head)))


def with_joined_rows(mappings: Mappings, joined: dict[str, str]) -> Mappings:
    """Return mappings some of whose projections HF has in one tensor. ``joined``: HF's name, by Megatron's.

    Both are names in a layer.
    """
    by_name = {_MEGATRON + megatron: _HF + hf for megatron, hf in joined.items()}

    def of(mapping: Mapping) -> Mapping:
        return mapping.joined(by_name[mapping.megatron]) if mapping.megatron in by_name else mapping

    return replace(mappings, layers=tuple(tuple(map(of, layer)) for layer in mappings.layers))
