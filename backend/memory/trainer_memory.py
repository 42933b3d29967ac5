"""Memory of a trainer rank, by pipeline stage.

    held      weights + gradients + optimizer, of the policy and of a critic; between steps too
    training  held + activations of the micro-batches in flight + the work of one layer and of the head
    scoring   held + the weights of the largest frozen model + the work of one layer
    sending   held + buckets of the weights that leave

The peak is the largest of the last three. Bytes per trained parameter without the distributed optimizer, in
bfloat16: 2 for the weight, 4 for the gradient (Megatron sums in single precision), 12 for Adam's main weight
and moments; in float32 4, 4 and 8. The distributed optimizer divides Adam's part by the data-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from slipstream.backend.memory.activations import (
    FLOAT,
    Kernels,
    LayerBytes,
    Sharing,
    head_bytes,
    layer_bytes,
    micro_batch_bytes,
    taken_bytes,
)
from slipstream.backend.memory.parameters import (
    StageParameters,
    buffer_of,
    stage_parameters,
)
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.geometry import Geometry
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import value_spec
from slipstream.bridge.shards.plan import SENDER, STAGING_DIVISOR, ExportPlan
from slipstream.configs.schema import (
    ActorConfig,
    CriticConfig,
    OptimizerConfig,
    ParallelConfig,
    TransportConfig,
)


def parts_in_flight(stage: int, stages: int, chunks: int) -> list[int]:
    """Return for each part of the model on ``stage`` how many micro-batches have activations there.

    By Megatron's schedules. One part per stage (1F1B): stage s of P has run P - s forward passes before its
    first backward pass ends. With V parts per stage (interleaved, arXiv:2104.04473): (P - s - 1) * 2 +
    (V - 1) * P warm-up passes of one part each, and one more.
    """
    if stages == 1:
        return [1]
    if chunks == 1:
        return [stages - stage]
    passes = (stages - stage - 1) * 2 + (chunks - 1) * stages + 1
    # The passes visit the parts in turns of ``stages`` micro-batches.
    held = [0] * chunks
    for number in range(passes):
        held[number // stages % chunks] += 1
    return held


HEAD_SLICE = {"plain": 2**21, "fused": 2**27}
"""Logits of a slice of the head, as in ``backend/objective/logprob.py``."""
HEAD_MIN_COLUMNS = 512
HEAD_KEPT = 192 * 2**20

MASK_PAIRS = 2**26
"""Pairs of the mask of taken tokens, as in ``backend/batch/prefixes.py``."""
MASK_BLOCK = 128
"""Tokens of a block of a mask on GPUs, as in ``backend/megatron/tree_attention.py``."""

CONTEXT = 2**30
"""Bytes of a CUDA context, of loaded kernels and of libraries' workspaces on a GPU: assumed, not computed."""
GROUP_CHANNELS = 16
"""Channels of an NCCL group between GPUs of one node: assumed."""
GROUP_CHANNEL = 4 * 2**20 + 8 * 640 * 120 * 8 + 8 * 512 * 8 * 16
"""Bytes in which a rank receives from its neighbour in a ring, for each channel: NCCL's buffers of the
protocols Simple (``NCCL_BUFFSIZE``), LL128 and LL, by NCCL's source (``src/include/device.h``)."""
GROUP = GROUP_CHANNELS * GROUP_CHANNEL
"""Bytes of an NCCL group on each of its ranks: about 150 MiB."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of each rank of one pipeline stage."""

    stage: int
    parameters: int
    """Elements, not bytes."""
    weights: int
    gradients: int
    optimizer: int
    critic: int
    """Weights, gradients and optimizer of a critic."""
    activations: int
    """Tensors that the forward passes in flight keep."""
    work: int
    """Tensors that one layer and the head need besides."""
    frozen: int
    """Weights of the largest model that only scores, on the GPU while it does."""
    transfer: int
    """Buckets of the weights that leave. Only the sender's stage has whole ones."""
    runtime: int

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.critic + self.runtime

    @property
    def peak(self) -> int:
        training = self.activations + self.work
        return self.held + max(training, self.frozen + self.work, self.transfer)


def trainer_memory(
    actor: ActorConfig,
    critic: CriticConfig | None,
    dtype: str,
    plan: ExportPlan,
    tokens: int,
    kernels: Kernels = "fused",
    *,
    buckets: int = 2,
    runtime: int = CONTEXT,
) -> list[StageMemory]:
    """Return the memory of a rank of each pipeline stage. Raises UnevenSplit.

    ``dtype``: that of the model, by torch's name. ``tokens``: of the largest micro-batch (``tokens_of``).
    ``buckets``: of the weights that leave (``buckets_at_once``).
    """
    spec, layout = plan.spec, plan.layout
    itemsize = ITEMSIZE[dtype]
    policy = stage_parameters(spec, layout, actor.lora)
    of_critic = stage_parameters(value_spec(spec), layout) if critic else None
    sharing = sharing_of(actor, layout, itemsize, kernels)
    stages: list[StageMemory] = []
    for stage, held in enumerate(policy):
        kept, work = _activations(actor, spec.geometry, layout, stage, sharing, tokens)
        weights, gradients, optimizer = state_bytes(held, layout, actor.optimizer, itemsize, stage)
        values = 0
        if critic is not None and of_critic is not None:
            values = sum(state_bytes(of_critic[stage], layout, critic.optimizer, itemsize, stage))
        stages.append(
            StageMemory(
                stage=stage,
                parameters=held.total,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                critic=values,
                activations=kept,
                work=work,
                frozen=held.total * itemsize
                if actor.kl is not None or actor.teacher_model is not None
                else 0,
                transfer=_transfer(plan, itemsize, stage, buckets),
                runtime=runtime,
            )
        )
    return stages


def buckets_at_once(transport: TransportConfig, *, quantizes: bool, on_gpus: bool) -> int:
    """Return how many buckets the sender holds while weights leave.

    Two are exported, and what is quantized of them does not share their memory. Engines read one on the GPU.
    """
    if quantizes:
        return 4
    return 3 if on_gpus and transport.type == "tensor" else 2


def state_bytes(
    held: StageParameters, layout: Layout, optimizer: OptimizerConfig, itemsize: int, stage: int
) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer."""
    ranks = layout.data
    expert_ranks = layout.data * layout.tensor // (layout.expert * layout.etp)
    main = 0 if itemsize == FLOAT else FLOAT
    frozen = held.total - sum(part.total for part in held.trained)
    single = sum(sum(part.single) for part in held.weights) - sum(sum(part.single) for part in held.trained)
    weights, gradients, state = held.buffers * FLOAT, 0, 0
    weights += frozen * itemsize + single * (FLOAT - itemsize)
    for chunk, part in enumerate(held.trained):
        buckets = optimizer.overlap_grad_reduce and stage == 0 and chunk == 0
        dense, single = (part.dense, part.single) if main else ((*part.dense, *part.single), ())
        for shapes, share, size in (
            (dense, ranks, itemsize),
            (part.expert, expert_ranks, itemsize),
            (single, ranks, FLOAT),
        ):
            if not shapes:
                continue
            buffer = buffer_of(shapes, share, distributed=optimizer.distributed, buckets=buckets)
            weights += buffer.elements * size
            gradients += buffer.elements * FLOAT
            state += buffer.largest_share * ((0 if size == FLOAT else main) + 2 * FLOAT)
    return weights, gradients, state


def runtime_of(parallel: ParallelConfig, engines: int = 0) -> int:
    """Return the bytes on a rank's GPU that are not tensors: the CUDA context, and buffers of NCCL groups.

    ``engines``: number of engines that get their weights shard by shard. Copies of the same weights take
    turns over them, and each engine has a group with the ranks that send to it.
    """
    copies = parallel.data * parallel.context
    sizes = [parallel.world_size, parallel.tensor, parallel.pipeline, parallel.context, copies]
    if parallel.expert > 1:
        each_expert = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
        copies = parallel.tensor * copies // (parallel.expert * each_expert)
        sizes += [parallel.expert, each_expert, copies]
    return CONTEXT + (sum(size > 1 for size in sizes) + ceil(engines / max(copies, 1))) * GROUP


def tokens_of(actor: ActorConfig, new_tokens: int) -> int:
    """Return the tokens of the largest micro-batch on each of the ranks that share a context."""
    return ceil(actor.largest_microbatch(new_tokens) / actor.parallel.context)


def sharing_of(actor: ActorConfig, layout: Layout, itemsize: int, kernels: Kernels) -> Sharing:
    """Return how the ranks of a layout share tokens and layers."""
    return Sharing(
        tensor=layout.tensor,
        sequence=actor.parallel.sequence,
        expert=layout.expert,
        expert_tensor=layout.etp,
        itemsize=itemsize,
        layer_spec=layout.layer_spec,
        kernels=kernels,
    )


def _activations(
    actor: ActorConfig, geometry: Geometry, layout: Layout, stage: int, sharing: Sharing, tokens: int
) -> tuple[int, int]:
    """Return the bytes that are kept for the backward pass, and those of the work besides."""

    def kind_of(layer: int) -> tuple[bool, bool]:
        return geometry.has_experts(layer), geometry.delta_of(layer) is not None

    kinds = {kind_of(layer): layer for layer in range(geometry.n_layers)}
    by_kind = {kind: layer_bytes(geometry, layer, sharing) for kind, layer in kinds.items()}
    parts: list[list[LayerBytes]] = [[] for _ in range(layout.chunks)]
    for layer, place in enumerate(layout.places(geometry.n_layers)):
        if place.stage == stage:
            parts[place.chunk].append(by_kind[kind_of(layer)])
    in_flight = parts_in_flight(stage, layout.pipeline, layout.chunks)
    of_micro_batch = micro_batch_bytes(geometry, sharing, has_routes=actor.routing_replay == "rollout")
    kept, work = max(in_flight) * of_micro_batch * tokens, 0.0
    for part, flights in zip(parts, in_flight, strict=True):
        in_forward, again = _recomputed(part, actor)
        kept += flights * in_forward * tokens
        work = max(work, (again + max((layer.gradients for layer in part), default=0.0)) * tokens)
    work += _mask_bytes(actor, geometry, sharing, tokens)
    if stage == layout.pipeline - 1:
        columns = geometry.padded_vocab(layout.tensor) // layout.tensor
        kept += head_bytes(geometry, sharing) * tokens
        kept += min(HEAD_KEPT, tokens * columns * _logit_bytes(actor, sharing))
        work = max(work, _head_work(geometry, sharing, actor, columns, tokens))
    return ceil(kept), ceil(work)


def _mask_bytes(actor: ActorConfig, geometry: Geometry, sharing: Sharing, tokens: int) -> float:
    """Return the bytes of what says which tokens attend to which, beyond the causal kernels.

    On GPUs four tables of blocks, for layers with a window and for those without one. Elsewhere the keys that
    are gathered for trajectories which take tokens, and a dense mask.
    """
    shares = actor.share_prefixes == "auto"
    if sharing.kernels == "plain":
        mask = min(MASK_PAIRS, tokens**2) * (1 + sharing.itemsize)
        return shares * (taken_bytes(geometry, sharing) * tokens + mask)
    windows = [geometry.window_of(layer) is not None for layer in range(geometry.n_layers)]
    if sharing.layer_spec != "local":
        return 0.0
    kinds = any(windows) + (shares and not all(windows))
    tables, entry = 4, 4
    return kinds * tables * entry * ceil(tokens / MASK_BLOCK) ** 2


def _recomputed(layers: Sequence[LayerBytes], actor: ActorConfig) -> tuple[float, float]:
    """Return the bytes per token that a part of the model keeps, and what it computes again at one time."""
    if actor.recompute == "none":
        return sum(layer.kept for layer in layers), 0.0
    if actor.recompute == "selective":
        again = max((layer.core for layer in layers), default=0.0)
        return sum(layer.kept - layer.core for layer in layers), max(again, 0.0)
    number = actor.megatron.get("recompute_num_layers", 1)
    count = number if isinstance(number, int) else 1
    if actor.megatron.get("recompute_method") == "block":
        # The backward pass has freed the layers that are kept when it reaches those that are computed again.
        whole = sum(layer.kept for layer in layers[count:])
        again = max((layer.kept - layer.input for layer in layers[:count]), default=0.0)
        return sum(layer.input for layer in layers[:count]) + whole, max(again - whole, 0.0)
    runs = [layers[first : first + count] for first in range(0, len(layers), count)]
    again = max((sum(layer.kept for layer in run) - run[0].input for run in runs), default=0.0)
    return sum(run[0].input for run in runs), again


def _logit_bytes(actor: ActorConfig, sharing: Sharing) -> int:
    return FLOAT if actor.fp32_lm_head else sharing.itemsize


def _head_work(geometry: Geometry, sharing: Sharing, actor: ActorConfig, columns: int, tokens: int) -> float:
    """Return the bytes of the head besides what it keeps.

    Two blocks in single precision and the logits of one slice, or with kernels the logits and, if they are in
    single precision, their gradient; the hidden states of all tokens under sequence parallelism; the gradient
    of the selected ones in single precision.
    """
    width = min(columns, max(HEAD_MIN_COLUMNS, HEAD_SLICE[sharing.kernels] // tokens))
    logit = _logit_bytes(actor, sharing)
    if sharing.kernels == "fused" and actor.lm_head != "chunked":
        in_slice = width * (logit if logit == sharing.itemsize else logit + sharing.itemsize)
    else:
        in_slice = width * (2 * FLOAT + logit)
    gathered = sharing.itemsize if sharing.tokens > 1 else 0
    return tokens * (in_slice + geometry.hidden * (FLOAT + gathered))


def _transfer(plan: ExportPlan, itemsize: int, stage: int, buckets: int) -> int:
    """Return the bytes of buckets on a rank: ``buckets`` of them on the sender, and staging elsewhere."""
    bucket = plan.bucket_numel * itemsize
    if plan.layout.owners(stage)[0] != SENDER:
        return bucket // STAGING_DIVISOR
    largest = max(each.numel * (FLOAT if each.float32 else itemsize) for each in plan.buckets)
    return buckets * max(bucket, largest)
