"""Which settings free memory where a run has run out of it, and how much the memory plan says.

    failure ──shortage_of──► trainer | KV cache of an engine | engine | host | shared memory
                                 └──relief──► what the plan has there, and a line for each setting

The bytes of a setting are the difference between two plans: that of the recipe, and that of the recipe with
this setting changed alone.
"""

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Protocol

from slipstream.backend.memory.engine_memory import EngineMemory
from slipstream.backend.memory.trainer_memory import StageMemory
from slipstream.backend.memory.verdict import GIB
from slipstream.configs.schema import RunConfig

_NO_CACHE = re.compile(r"(?:increase|Raise) --mem-fraction-static|Prefill out of memory|Decode out of memory")
"""Messages of SGLang 0.5.21. The last two: the KV cache is full, and nothing can be retracted."""
_GPU = re.compile(
    r"(?:CUDA|HIP)(?: error:)? out of memory|\btorch\.(?:cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"
    r"|cudaErrorMemoryAllocation|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|NVSHMEMX?)\w*_ALLOC_FAILED"
    r"|[Cc]uda failure (?:\d+ )?'?out of memory|\bcuMem\w+\b.*out of memory"
)
"""Messages of torch, of CUDA's libraries, of NCCL, and of torch_memory_saver."""
_HOST = re.compile(
    r"DefaultCPUAllocator|\bMemoryError\b|Cannot allocate memory|can't allocate memory|SIGKILL"
    r"|\bcode (?:-9|137)\b|ray\.exceptions\.OutOfMemoryError|process of trainer rank \d+ ended"
    r"|std::bad_alloc|\boom[-_]kill|\bOOMKilled\b|node running low on memory"
)
_PINNED = re.compile(r"cudaHost(?:Alloc|Register)|pin_memory")
"""CUDA gives the same message for memory of the host that it could not pin."""
_SHARED = re.compile(
    r"\bSIGBUS\b|Bus error|\bcode:? -7\b|\bcode:? 135\b|\bsignal:? 7\b|No space left on device:? .*/dev/shm"
    r"|unable to (?:resize|allocate) shared memory|/dev/shm.*No space left on device"
)
_ENGINE = re.compile(r"\bSGLang\b|\bengine-\d+ has failed|its server exited")
_JUDGE = re.compile(r"\bjudge-engine-\d+")


class Shortage(StrEnum):
    """Where memory has run out."""

    TRAINER = "trainer"
    CACHE = "cache"
    """SGLang has no room for a KV cache beside the weights."""
    ENGINE = "engine"
    HOST = "host"
    SHARED = "shared memory"
    """A file system in memory is full: a process that touches a page of it ends by SIGBUS. No setting frees
    any of it."""


class MemoryPlan(Protocol):
    """The plan of a recipe."""

    @property
    def stages(self) -> list[StageMemory]: ...
    @property
    def engine(self) -> EngineMemory | None: ...
    @property
    def gpu_memory(self) -> int | None: ...


Plan = Callable[[RunConfig], MemoryPlan | None]
"""Plans a recipe; None: its layout does not fit its model."""


def shortage_of(failure: str) -> Shortage | None:
    """Return where memory has run out by the text of a failure; None: the text says nothing of that."""
    if _SHARED.search(failure):  # SGLang's message of it names SIGKILL as well
        return Shortage.SHARED
    if _NO_CACHE.search(failure):
        return Shortage.CACHE
    if _GPU.search(failure):
        if _PINNED.search(failure):
            return Shortage.HOST
        return Shortage.ENGINE if _ENGINE.search(failure) else Shortage.TRAINER
    return Shortage.HOST if _HOST.search(failure) else None


def relief(failure: str, config: RunConfig, plan: Plan) -> list[str]:
    """Return lines that name the settings which free memory, with bytes; none if memory was not short."""
    shortage = shortage_of(failure)
    planned = plan(config) if shortage not in (None, Shortage.SHARED) else None
    if planned is None:
        return []
    if shortage is Shortage.TRAINER:
        what = "the memory of a trainer's GPU has run out"
        return [
            *_of_trainer(what, planned),
            *_changes(config, plan, in_step="training step" in failure),
            *_of_neighbour(config, planned),
        ]
    if shortage is Shortage.HOST:
        return list(_of_host(failure, config, plan, planned))
    if _JUDGE.search(failure):
        return [
            "the memory of a GPU of the judge's engines has run out. These settings decide what it holds: "
            "judge.endpoint.tensor_parallel, judge.endpoint.args.mem_fraction_static"
        ]
    is_cache = shortage is Shortage.CACHE
    lines = list(_of_engine(is_cache, config, planned))
    if config.rollout.engine.gpu_share is not None and not is_cache:
        lines += _changes(config, plan, in_step=True)  # the trainer works beside the engine
    return lines


def _of_trainer(what: str, planned: MemoryPlan) -> Iterator[str]:
    worst = max(planned.stages, key=lambda stage: stage.peak)
    parts = {
        "weights": worst.weights,
        "gradients": worst.gradients,
        "optimizer": worst.optimizer,
        "critic": worst.critic,
        "activations": worst.activations,
        "work of a layer and the head": worst.work,
        "frozen model": worst.frozen,
        "weights that leave": worst.transfer,
    }
    listed = ", ".join(f"{name} {_size(part)}" for name, part in parts.items() if part)
    whose = f"a rank of pipeline stage {worst.stage}"
    yield f"{what}{_of_gpu(planned)}. The memory plan has for {whose}: {listed}"


def _changes(config: RunConfig, plan: Plan, *, in_step: bool) -> list[str]:
    """Return a line for each setting of the trainer that frees memory, the largest relief first.

    ``in_step``: memory has run out in a training step, which holds no weights that leave. These may be the
    peak of a small model.
    """

    def used(stage: StageMemory) -> int:
        return stage.held + stage.activations + stage.work if in_step else stage.peak

    before = max(map(used, _stages(plan(config))))
    freed: list[tuple[int, str]] = []
    for text, changed in _alternatives(config):
        stages = _stages(plan(changed))
        if stages and (less := before - max(map(used, stages))) > 0:
            freed.append((less, f"{text} frees {_size(less)} on the fullest rank"))
    return [text for _, text in sorted(freed, reverse=True)]


def _of_neighbour(config: RunConfig, planned: MemoryPlan) -> Iterator[str]:
    """Yield the settings of engines on the trainer's GPU that leave the trainer more."""
    engine, gpu = config.rollout.engine, planned.gpu_memory
    if engine.gpu_share is not None:
        hundredth = "" if gpu is None else f": each 0.01 frees {_size(gpu // 100)}"
        yield (
            f"a smaller rollout.engine.gpu_share (now {engine.gpu_share:g}) gives the trainer more{hundredth}"
        )
    elif engine.colocated:
        yield "rollout.engine.colocated=false takes the engines off the trainer's GPUs"


def _stages(planned: MemoryPlan | None) -> list[StageMemory]:
    return [] if planned is None else planned.stages


def _alternatives(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield recipes that differ in one setting of the trainer, with the name of the change."""
    actor, parallel = config.actor, config.actor.parallel

    def with_actor(**changes: object) -> RunConfig:
        return config.model_copy(update={"actor": actor.model_copy(update=changes)})

    tokens = actor.microbatch_tokens
    yield f"actor.microbatch_tokens={tokens // 2} (now {tokens})", with_actor(microbatch_tokens=tokens // 2)
    if actor.recompute != "full":
        yield f"actor.recompute=full (now {actor.recompute})", with_actor(recompute="full")
    if not actor.optimizer.distributed and parallel.data * parallel.context > 1:
        optimizer = actor.optimizer.model_copy(update={"distributed": True})
        yield "actor.optimizer.distributed=true (now false)", with_actor(optimizer=optimizer)
    weights = config.weights
    if (transport := weights.transport).type != "shards" and transport.bucket_mb > 1:
        half = transport.model_copy(update={"bucket_mb": transport.bucket_mb // 2})
        smaller = config.model_copy(update={"weights": weights.model_copy(update={"transport": half})})
        yield f"weights.transport.bucket_mb={half.bucket_mb} (now {transport.bucket_mb})", smaller
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "data": parallel.data}
    sizes |= {"context": parallel.context}
    for name, size in sizes.items():
        doubled = with_actor(parallel=parallel.model_copy(update={name: 2 * size}))
        yield f"actor.parallel.{name}={2 * size} (now {size}; twice as many ranks)", doubled


def _of_engine(is_cache: bool, config: RunConfig, planned: MemoryPlan) -> Iterator[str]:
    memory, engine, gpu = planned.engine, config.rollout.engine, planned.gpu_memory
    if memory is None:
        return
    fraction, most = engine.args.get("mem_fraction_static"), engine.args.get("max_total_tokens")
    now = fraction if isinstance(fraction, float) else "SGLang's own choice"
    what = "SGLang has no room for a KV cache" if is_cache else "the memory of an engine's GPU has run out"
    pool = "" if memory.pool is None else f", KV cache {_size(max(memory.pool, 0))}"
    parts = f"weights {_size(memory.weights)}{pool}, an update {_size(memory.transfer)}"
    yield f"{what}{_of_gpu(planned)}. The memory plan has for each rank: {parts}"
    setting = f"rollout.engine.args.mem_fraction_static (now {now})"
    if engine.gpu_share is not None:
        setting = f"rollout.engine.gpu_share (now {engine.gpu_share:g})"
    hundredth = "" if gpu is None else f": each 0.01 is {_size(gpu // 100)}"
    if is_cache:
        least = "" if gpu is None else f", above {memory.weights / gpu:.2f}, which the weights alone take"
        yield f"a larger {setting} gives weights and KV cache more{least}{hundredth}"
    else:
        if engine.gpu_share is None:  # what a smaller share leaves free is the trainer's
            yield f"a smaller {setting} leaves more free beside weights and KV cache{hundredth}"
        if isinstance(most, int):
            half = most // 2 * memory.token
            yield f"rollout.engine.args.max_total_tokens={most // 2} (now {most}) frees {_size(half)}"
        elif memory.tokens:
            yield (
                f"rollout.engine.args.max_total_tokens below {memory.tokens} frees {memory.token} bytes for "
                "each token"
            )
    ranks = engine.tensor_parallel
    yield (
        f"rollout.engine.tensor_parallel={2 * ranks} (now {ranks}) frees about {_size(memory.weights // 2)} "
        "of weights on each rank"
    )
    if engine.colocated:
        yield "rollout.engine.colocated=false takes the trainer off the engines' GPUs"


def _of_host(failure: str, config: RunConfig, plan: Plan, planned: MemoryPlan) -> Iterator[str]:
    certain = re.search(r"allocate memory|Allocator|MemoryError|OutOfMemoryError", failure) is not None
    what = (
        "the memory of a machine has run out"
        if certain
        else "if the kernel has killed the process, the memory of its machine has run out (`dmesg` says so)"
    )
    if planned.gpu_memory is None and not _ENGINE.search(failure) and "trainer" in failure:
        yield from _of_trainer(what, planned)
        yield from _changes(config, plan, in_step="training step" in failure)
        return
    yield f"{what}. These settings decide what its processes hold:"
    rollout = config.rollout
    if rollout.engine.takes_turns and planned.engine is not None:
        held = max(stage.held - stage.runtime for stage in planned.stages)
        yield (
            f"rollout.engine.colocated=false frees up to {_size(held)} for each trainer rank and "
            f"{_size(planned.engine.weights)} for each rank of an engine: who waits is kept on the host"
        )
    if config.weights.transport.type == "delta" and planned.engine is not None:
        whole = planned.engine.weights * rollout.engine.ranks
        yield f"weights.transport.type=shards frees {_size(whole)} for each engine: the copy of `delta`"
    judging = rollout.judging
    if judging.memory_mb is not None:
        most = _size(judging.memory_mb * 2**20)
        yield (
            f"rollout.judging.processes (now {judging.processes}) and memory_mb: up to {most} for each judge "
            "process and each process that it starts"
        )
    yield "rollout.max_concurrent, rollout.collectors: episodes in memory, processes that hold them"
    if planned.gpu_memory is None and planned.engine is not None:
        token = planned.engine.token
        yield f"rollout.engine.args.max_total_tokens: an engine without a GPU holds {token} bytes for each"


def _of_gpu(planned: MemoryPlan) -> str:
    if planned.gpu_memory is None:
        return ""
    return f" (a GPU has {_size(planned.gpu_memory)}: cluster.gpu_memory_gib)"


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / 2**20:.1f} MiB"
