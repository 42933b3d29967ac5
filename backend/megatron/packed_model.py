"""A model's parts on this rank, run over packed micro-batches by Megatron's pipeline schedule."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slipstream.backend.batch.context_parallel import ContextShare, share_of
from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import context, head

Head = Callable[..., Any]
"""What is made of the last stage's output [1, T, ...]. In training a loss: (sum, count, anything)."""


class PackedModel:
    """All ranks call its methods together, each with the micro-batches of its data-parallel rank.

    What a method gives for each micro-batch exists on the last pipeline stage; elsewhere it is None.
    """

    def __init__(self, parts: Sequence[torch.nn.Module], device: torch.device) -> None:
        self.parts = list(parts)
        self._device = device

    def run(
        self, microbatches: Sequence[MicroBatch], heads: Sequence[Head], *, forward_only: bool
    ) -> list[Any]:
        """Forward, and backward unless ``forward_only``; what each micro-batch's head gave."""
        given = dict(zip(map(id, microbatches), heads, strict=True))

        def forward(iterator: Iterator[MicroBatch], part: torch.nn.Module) -> tuple[Tensor, Head]:
            micro = next(iterator)
            return self._forward(micro, part), given[id(micro)]

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(microbatches) for _ in self.parts],
            model=self.parts,
            num_microbatches=len(microbatches),
            seq_length=max(len(micro.tokens_T) for micro in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found if parallel_state.is_pipeline_last_stage() else [None] * len(microbatches)

    def evaluate(self, microbatches: Sequence[MicroBatch], head: Callable[..., Tensor]) -> list[Any]:
        """``head(micro, output)`` of every micro-batch, without dropout and without gradients."""
        for part in self.parts:
            part.eval()
        with torch.no_grad():
            heads = [partial(_without_flag, head, micro) for micro in microbatches]
            found = self.run(microbatches, heads, forward_only=True)
        for part in self.parts:
            part.train()
        return found

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def count(self, micro: MicroBatch) -> Tensor:
        """How many tokens with loss this rank has of a micro-batch: what Megatron sums over ranks."""
        return torch.tensor(len(self._share(micro).index_m), dtype=torch.int, device=self._device)

    def gathered(self, micro: MicroBatch, own_m: Tensor) -> Tensor:
        """What is said of the M tokens with loss, of which this rank has ``own_m`` (context parallelism)."""
        share = self._share(micro)
        if len(share.counts) == 1:
            return own_m
        group = parallel_state.get_context_parallel_group()
        return context.gathered(own_m, share.counts, self.tensor(share.order_M), group)

    def _share(self, micro: MicroBatch) -> ContextShare:
        size = parallel_state.get_context_parallel_world_size()
        return share_of(micro, size, parallel_state.get_context_parallel_rank())

    def _forward(self, micro: MicroBatch, part: torch.nn.Module) -> Tensor:
        cu_seqlens = self.tensor(micro.cu_seqlens)
        share = self._share(micro)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=micro.longest,
            max_seqlen_kv=micro.longest,
        )
        if len(share.counts) > 1:
            packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = cu_seqlens
        return part(
            input_ids=self.tensor(share.tokens_t)[None],
            position_ids=self.tensor(share.position_t)[None],
            attention_mask=None,
            packed_seq_params=packed,
        )


def _without_flag(
    head: Callable[..., Tensor], micro: MicroBatch, output: Tensor, non_loss_data: bool = True
) -> Tensor:
    """Megatron calls what is no loss with this flag."""
    return head(micro, output)


class LanguageModel(PackedModel):
    """Gives log-probs of the tokens that carry loss. Its last part gives hidden states (``head``).

    vocab: the true size of the vocabulary. ``float32_logits``: as in ``fused_logprob``.
    """

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        device: torch.device,
        *,
        vocab: int,
        float32_logits: bool,
    ) -> None:
        super().__init__(parts, device)
        self._vocab = vocab
        self._float32_logits = float32_logits

    def log_probs(self, microbatches: Sequence[MicroBatch], temperature: float) -> list[Tensor | None]:
        """[M] of every micro-batch."""

        def found(micro: MicroBatch, hidden_1TH: Tensor) -> Tensor:
            return self.logprob_and_entropy(micro, hidden_1TH, temperature)[0]

        return self.evaluate(microbatches, found)

    def logprob_and_entropy(
        self,
        micro: MicroBatch,
        hidden_1TH: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """[M] each, on the last stage. The entropies have a gradient only when asked for."""
        last, share = self.parts[-1], self._share(micro)
        logp_m, entropy_m = head.logprob_and_entropy(
            getattr(last, "module", last),
            hidden_1TH,
            self.tensor(share.index_m),
            self.tensor(share.target_m),
            temperature=temperature,
            vocab=self._vocab,
            float32_logits=self._float32_logits,
            entropy_gradient=entropy_gradient,
        )
        return self.gathered(micro, logp_m), self.gathered(micro, entropy_m)


class ValueModel(PackedModel):
    """Gives a value for each token that carries loss, of what precedes it. It ends in a ``ValueHead``."""

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """float32 [M] of every micro-batch."""
        return self.evaluate(microbatches, self.values_of)

    def values_of(self, micro: MicroBatch, output_1T1: Tensor) -> Tensor:
        """The same on the last stage, from its output."""
        index_m = self.tensor(self._share(micro).index_m)
        return self.gathered(micro, output_1T1[0, :, 0].index_select(0, index_m))
