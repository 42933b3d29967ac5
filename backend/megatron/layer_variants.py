"""Variants of Megatron's layers and attention that its specs lack, for either layer spec."""

from collections.abc import Callable
from typing import cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slipstream.backend.megatron.local_layers import RMSNorm

WithBias = tuple[Tensor, Tensor | None]
AddResidual = Callable[[WithBias, Tensor, float], Tensor]


class PostNormLayer(TransformerLayer):
    """A layer whose attention and feed-forward network have norms on their outputs too."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        config = self.config
        size = (config, config.hidden_size, config.layernorm_epsilon)
        self.post_attention_layernorm = RMSNorm(*size)
        self.post_mlp_layernorm = RMSNorm(*size)
        self.self_attn_bda = _after(self.post_attention_layernorm, self.self_attn_bda)
        self.mlp_bda = _after(self.post_mlp_layernorm, self.mlp_bda)


def _after(norm: RMSNorm, bda: Callable[[bool, bool], AddResidual]) -> Callable[[bool, bool], AddResidual]:
    """Return Megatron's addition of bias, dropout and residual, behind a norm."""

    def chosen(training: bool, fused: bool) -> AddResidual:
        add = bda(training, fused)

        def add_normed(output: WithBias, residual: Tensor, dropout: float) -> Tensor:
            hidden, bias = output
            return add((norm(hidden if bias is None else hidden + bias), None), residual, dropout)

        return add_normed

    return chosen


class WindowRotaryEmbedding(RotaryEmbedding):
    """The rotary embedding of the layers with a window, where it is another one than that of the model."""


class WindowRopeAttention(SelfAttention):
    """Attention that rotates queries and keys by ``frequencies``, instead of by the model's."""

    def __init__(self, *args: object, frequencies: tuple[float, ...], **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self.window_rotary = WindowRotaryEmbedding(
            2 * len(frequencies),
            rotary_percent=1.0,
            use_cpu_initialization=self.config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )
        self.window_rotary.inv_freq = torch.tensor(
            frequencies, dtype=torch.float32, device=self.window_rotary.inv_freq.device
        )

    def forward(self, *args: object, rotary_pos_emb: Tensor, **options: object) -> WithBias:
        """``rotary_pos_emb``: the model's angles [positions, 1, 1, rotated], of which the length is used."""
        angles = self.window_rotary(rotary_pos_emb.shape[0], packed_seq=True)
        return cast("WithBias", super().forward(*args, rotary_pos_emb=angles, **options))  # pyright: ignore[reportArgumentType]
