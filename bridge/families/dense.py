"""The mapping that Llama-shaped dense decoders share; a family states how it differs from it."""

from bridge.geometry import Geometry
from bridge.mapping import GateUp, GroupedQKV, InputColumns, Mapping, Mappings, Replicated, VocabRows

_HF = "model.layers.{layer}."
_MCORE = "decoder.layers.{layer}."


def _qkv(suffix: str) -> tuple[str, ...]:
    return tuple(f"{_HF}self_attn.{x}_proj.{suffix}" for x in "qkv")


def layer(geometry: Geometry) -> tuple[Mapping, ...]:
    """The parameters of one decoder layer."""
    found: list[Mapping] = [
        Replicated(
            f"{_MCORE}input_layernorm.weight",
            (f"{_HF}input_layernorm.weight",),
            transformer_engine=f"{_MCORE}self_attention.linear_qkv.layer_norm_weight",
        ),
        GroupedQKV(f"{_MCORE}self_attention.linear_qkv.weight", _qkv("weight")),
    ]
    if geometry.qkv_bias:
        found.append(GroupedQKV(f"{_MCORE}self_attention.linear_qkv.bias", _qkv("bias"), bias=True))
    if geometry.qk_norm:
        found += [
            Replicated(
                f"{_MCORE}self_attention.{x}_layernorm.weight",
                (f"{_HF}self_attn.{x}_norm.weight",),
                size=lambda g: g.head_dim,
            )
            for x in "qk"
        ]
    found += [
        InputColumns(
            f"{_MCORE}self_attention.linear_proj.weight",
            (f"{_HF}self_attn.o_proj.weight",),
            inputs=lambda g: g.n_heads * g.head_dim,
        ),
        Replicated(
            f"{_MCORE}pre_mlp_layernorm.weight",
            (f"{_HF}post_attention_layernorm.weight",),
            transformer_engine=f"{_MCORE}mlp.linear_fc1.layer_norm_weight",
        ),
        GateUp(
            f"{_MCORE}mlp.linear_fc1.weight",
            (f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"),
        ),
        InputColumns(f"{_MCORE}mlp.linear_fc2.weight", (f"{_HF}mlp.down_proj.weight",)),
    ]
    return tuple(found)


def dense_mappings(geometry: Geometry) -> Mappings:
    """Every parameter. Tied output weights are the embedding's, so they have no entry of their own."""
    final_norm = Replicated("decoder.final_layernorm.weight", ("model.norm.weight",))
    output = VocabRows("output_layer.weight", ("lm_head.weight",))
    return Mappings(
        embedding=(VocabRows("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),),
        layer=layer(geometry),
        head=(final_norm,) if geometry.tied_embeddings else (final_norm, output),
    )
