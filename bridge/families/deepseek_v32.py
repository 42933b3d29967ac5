"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention.

The indexer, which chooses the tokens that a token attends to, is loaded, exported and not trained: no
gradient passes through a choice. The norms inside of latent attention use the config's epsilon, as in the
engines; transformers has 1e-6 there, whatever the config says.
"""

from dataclasses import replace

from slipstream.bridge.families import deepseek_v3
from slipstream.bridge.families.glm4_moe_lite import dense_layers
from slipstream.bridge.families.parts import decoder as mappings
from slipstream.bridge.hf.config import HfConfig, UnsupportedModel, integers, refuse
from slipstream.bridge.model.geometry import Geometry, Indexer, LatentAttention

__all__ = ["geometry", "mappings"]


def geometry(hf: HfConfig) -> Geometry:
    heads, dim, tokens, layers, _ = integers(
        hf, "index_n_heads", "index_head_dim", "index_topk", "num_hidden_layers", "q_lora_rank"
    )
    refuse(
        hf,
        index_topk_freq=(1, None),
        index_topk_pattern=("F" * layers, None),
        layer_types=(["deepseek_sparse_attention"] * layers, None),
    )
    if hf.get("indexer_types", ["full"] * layers) != ["full"] * layers:
        raise UnsupportedModel(
            f"{hf['model_type']}: indexer_types is {hf['indexer_types']!r} in config.json, expected {layers} "
            "times 'full': layers that share the choice of a layer before them are not mapped, because they "
            "may be in another pipeline stage"
        )
    plain = deepseek_v3.geometry({**hf, "first_k_dense_replace": dense_layers(hf, default=3)})
    assert isinstance(plain.attention, LatentAttention)
    indexer = Indexer(heads, dim, tokens, interleaved=bool(hf.get("indexer_rope_interleave", False)))
    return replace(plain, attention=replace(plain.attention, indexer=indexer))
