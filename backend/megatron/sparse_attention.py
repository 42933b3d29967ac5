"""Sparse attention of DeepSeek-V3.2 for packs: attention to the tokens that an indexer gives the best scores.

    score(t, s) = sum over heads h of w_h(t) * relu(q_h(t) . k(s))        s <= t

    (DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention, equation 1)

DeepSeek's code transforms q and k by the same orthogonal matrix, so that they can be rounded to 8 bits. Here
they are not rounded, and the transform cancels.

The choice has no gradient, so no loss of the policy reaches the indexer: its parameters are frozen. Every
tensor-parallel rank holds all of it and chooses for all tokens.
"""

from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from slipstream.backend.megatron.device_batch import Pack, Unpacked
from slipstream.backend.megatron.local_layers import PackedAttention
from slipstream.backend.megatron.rotation import rotated
from slipstream.bridge.model.geometry import Indexer


class TokenIndexer(torch.nn.Module):
    """Chooses the tokens that each token attends to. The names of its parameters are those of HF."""

    def __init__(self, config: MLATransformerConfig, indexer: Indexer) -> None:
        super().__init__()
        self.indexer = indexer

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return cast(
                "torch.nn.Linear",
                torch.nn.utils.skip_init(
                    torch.nn.Linear, inputs, outputs, bias=False, dtype=config.params_dtype
                ),
            )

        assert config.q_lora_rank is not None
        self.wq_b = linear(config.q_lora_rank, indexer.heads * indexer.dim)
        self.wk = linear(config.hidden_size, indexer.dim)
        self.k_norm = torch.nn.LayerNorm(indexer.dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, indexer.heads)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self,
        hidden_TH: Tensor,
        query_TR: Tensor,
        angles: Tensor,
        factor: float,
        pack: Pack,
        unpacked: Unpacked,
    ) -> list[Tensor | None]:
        """Return for each padded batch what its tokens attend to, bool [N, 1, L, L]; None: all before them.

        query_TR: the normed low-rank queries. angles, factor: ``freqs`` and ``mscale`` of ``rotated``.
        """
        heads, dim, most = self.indexer.heads, self.indexer.dim, self.indexer.tokens
        if all(length <= most for _, length in unpacked.shapes):
            return [None] * len(unpacked.shapes)
        query = self.wq_b(query_TR).unflatten(-1, (heads, dim))
        key = self.k_norm(self.wk(hidden_TH).float()).to(query.dtype)[:, None]
        boundaries = pack.cu_seqlens_q
        assert boundaries is not None
        query, key = (
            rotated(part, boundaries, angles, multi_latent_attention=self.indexer.interleaved, mscale=factor)
            for part in (query, key)
        )
        weight = self.weights_proj(hidden_TH).float() * heads**-0.5
        padded = zip(*map(unpacked.padded, (query, key[:, 0], weight)), strict=True)
        return [
            self._chosen(*parts) if length > most else None
            for (_, length), parts in zip(unpacked.shapes, padded, strict=True)
        ]

    def _chosen(self, query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
        """query [N, L, heads, d], key [N, L, d], weight [N, L, heads] -> bool [N, 1, L, L]."""
        rows, length, heads, dim = query.shape
        key = key.float().transpose(1, 2)
        scores = torch.zeros(rows, length, length, device=query.device)
        for head in range(heads):  # one at a time: the scores of all heads would take as much memory each
            scores += weight[:, :, head, None] * F.relu(query[:, :, head].float() @ key * dim**-0.5)
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        best = scores.masked_fill_(~causal, -torch.inf).topk(self.indexer.tokens, dim=-1).indices
        chosen = torch.zeros(rows, length, length, dtype=torch.bool, device=query.device)
        return (chosen.scatter_(-1, best, True) & causal)[:, None]


class SparseAttention(PackedAttention):
    """Packed attention to the tokens that the indexer of the layer has chosen."""

    def masks(self, pack: Pack, unpacked: Unpacked) -> list[Tensor | None]:
        # Selective recomputation runs this a second time, without the projections before it.
        if self.config.recompute_granularity == "selective":
            return pack.chosen[self.layer_number]
        return pack.chosen.pop(self.layer_number)


class SparseLatentAttention(MLASelfAttention):
    """Latent attention with an indexer, which it runs beside its projections."""

    def __init__(self, *args: object, indexer: Indexer, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self.indexer = TokenIndexer(self.config, indexer)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Pack | None = None,
        *args: object,
        **options: object,
    ) -> tuple[Tensor, ...]:
        """Leave the choice in the pack, where the core attention of the layer finds it."""
        made = cast(
            "tuple[Tensor, ...]",
            super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params, *args, **options
            ),
        )
        if packed_seq_params is None or packed_seq_params.unpacked is None:
            raise ValueError("sparse attention takes packs that are made for the local layer spec only")
        # As the attention itself, so that both get the same angles.
        embedding = self.rotary_pos_emb(packed_seq_params.max_seqlen_q, packed_seq=True)
        angles, factor = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
        with torch.no_grad():
            hidden, query = hidden_states[:, 0], made[3]
            if self.config.sequence_parallel:
                hidden, query = (
                    gather_from_sequence_parallel_region(part, group=self.tp_group)
                    for part in (hidden, query)
                )
        packed_seq_params.chosen[self.layer_number] = self.indexer(
            hidden, query, angles, factor, packed_seq_params, packed_seq_params.unpacked
        )
        return made
