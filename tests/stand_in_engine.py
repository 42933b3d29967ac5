"""The modules of Transformer Engine that Megatron's layer spec is made of, in plain PyTorch, for one
tensor-parallel rank.

Transformer Engine cannot even be imported without a GPU. With these in its place Megatron's own wrappers run:
what they are called with, which parameters they have and under which names is what is tested with them.
"""

import contextlib
import sys
import types
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import Module, Parameter

VERSION = "2.12.0"
"""The first one whose attention has sinks for packed sequences."""


class _Linear(Module):
    names: tuple[str, ...] = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype,
        tp_size: int = 1,
        bias: bool,
        return_bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        if tp_size != 1:
            raise NotImplementedError("these are for one tensor-parallel rank")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.return_bias = return_bias
        for name in self.names:
            weight = Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
            self.register_parameter(name, weight)
        bias_value = Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None
        self.register_parameter("bias", bias_value)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...

    def linear(self, hidden: Tensor) -> Any:
        out = F.linear(hidden, self.weight, None if self.return_bias else self.bias)
        return (out, self.bias) if self.return_bias else out


class Linear(_Linear):
    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self.linear(hidden)


class LayerNormLinear(_Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(in_features, out_features, **rest)
        self.eps, self.offset = eps, int(zero_centered_gamma)
        self.layer_norm_weight = Parameter(torch.ones(in_features, dtype=rest["params_dtype"]))
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = Parameter(torch.zeros(in_features, dtype=rest["params_dtype"]))

    def forward(self, hidden: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight = self.offset + self.layer_norm_weight
        return self.linear(_normed(hidden, weight, self.layer_norm_bias, self.eps))


def _normed(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    return F.layer_norm(hidden, weight.shape, weight, bias, eps)


class GroupedLinear(_Linear):
    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, bias: bool, **rest: Any
    ) -> None:
        self.num_gemms = num_gemms
        self.names = tuple(f"weight{i}" for i in range(num_gemms))
        super().__init__(in_features, out_features, bias=False, **rest)
        self.use_bias = bias
        for i in range(num_gemms):
            value = Parameter(torch.zeros(out_features, dtype=rest["params_dtype"])) if bias else None
            self.register_parameter(f"bias{i}", value)
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def forward(self, hidden: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        out = torch.cat(
            [
                F.linear(part, getattr(self, name), bias)
                for part, name, bias in zip(hidden.split(list(m_splits)), self.names, added, strict=True)
            ]
        )
        return (out, biases) if self.return_bias else out


class RMSNorm(Module):
    def __init__(
        self, *, eps: float, params_dtype: torch.dtype, zero_centered_gamma: bool = False, **rest: Any
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, int(zero_centered_gamma)
        size = rest.get("normalized_shape", rest.get("hidden_size"))  # Megatron-Core 0.19 and 0.16
        self.weight = Parameter(torch.ones(size, dtype=params_dtype))
        self.bias = None

    def forward(self, hidden: Tensor) -> Tensor:
        return _normed(hidden, self.offset + self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.bias = Parameter(torch.zeros_like(self.weight))


class DotProductAttention(Module):
    """With a context-parallel group the keys and values of all its ranks are gathered."""

    def __init__(
        self,
        *,
        num_attention_heads: int,
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        cp_group: Any = None,
        window_size: tuple[int, int] | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.softmax_offset = (
            Parameter(torch.zeros(num_attention_heads)) if softmax_type == "learnable" else None
        )
        self.before = None if window_size is None else window_size[0]
        if window_size is not None and window_size[1] != 0:
            raise NotImplementedError("these attend to no tokens behind their own")
        self.group = cp_group

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        qkv_format: str,
        attn_mask_type: str,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q_padded: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if (qkv_format, attn_mask_type) != ("thd", "padding_causal"):
            raise NotImplementedError(f"{qkv_format}, {attn_mask_type}")
        ends = cu_seqlens_q.tolist()
        if max(b - a for a, b in pairwise(ends)) != max_seqlen_q:
            raise ValueError(f"the longest sequence of {ends} has not {max_seqlen_q} tokens")
        size, rank = (self.group.size(), self.group.rank()) if self.group else (1, 0)
        places = [torch.tensor(places_of(ends, size, one)) for one in range(size)]
        if size > 1:
            if cu_seqlens_q_padded is None or not torch.equal(cu_seqlens_q_padded, cu_seqlens_q):
                raise ValueError("context parallelism asks for cu_seqlens_q_padded")
            order = torch.cat(places).argsort()
            key, value = (torch.cat(all_gather(part, self.group))[order] for part in (key, value))
        grouped, outputs, done = query.shape[1] != key.shape[1], [], 0
        for start, end in pairwise(ends):
            here = places[rank][(places[rank] >= start) & (places[rank] < end)]
            q = query[done : done + len(here)].transpose(0, 1)[None]
            k, v = (part[start:end].transpose(0, 1)[None] for part in (key, value))
            keys = torch.arange(start, end)
            mask = keys <= here[:, None]
            if self.before is not None:
                mask &= keys >= here[:, None] - self.before
            if self.softmax_offset is not None:
                attended = self.with_sinks(q, k, v, mask)
            else:
                attended = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=self.softmax_scale, enable_gqa=grouped
                )
            outputs.append(attended[0].transpose(0, 1).flatten(1))
            done += len(here)
        return torch.cat(outputs)

    def with_sinks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        each = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(each, dim=1) for part in (key, value))
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = (scale * query @ key.transpose(2, 3)).masked_fill(~mask, -torch.inf)
        sinks = self.softmax_offset[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ value


def places_of(ends: list[int], size: int, rank: int) -> list[int]:
    """Of the tokens of packed sequences that Transformer Engine expects on a context-parallel rank."""
    found = []
    for start, end in pairwise(ends):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank) if size > 1 else (0, 1):
            last = end if size == 1 and number == 1 else start + (number + 1) * chunk
            found += range(start + number * chunk, last)
    return found


class _NotThere(types.ModuleType):
    """Has a class of any name: Megatron's wrappers for other things inherit from them when it is imported."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        made = type(name, (Module,), {})
        setattr(self, name, made)
        return made


def install() -> None:
    """Before Megatron is imported, in a process that ends with the test."""
    modules = {}
    for name in (
        "",
        ".common",
        ".common.recipe",
        ".pytorch",
        ".pytorch.fp8",
        ".pytorch.ops",
        ".pytorch.router",
        ".pytorch.tensor",
        ".pytorch.distributed",
    ):
        kind = types.ModuleType if name in ("", ".pytorch.fp8") else _NotThere
        module = modules[name] = kind(f"transformer_engine{name}")
        module.__path__ = []  # so that there is nothing else in it
        module.__spec__ = types.SimpleNamespace(name=module.__name__)
        sys.modules[module.__name__] = module
        if name:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, module)
    modules[""].__version__ = VERSION
    for made in (Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm, DotProductAttention):
        setattr(modules[".pytorch"], made.__name__, made)

    class FP8GlobalStateManager:
        @staticmethod
        def is_fp8_enabled() -> bool:
            return False

    for name in ("topk_with_score_function", "compute_score_for_moe_aux_loss", "moe_aux_loss"):
        setattr(modules[".pytorch.router"], f"fused_{name}", None)
    modules[".pytorch.distributed"].activation_recompute_forward = contextlib.nullcontext
    modules[".pytorch.fp8"].FP8GlobalStateManager = FP8GlobalStateManager
    for name in ("fp8_autocast", "fp8_model_init"):
        setattr(modules[".pytorch.fp8"], name, contextlib.nullcontext)
