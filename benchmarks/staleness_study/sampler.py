"""Samples completions from a fixed copy of a small Qwen3, a whole batch at a time, with a KV cache.

The sampler takes the place of the engine: it returns tokens with their log-probs under its weights, which the
trainer uses as the behaviour policy. It computes the model itself, in half the time of transformers.

Prompts are padded on the left, so that all rows decode at the same column. Every few steps, finished rows
leave the batch.

Shapes: B rows, T columns of the cache, H hidden, Q query heads, K key/value heads, D head width, V symbols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from slipstream.backend.quickstart.tokenizer import EOS, IDS, PAD

END_ID, PAD_ID = IDS[EOS], IDS[PAD]

Precision = Literal["float32", "bfloat16", "float8"]
"""How an engine computes. ``float8``: linear layers multiply weights in e4m3 with a scale per output channel
and inputs in e4m3 with a scale per token, and add up in float32; everything else is bfloat16."""

COMPACT_EVERY = 4
"""Number of decoding steps after which finished rows are counted again."""
COMPACT_BELOW = 0.8
"""Share of unfinished rows at or below which finished rows are removed."""


LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class SampledCompletion:
    """Tokens that the policy sampled for one prompt, with their log-probs."""

    tokens: list[int]
    """Sampled tokens, with the end token if there is one."""
    logps: list[float]
    ended: bool
    """True if the end token came within the longest length."""


@dataclass(frozen=True)
class _Layer:
    norm_attention_H: Tensor
    qkv: Tensor
    norm_heads: Tensor
    """[Q + K, D]"""
    out: Tensor
    norm_mlp_H: Tensor
    gate_up: Tensor
    down: Tensor


class Sampler:
    """A copy of the present policy. Later changes of ``policy`` have no effect on it."""

    @torch.inference_mode()
    def __init__(self, policy: Qwen3ForCausalLM, precision: Precision = "float32") -> None:
        """``precision``: of weights, cache and sums. Log-probs are computed from logits in float32."""
        self._float8 = precision == "float8"
        self._dtype = torch.float32 if precision == "float32" else torch.bfloat16
        config = policy.config
        assert config.num_key_value_heads is not None and config.head_dim is not None
        assert config.rope_parameters is not None
        self._queries, self._keys = config.num_attention_heads, config.num_key_value_heads
        self._width, self._eps = config.head_dim, config.rms_norm_eps
        self._embedding_VH = self._copy(policy.model.embed_tokens.weight)
        self._norm_H = self._copy(policy.model.norm.weight)
        self._layers = [
            _Layer(
                self._copy(layer.input_layernorm.weight),
                self._matrix(*(getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv")),
                torch.cat(
                    [
                        self._copy(layer.self_attn.q_norm.weight).expand(self._queries, -1),
                        self._copy(layer.self_attn.k_norm.weight).expand(self._keys, -1),
                    ]
                ),
                self._matrix(layer.self_attn.o_proj.weight),
                self._copy(layer.post_attention_layernorm.weight),
                self._matrix(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
                self._matrix(layer.mlp.down_proj.weight),
            )
            for layer in cast(list[Qwen3DecoderLayer], list(policy.model.layers))
        ]
        half = torch.arange(0, self._width, 2, dtype=torch.float32) / self._width
        theta = cast(float, config.rope_parameters["rope_theta"])
        angles = torch.arange(config.max_position_embeddings)[:, None] / theta ** torch.cat([half, half])
        self._cos, self._sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def _copy(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self._dtype, copy=True)

    def _matrix(self, *parts: Tensor) -> Tensor:
        """Return the weight of a linear layer from its parts, one below the other."""
        weight = torch.cat([self._copy(part) for part in parts])
        return rounded_to_float8(weight.float()) if self._float8 else weight

    def sample(
        self, prompts: Sequence[Sequence[int]], generator: torch.Generator, *, longest: int
    ) -> list[SampledCompletion]:
        """Sample a completion of at most ``longest`` tokens for each prompt, at temperature 1."""
        return self._generate(prompts, generator, longest)

    def greedy(self, prompts: Sequence[Sequence[int]], *, longest: int) -> list[SampledCompletion]:
        """Complete each prompt with the most likely tokens."""
        return self._generate(prompts, None, longest)

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], generator: torch.Generator | None, longest: int
    ) -> list[SampledCompletion]:
        widest = max(map(len, prompts))
        tokens_BT = torch.tensor([[PAD_ID] * (widest - len(row)) + list(row) for row in prompts])
        first_B = torch.tensor([widest - len(row) for row in prompts])
        columns = widest + longest
        cache = _Cache(
            len(self._layers), len(prompts), self._keys, columns, self._width, first_B, self._dtype
        )
        row_B = torch.arange(len(prompts))
        ended_B = torch.zeros(len(prompts), dtype=torch.bool)
        sampled_tokens = torch.full((len(prompts), longest), PAD_ID)
        sampled_logps = torch.zeros(len(prompts), longest)
        for step in range(longest):
            logp_BV = self._forward(tokens_BT, cache).log_softmax(-1)
            chosen_B = _choose(logp_BV, generator)
            sampled_tokens[row_B, step] = chosen_B.masked_fill(ended_B, PAD_ID)
            sampled_logps[row_B, step] = logp_BV.gather(1, chosen_B[:, None])[:, 0]
            ended_B = ended_B | (chosen_B == END_ID)
            tokens_BT = chosen_B[:, None]
            if step % COMPACT_EVERY == 0:
                alive_B = (~ended_B).nonzero()[:, 0]
                if not len(alive_B):
                    break
                if len(alive_B) <= COMPACT_BELOW * len(ended_B):
                    cache.keep(alive_B)
                    row_B, ended_B, tokens_BT = row_B[alive_B], ended_B[alive_B], tokens_BT[alive_B]
        return [
            _completed(tokens, logps)
            for tokens, logps in zip(sampled_tokens.tolist(), sampled_logps.tolist(), strict=True)
        ]

    def _forward(self, tokens_Bt: Tensor, cache: "_Cache") -> Tensor:
        """Add t new columns to the cache, and return logits [B, V] after the last of them."""
        rows, new = tokens_Bt.shape
        column_t = torch.arange(cache.filled, cache.filled + new)
        position_Bt = (column_t - cache.first_B[:, None]).clamp(min=0)
        cos, sin = self._cos[position_Bt][:, :, None], self._sin[position_Bt][:, :, None]
        end = cache.filled + new
        mask = cache.mask[..., :end] if new == 1 else self._prefill_mask(cache.first_B, column_t)
        x = self._embedding_VH[tokens_Bt]
        for number, layer in enumerate(self._layers):
            qkv = self._linear(self._norm(x, layer.norm_attention_H), layer.qkv)
            heads = qkv.view(rows, new, self._queries + 2 * self._keys, self._width)
            mixing, v = heads.split([self._queries + self._keys, self._keys], dim=2)
            mixing = F.rms_norm(mixing, (self._width,), None, self._eps) * layer.norm_heads
            q, k = _rotated(mixing, cos, sin).split([self._queries, self._keys], dim=2)
            k, v = cache.extend(number, k.transpose(1, 2), v.transpose(1, 2))
            x = x + self._linear(self._attention(q, k, v, mask), layer.out)
            gate, up = self._linear(self._norm(x, layer.norm_mlp_H), layer.gate_up).chunk(2, dim=-1)
            x = x + self._linear(F.silu(gate) * up, layer.down)
        cache.filled = end
        return (self._norm(x[:, -1], self._norm_H) @ self._embedding_VH.T).float()

    def _prefill_mask(self, first_B: Tensor, column_t: Tensor) -> Tensor:
        """Return what is added to scores [B, 1, t, t] of the first t columns."""
        visible = (column_t >= first_B[:, None])[:, None, :] & (column_t <= column_t[:, None])
        # A column of padding sees itself, because a softmax over nothing is NaN.
        visible = (visible | (column_t == column_t[:, None]))[:, None]
        return torch.zeros_like(visible, dtype=self._dtype).masked_fill(~visible, -torch.inf)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Return [B, t, Q * D] from q [B, t, Q, D], k and v [B, K, T, D] and ``mask`` [B, 1, t, T]."""
        rows, new = q.shape[:2]
        if new > 1:
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
            ).transpose(1, 2)
        else:
            # The query heads of a key head take the place of positions, so that its keys are read once.
            q = q.view(rows, self._keys, -1, self._width)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.reshape(rows, new, -1)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._float8:
            return (rounded_to_float8(x.float()) @ weight.T).to(self._dtype)
        return x @ weight.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)


class _Cache:
    """Keys and values [B, K, T, D] of every layer. The first ``filled`` columns are in use."""

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        columns: int,
        width: int,
        first_B: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.filled = 0
        self.first_B = first_B
        """Column of each row's first token, after the padding."""
        hidden_BT = torch.arange(columns) < first_B[:, None]
        self.mask = torch.zeros(rows, 1, 1, columns, dtype=dtype)
        """What is added to the scores of a new column: -inf for padding."""
        self.mask.masked_fill_(hidden_BT[:, None, None], -torch.inf)
        self._parts = [torch.zeros(2, rows, heads, columns, width, dtype=dtype) for _ in range(layers)]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.filled + k.shape[2]
        part = self._parts[layer]
        part[0, :, :, self.filled : end] = k
        part[1, :, :, self.filled : end] = v
        return part[0, :, :, :end], part[1, :, :, :end]

    def keep(self, row_B: Tensor) -> None:
        self.first_B, self.mask = self.first_B[row_B], self.mask[row_B]
        self._parts = [part[:, row_B] for part in self._parts]


def rounded_to_float8(x: Tensor) -> Tensor:
    """Return ``x`` rounded to e4m3, with a scale for each row of the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / LARGEST_FLOAT8
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _completed(tokens: list[int], logps: list[float]) -> SampledCompletion:
    ended = END_ID in tokens
    length = tokens.index(END_ID) + 1 if ended else len(tokens)
    return SampledCompletion(tokens[:length], logps[:length], ended)


def _choose(logp_BV: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return logp_BV.argmax(-1)
    # Of exponential times with rates p, time v is the smallest with probability p_v.
    times_BV = torch.empty_like(logp_BV).exponential_(generator=generator)
    return (logp_BV - times_BV.log()).argmax(-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
