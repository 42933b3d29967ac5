"""A model's parts on this rank, run over packed micro-batches by Megatron's pipeline schedule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slipstream.backend.batch.context_parallel import ContextShare, share_of
from slipstream.backend.batch.micro_batch import MicroBatch
from slipstream.backend.megatron import head
from slipstream.backend.megatron.delta_net import PackedDeltaNet
from slipstream.backend.megatron.device_batch import DeviceBatch, copied, moved_together, on_device
from slipstream.backend.megatron.groups import groups
from slipstream.backend.megatron.local_layers import PackedAttention
from slipstream.backend.megatron.router import Router, RouteReplay
from slipstream.backend.megatron.sparse_attention import SparseAttention
from slipstream.backend.objective.distillation import divergence_from_top_tokens
from slipstream.backend.objective.logprob import (
    Implementation,
    fused_logprob,
    fused_logprob_and_entropy,
    fused_logprobs,
)
from slipstream.configs.schema import RoutingReplay
from slipstream.rollout.tokens.teacher import TeacherScores

R = TypeVar("R")

LossHead = Callable[[Tensor], tuple[Tensor, Tensor, R]]
"""From the last stage's output [1, T, ...] to (sum of token losses, number of tokens, any result): what
Megatron asks for with a loss per token."""


class _Gather(torch.autograd.Function):
    """Gives each context-parallel rank the values of all, in the order of the ranks, so that a loss can be
    about whole trajectories.

    Every rank of the group computes the same loss. Gradients flow back only to the rank's own values; the
    gradients of the weights are summed over the group as over replicas.
    """

    @staticmethod
    def forward(ctx: Any, local_m: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        rank = group.rank()
        padded = local_m.new_zeros(max(1, *counts))  # an idle micro-batch has no values
        padded[: len(local_m)] = local_m
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group)
        # This rank's part of the gathered values.
        ctx.held = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_M,) = grads
        return grad_M[ctx.held], None, None


class PackedModel:
    """A model that takes packed micro-batches.

    All ranks call its methods together, each with the micro-batches of its data-parallel rank.

    replay: where the experts of tokens come from (``actor.routing_replay``). ``recompute``: updates take
    those of the pass before whose ``routes_kept``. ``rollout``: every pass takes those of the engine, where
    they are known, and updates take the rest as with ``recompute``.
    """

    def __init__(
        self, parts: Sequence[torch.nn.Module], device: torch.device, *, replay: RoutingReplay = "off"
    ) -> None:
        self.parts = list(parts)
        self._device = device
        modules = [module for part in parts for module in part.modules()]
        self._unpacks = any(isinstance(module, PackedAttention | PackedDeltaNet) for module in modules)
        self._shares = not any(
            isinstance(module, PackedDeltaNet | SparseAttention)
            or not isinstance(getattr(module, "core_attention", None), PackedAttention | None)
            for module in modules
        )
        self._routers = [module for module in modules if isinstance(module, Router)]
        self._replay: RoutingReplay = replay
        self._replays = {id(part): _with_replays(part) if replay != "off" else [] for part in self.parts}
        """By the id of each part: its routers, in their order, each with a replay."""
        self._routes: dict[int, tuple[MicroBatch, dict[int, list[Tensor]]]] = {}
        """By the id of a micro-batch: the micro-batch, which is kept so that no other gets its id, and by the
        id of each part the routes of its routers."""
        self._keeps_routes = False
        self._on_device: dict[int, DeviceBatch] = {}
        self._in_pass = False

    def train(self, microbatches: Sequence[MicroBatch], heads: Sequence[LossHead[R]]) -> list[R]:
        """Run forward and backward passes, and return the results of the heads.

        There is one head for each micro-batch. The list is empty except on the last pipeline stage.
        """
        if self._routers:
            tokens = sum(len(micro.tokens_T) for micro in microbatches)
            with_loss = sum(len(micro.index_M) for micro in microbatches)
            for router in self._routers:
                router.loss_share = with_loss / tokens
        for _, replay in chain.from_iterable(self._replays.values()):
            replay.begin_update()
        results = cast("list[R]", self._run(microbatches, heads, forward_only=False))
        for micro in microbatches:
            self._routes.pop(id(micro), None)
        return results if groups.is_pipeline_last_stage() else []

    def evaluate(
        self, microbatches: Sequence[MicroBatch], head: Callable[[MicroBatch, Tensor], Tensor]
    ) -> list[Tensor | None]:
        """Return ``head(micro, output)`` of every micro-batch, without dropout and without gradients.

        The results are None except on the last pipeline stage.
        """
        for part in self.parts:
            part.eval()
        with torch.no_grad():
            heads = [partial(_without_flag, head, micro) for micro in microbatches]
            results = cast("list[Tensor | None]", self._run(microbatches, heads, forward_only=True))
        for part in self.parts:
            part.train()
        return results if groups.is_pipeline_last_stage() else [None] * len(microbatches)

    def _run(
        self,
        microbatches: Sequence[MicroBatch],
        heads: Sequence[Callable[..., object]],
        *,
        forward_only: bool,
    ) -> list[object]:
        head_of = dict(zip(map(id, microbatches), heads, strict=True))
        self._in_pass = True

        def forward(
            iterator: Iterator[MicroBatch], part: torch.nn.Module
        ) -> tuple[Tensor, Callable[..., object]]:
            micro = next(iterator)
            return self._routed(micro, part, trains=not forward_only), head_of[id(micro)]

        try:
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(microbatches) for _ in self.parts],
                model=self.parts,
                num_microbatches=len(microbatches),
                seq_length=max(len(micro.tokens_T) for micro in microbatches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        finally:
            self._in_pass = False
            self._on_device.clear()

    def on_device(self, micro: MicroBatch) -> DeviceBatch:
        """Return a micro-batch on the device.

        It is copied at its first use in a pass over micro-batches and dropped at the end of that pass.
        """
        known = self._on_device.get(id(micro))
        if known is None:
            if len(micro.taken_R3) and not self._shares:
                raise ValueError("the attention of this model cannot compute shared prefixes once")
            known = on_device(micro, self._share(micro), self._device, unpacks=self._unpacks)
            if self._in_pass:
                self._on_device[id(micro)] = known
        return known

    def moved_together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return ``tensors`` in float32 on the device, where those on the host travel in one copy."""
        return moved_together(tensors, self._device)

    def gathered(self, micro: MicroBatch, local_m: Tensor) -> Tensor:
        """Return the values [M] of all ranks' tokens with loss, of which this rank has ``local_m``."""
        batch = self.on_device(micro)
        if len(batch.counts) == 1:
            return local_m
        group = groups.get_context_parallel_group()
        return _Gather.apply(local_m, batch.counts, group)[batch.order_M]

    def _share(self, micro: MicroBatch) -> ContextShare:
        size = groups.get_context_parallel_world_size()
        return share_of(micro, size, groups.get_context_parallel_rank())

    @contextmanager
    def routes_kept(self) -> Iterator[None]:
        """Keep the experts that tokens take in the passes inside, for the next update of each micro-batch."""
        self._routes.clear()
        self._keeps_routes = True
        try:
            yield
        finally:
            self._keeps_routes = False

    def _routed(self, micro: MicroBatch, part: torch.nn.Module, *, trains: bool) -> Tensor:
        """Run a part forward, with the kept routes if it ``trains``, or with those of the engine."""
        replays = self._replays[id(part)]
        _, kept = self._routes.get(id(micro), (micro, dict[int, list[Tensor]]()))
        given = kept.get(id(part)) if trains else None
        for number, (router, replay) in enumerate(replays):
            routes = self._engines_routes(micro, router) if given is None else given[number]
            replay.begin(routes, trains=trains)
        output = self._forward(micro, part)
        if replays and self._keeps_routes:
            chosen = [replay.chosen_tk for _, replay in replays if replay.chosen_tk is not None]
            self._routes.setdefault(id(micro), (micro, {}))[1][id(part)] = chosen
        return output

    def _engines_routes(self, micro: MicroBatch, router: Router) -> Tensor | None:
        """Return the engine's experts [t, k] of the tokens that come to a router of this rank, below 0 where
        they are not known; None: the recipe does not ask for them, or they are not known of any token."""
        routes_tW = self.on_device(micro).routes_tW if self._replay == "rollout" else None
        if routes_tW is None:
            return None
        assert router.layer_number is not None
        first = (router.layer_number - 1) * router.topk
        routes_tk = routes_tW[:, first : first + router.topk]
        if not router.config.sequence_parallel:
            return routes_tk
        size, rank = groups.get_tensor_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()
        return routes_tk.chunk(size)[rank]

    def _forward(self, micro: MicroBatch, part: torch.nn.Module) -> Tensor:
        batch = self.on_device(micro)
        return part(
            input_ids=batch.tokens_t[None],
            position_ids=batch.position_t[None],
            attention_mask=None,
            packed_seq_params=batch.pack,
        )


def _with_replays(part: torch.nn.Module) -> list[tuple[Router, RouteReplay]]:
    """Give each router of a part a replay of its own, and return both."""
    replays: list[tuple[Router, RouteReplay]] = []
    for router in part.modules():
        if isinstance(router, Router):
            replay = RouteReplay()
            replays.append((router, replay))
            router.router_replay = replay  # pyright: ignore[reportAttributeAccessIssue]
    return replays


def _without_flag(
    head: Callable[[MicroBatch, Tensor], Tensor],
    micro: MicroBatch,
    output: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    """Call a head; Megatron passes this flag to a head that computes no loss."""
    return head(micro, output)


class LanguageModel(PackedModel):
    """A model that gives log-probs of the tokens that carry loss. Its last part ends in hidden states.

    vocab: the true size of the vocabulary. float32_logits, implementation: as in ``HeadOptions``.
    """

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        device: torch.device,
        *,
        vocab: int,
        float32_logits: bool,
        implementation: Implementation,
        replay: RoutingReplay = "off",
    ) -> None:
        super().__init__(parts, device, replay=replay)
        self._vocab = vocab
        self._float32_logits = float32_logits
        self._implementation: Implementation = implementation

    def log_probs(self, microbatches: Sequence[MicroBatch], temperature: float) -> list[Tensor | None]:
        """Return log-probs [M] of every micro-batch; None except on the last pipeline stage."""

        def logp_of(micro: MicroBatch, hidden_1TH: Tensor) -> Tensor:
            logp_m = fused_logprob(*self._head_inputs(micro, hidden_1TH, temperature))
            return self.gathered(micro, logp_m)

        return self.evaluate(microbatches, logp_of)

    def logprob_and_entropy(
        self,
        micro: MicroBatch,
        hidden_1TH: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, [M] each, from the output of the last stage.

        entropy_gradient: make the entropies differentiable.
        """
        inputs = self._head_inputs(micro, hidden_1TH, temperature)
        logp_m, entropy_m = fused_logprob_and_entropy(*inputs, entropy_gradient=entropy_gradient)
        return self.gathered(micro, logp_m), self.gathered(micro, entropy_m)

    def logprob_entropy_and_divergence(
        self,
        micro: MicroBatch,
        hidden_1TH: Tensor,
        temperature: float,
        teacher: TeacherScores,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``logprob_and_entropy`` does, and the divergence from the likeliest tokens of a teacher
        (differentiable), [M] each. ``teacher``: its scores of the M tokens.
        """
        inputs = self._head_inputs(micro, hidden_1TH, temperature)
        share = self._share(micro)
        rank = groups.get_context_parallel_rank()
        start = sum(share.counts[:rank])
        local = teacher.take(np.argsort(share.order_M)[start : start + share.counts[rank]])
        top = copied({"ids": local.top_ids_TK.astype(np.int64), "logp": local.top_logp_TK}, self._device)
        logp_m, entropy_m, student_mK = fused_logprobs(
            inputs.hidden_MH,
            inputs.weight_VH,
            inputs.target_M,
            top["ids"],
            inputs.options,
            entropy_gradient=entropy_gradient,
        )
        divergence_m = divergence_from_top_tokens(student_mK, top["logp"])
        gathered = [self.gathered(micro, value_m) for value_m in (logp_m, entropy_m, divergence_m)]
        return gathered[0], gathered[1], gathered[2]

    def logits(self, hidden_1TH: Tensor) -> Tensor:
        """Return this rank's logits as ``head.logits`` does, from the output of the last stage."""
        return head.logits(self._last, hidden_1TH, vocab=self._vocab, float32_logits=self._float32_logits)

    @property
    def _last(self) -> GPTModel:
        """Last part of the model, without the wrapper of DDP."""
        last = self.parts[-1]
        return cast("GPTModel", getattr(last, "module", last))

    def _head_inputs(self, micro: MicroBatch, hidden_1TH: Tensor, temperature: float) -> head.HeadInputs:
        batch = self.on_device(micro)
        return head.head_inputs(
            self._last,
            hidden_1TH,
            batch.index_m,
            batch.target_m,
            temperature=temperature,
            vocab=self._vocab,
            float32_logits=self._float32_logits,
            implementation=self._implementation,
        )


class ValueModel(PackedModel):
    """A model that gives a value before each token that carries loss. It ends in a ``ValueHead``."""

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return values, float32 [M], of every micro-batch; None except on the last pipeline stage."""
        return self.evaluate(microbatches, self.values_of)

    def values_of(self, micro: MicroBatch, output_1T1: Tensor) -> Tensor:
        """Return values [M] from the output of the last stage."""
        index_m = self.on_device(micro).index_m
        return self.gathered(micro, output_1T1[0, :, 0].index_select(0, index_m))
