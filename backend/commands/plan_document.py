"""What ``slipstream plan`` finds out, as one document: layout, memory, checkpoints, publication and split."""

import json
from collections import Counter
from dataclasses import asdict
from math import ceil
from typing import TypedDict

from slipstream.backend.commands.check import Planned
from slipstream.backend.commands.check import planned as planned_of
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.memory.activations import route_bytes
from slipstream.backend.memory.verdict import CheckpointPlan, judge_weights
from slipstream.backend.simulate.advice import SplitAdvice
from slipstream.backend.simulate.compare import Costs
from slipstream.backend.simulate.derived import derived_model, saved_flops
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.backend.simulate.publication import transport_of
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.published import shipped_config
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import own_engines
from slipstream.rollout.system import gpu_environment


class PlannedBucket(TypedDict):
    """One bucket of the export plan."""

    tensors: dict[str, list[int]]
    """Shapes by HF name."""
    dtype: str
    bytes: int
    bytes_from_rank: dict[int, int]


class PipelinePart(TypedDict):
    """The layers of one chunk of a pipeline stage."""

    stage: int
    chunk: int
    layers: int


class SimulatedSplit(TypedDict):
    """One split of the GPUs, and the simulator's verdict on it."""

    trainer_gpus: int
    engine_gpus: int
    tokens_per_s: float
    step_s: float | None
    """Seconds of a step, waiting and publication included."""
    trainer_idle: float | None
    engine_idle: float | None


class SharedVariable(TypedDict):
    """An environment variable that Slipstream sets for processes on GPUs."""

    name: str
    value: str
    processes: list[str]
    reason: str


class PlacedEngines(TypedDict):
    """The engines of the policy, and how the ranks of each are spread."""

    engines: int
    fewest: int
    """Number of engines below which the run waits for nodes."""
    most: int
    ranks: int
    """Of each engine. The next four numbers say how the model is divided over them."""
    tensor: int
    data: int
    expert: int
    pipeline: int
    nodes: int
    """Nodes of each engine, with ``ranks_per_node`` ranks on each."""
    ranks_per_node: int


class JudgeEngines(TypedDict):
    """The judge's own engines."""

    model: str
    engines: int
    ranks: int
    """Of each engine. Each takes a GPU of its own."""
    weights: int
    """Bytes on each rank, as the files of the model have them."""


class PlannedCheckpoint(TypedDict):
    """A checkpoint of the trainer, and the time that it takes."""

    bytes: int
    bytes_per_s: float
    """Rate of the file system: ``cluster.file_system_bytes_per_s``."""
    seconds: float
    every: int
    """Training steps from one to the next; 0: none is written."""
    timeout_s: float
    in_time: bool
    """False if ``seconds`` are more than ``timeout_s``."""
    kept_bytes: int
    """Bytes of the checkpoints that are kept, without those of ``checkpoint.keep_every``."""
    pinned_bytes: int
    """Bytes of pinned host memory that each rank of the trainer keeps for snapshots; 0: there are no GPUs."""
    share_bytes: int
    """Bytes of a rank's share on the disk of its node (``checkpoint.local_dir``); 0: none is written."""
    node_bytes: int
    """Bytes on the disk of a node for each of its ranks at most, copies for the node before included."""


class PlannedPublication(TypedDict):
    """The time in which a version reaches the engines of the recipe's split."""

    transport: str
    prepare_s: float
    """Seconds before the pause."""
    pause_s: float
    """Seconds of the pause, transfer included."""
    bytes: int
    """Bytes over the link that carries most, in the pause."""
    bytes_per_s: float


class PlanDocument(TypedDict):
    """A layout, the memory of its ranks and its export plan. Ranks are global ranks of the trainer."""

    model: str
    family: str
    parameters: int
    quantization: str | None
    """Quantization of the checkpoint's weights, which the trainer dequantizes; None: they have none."""
    ranks: int
    layers: list[PipelinePart]
    bytes: int
    bytes_from_rank: dict[int, int]
    buckets: list[PlannedBucket]
    gpu_memory: int | None
    """Bytes of a GPU's memory; None: unknown."""
    trainer_memory: list[dict[str, int]]
    """Bytes on a rank of each pipeline stage."""
    route_bytes: int | None
    """Bytes of a token's experts in the record; None: none are replayed."""
    saved_flops: float | None
    """Share of the trainer's FLOPs that shared prompts save; None: no prefixes are shared."""
    engines: PlacedEngines | None
    """None: supervised training has none."""
    engine_memory: dict[str, int | None] | None
    """Bytes on a rank of an engine; None: there are no engines."""
    judge: JudgeEngines | None
    """None: the judge has no engines of its own."""
    checkpoint: PlannedCheckpoint
    publication: PlannedPublication | None
    """None: there are no engines, or no GPUs, whose figures the times rest on."""
    splits: list[SimulatedSplit] | None
    """None: not simulated."""
    environment: list[SharedVariable]
    """Empty: a run on CPUs gets none."""


def describe(planned: Planned, advice: SplitAdvice | None) -> PlanDocument:
    """Return the plan as one document."""
    config, plan = planned.config, planned.export
    itemsize = ITEMSIZE[config.model.dtype]
    sent: Counter[int] = Counter()
    buckets: list[PlannedBucket] = []
    for bucket in plan.buckets:
        size = 4 if bucket.float32 else itemsize
        by_owner: Counter[int] = Counter()
        for part in plan.parts(bucket):
            by_owner[part.owner] += part.numel * size
        sent += by_owner
        buckets.append(
            {
                "tensors": dict(zip(bucket.hf_names, map(list, bucket.hf_shapes), strict=True)),
                "dtype": "float32" if bucket.float32 else config.model.dtype,
                "bytes": bucket.numel * size,
                "bytes_from_rank": dict(sorted(by_owner.items())),
            }
        )
    layout = plan.layout
    return {
        "model": str(plan.spec.path),
        "family": plan.spec.geometry.family,
        "parameters": sum(bucket.numel for bucket in plan.buckets),
        "quantization": None if plan.spec.quantization is None else str(plan.spec.quantization),
        "ranks": layout.world_size,
        "layers": [
            {"stage": part % layout.pipeline, "chunk": part // layout.pipeline, "layers": size}
            for part, size in enumerate(layout.part_sizes(plan.spec.geometry.n_layers))
        ],
        "bytes": sum(bucket["bytes"] for bucket in buckets),
        "bytes_from_rank": dict(sorted(sent.items())),
        "buckets": buckets,
        "gpu_memory": planned.gpu_memory,
        "trainer_memory": [asdict(stage) | {"peak": stage.peak} for stage in planned.stages],
        "route_bytes": None if config.actor.routing_replay == "off" else route_bytes(plan.spec.geometry),
        "saved_flops": None
        if config.actor.share_prefixes == "off"
        else saved_flops(config, plan.spec.geometry),
        "engines": None if planned.engine is None else _engines(planned.config),
        "engine_memory": None if planned.engine is None else asdict(planned.engine),
        "judge": _judge(planned.config),
        "checkpoint": _checkpoint(config, planned.checkpoint),
        "publication": _publication(planned),
        "splits": None if advice is None else _splits(advice),
        "environment": _environment(planned),
    }


def _engines(config: RunConfig) -> PlacedEngines:
    engine = config.rollout.engine
    return {
        "engines": engine.count,
        "fewest": engine.fewest,
        "most": engine.most,
        "ranks": engine.ranks,
        "tensor": engine.tensor_parallel,
        "data": engine.data_parallel,
        "expert": engine.expert_parallel,
        "pipeline": engine.pipeline_parallel,
        "nodes": engine.nodes,
        "ranks_per_node": engine.ranks_per_node,
    }


def _checkpoint(config: RunConfig, checkpoint: CheckpointPlan) -> PlannedCheckpoint:
    settings = checkpoint.settings
    pins = settings.every and config.cluster.device == "gpu"
    snapshot = checkpoint.share or ceil(checkpoint.bytes / config.actor.parallel.world_size)
    return {
        "bytes": checkpoint.bytes,
        "bytes_per_s": checkpoint.bytes_per_s,
        "seconds": checkpoint.seconds,
        "every": settings.every,
        "timeout_s": settings.timeout_s,
        "in_time": checkpoint.in_time,
        "kept_bytes": checkpoint.bytes * settings.keep_last if settings.every else 0,
        "pinned_bytes": snapshot if pins else 0,
        "share_bytes": checkpoint.share,
        # Those that are kept and the one that is written; as many bytes for copies.
        "node_bytes": 2 * checkpoint.share * (settings.keep_last + 1),
    }


def planned_publication_s(config: RunConfig) -> float | None:
    """Return the seconds that the plan gives a publication; None: there is no plan of it."""
    if config.cluster.device == "auto" and has_gpus():
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "gpu"})})
    try:
        publication = _publication(planned_of(config))
    except WrongInput:
        return None
    return None if publication is None else publication["prepare_s"] + publication["pause_s"]


def _publication(planned: Planned) -> PlannedPublication | None:
    config = planned.config
    if planned.engine is None or planned.engine.tokens == 0 or config.cluster.device != "gpu":
        return None
    transfer = derived_model(config, planned.export, planned.engine, layout_of(config)).transfer
    return {
        "transport": transport_of(config),
        "prepare_s": transfer.prepare_s,
        "pause_s": transfer.stall_s,
        "bytes": transfer.bytes,
        "bytes_per_s": transfer.bytes_per_s,
    }


def _judge(config: RunConfig) -> JudgeEngines | None:
    engines = own_engines(config.judge)
    if engines is None:
        return None
    return {
        "model": str(engines.path),
        "engines": engines.count,
        "ranks": engines.tensor_parallel,
        "weights": judge_weights(engines),
    }


def _splits(advice: SplitAdvice) -> list[SimulatedSplit]:
    return [
        {
            "trainer_gpus": run.layout.trainer_gpus,
            "engine_gpus": run.layout.engine_gpus,
            "tokens_per_s": run.tokens_per_s,
            "step_s": run.outcome.makespan_s / run.outcome.steps if run.outcome else None,
            "trainer_idle": run.outcome.trainer_idle if run.outcome else None,
            "engine_idle": run.outcome.engine_idle if run.outcome else None,
        }
        for run in advice.runs
    ]


def _environment(planned: Planned) -> list[SharedVariable]:
    if planned.config.cluster.device == "cpu":
        return []
    sides = {"trainer"} if planned.engine is None else {"trainer", "engines"}
    engine, parallel = planned.config.rollout.engine, planned.config.actor.parallel
    return [
        {
            "name": variable.name,
            "value": variable.value,
            "processes": [side for side in variable.who if side in sides],
            "reason": variable.why,
        }
        for variable in gpu_environment.variables(engine, parallel)
        if sides.intersection(variable.who)
    ]


def costs_of(config: RunConfig) -> Costs | None:
    """Return the costs of a recipe for GPUs by the split, from its own model and layout. Raises WrongInput.

    None for a recipe for CPUs, and without the config.json of its model.
    """
    path = config.model.path
    folder = path if (path / "config.json").exists() else shipped_config(path)
    if config.cluster.device != "gpu" or folder is None:
        return None
    plan = planned_of(config.model_copy(update={"model": config.model.model_copy(update={"path": folder})}))
    if plan.engine is None or plan.engine.tokens == 0:
        return None
    export, engine = plan.export, plan.engine
    return lambda split: config.model_copy(update={"simulate": derived_model(config, export, engine, split)})


def plan_json(planned: Planned, advice: SplitAdvice | None) -> str:
    """Return `describe` as JSON."""
    return json.dumps(describe(planned, advice))
