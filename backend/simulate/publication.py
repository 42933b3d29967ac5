"""How long a version takes to reach the engines, by ``weights.transport``: bytes from the layout over a rate.

    transport   before the pause                                in the pause
    shards      -                                               the fullest link of the send plan
    tensor      -                                               the model in buckets, from one rank
    disk        the model into the file system                  the model out of it, once for each node
    delta       the model in buckets, and what changed of it    each engine rank's part of its replica
    adapter     the adapter (actor.lora.serve), every engine    -

The send plan is that of ``bridge.shards.sends``, without the engines' tables: every engine rank takes in what
it holds, and the copies of a trainer shard take turns.
"""

from dataclasses import replace

from slipstream.backend.memory.engine_memory import EngineMemory
from slipstream.backend.memory.parameters import StageParameters, stage_parameters
from slipstream.backend.simulate.gpu_split import GpuSplit
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.bridge.shards.sends import most_sent
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import TransferModel

LINK_BYTES_PER_S = 45e9
"""Rate that a network card of 400 Gb/s has been seen to carry. Every GPU is assumed to have one."""
BUCKET_BYTES_PER_S = 14e9
"""Rate of whole tensors that are gathered and sent in buckets: verl's checkpoint engine reports 61 GB in
4.4 s between 16 and 16 H20 GPUs."""
REPLICA_BYTES_PER_S = 0.6 * 64e9
"""Rate at which a GPU reads host memory: PCIe 5.0 x16, of which 60 % are assumed."""
SLOW_BYTES_PER_S = 1.25e9
"""Rate of the network for which ``delta`` is: Ethernet of 10 Gb/s."""
CHANGED = 0.03
"""Share of the weights that a step changes in bfloat16 (docs/publishing.md)."""


def publication(
    config: RunConfig, export: ExportPlan, engine: EngineMemory, split: GpuSplit
) -> TransferModel:
    """Return the model of a publication on a split of the GPUs."""
    stages = stage_parameters(export.spec, export.layout, config.actor.lora)
    itemsize = ITEMSIZE[config.model.dtype]
    whole = model_bytes(export, itemsize)
    transport, written_per_s = transport_of(config), config.cluster.file_system_bytes_per_s
    if transport == "adapter":
        adapter = sum(stage.adapters for stage in stages) * export.layout.tensor * itemsize
        return _model(0, LINK_BYTES_PER_S, prepare_s=adapter * split.engines / LINK_BYTES_PER_S)
    # Engines in fp8 get fp8.
    sent = (
        round(whole * engine.weights / (engine.parameters * itemsize))
        if config.rollout.engine.quantization
        else whole
    )
    if transport == "shards":
        return _model(_fullest(export, stages, engine, split, itemsize, whole), LINK_BYTES_PER_S)
    if transport == "tensor":
        return _model(sent, BUCKET_BYTES_PER_S)
    nodes = _engine_nodes(config, split)
    if transport == "disk":
        return _model(sent * nodes, written_per_s, prepare_s=sent / written_per_s)
    patches_s = CHANGED * whole * nodes / SLOW_BYTES_PER_S
    return _model(engine.weights, REPLICA_BYTES_PER_S, prepare_s=whole / BUCKET_BYTES_PER_S + patches_s)


def transport_of(config: RunConfig) -> str:
    """Return the name of the way that versions take."""
    return "adapter" if config.actor.serves_adapter else config.weights.transport.type


def model_bytes(export: ExportPlan, itemsize: int) -> int:
    """Return the bytes of all HF tensors that leave the trainer."""
    return sum(bucket.numel * (4 if bucket.float32 else itemsize) for bucket in export.buckets)


def _model(bytes_: int, bytes_per_s: float, *, prepare_s: float = 0.0) -> TransferModel:
    return TransferModel(bytes=bytes_, bytes_per_s=bytes_per_s, prepare_s=float(f"{prepare_s:.3g}"))


def _fullest(
    export: ExportPlan,
    stages: list[StageParameters],
    engine: EngineMemory,
    split: GpuSplit,
    itemsize: int,
    whole: int,
) -> int:
    """Return the bytes on the link that carries most: out of a trainer rank or into an engine rank."""
    layout = replace(
        export.layout, data=max(split.trainer_gpus // (export.layout.tensor * export.layout.pipeline), 1)
    )
    dense, expert = (most_sent(layout, split.engines, expert=expert) for expert in (False, True))
    sent = max(
        sum(
            dense * (sum(part.dense) + sum(part.single)) + expert * sum(part.expert) for part in stage.weights
        )
        for stage in stages
    )
    # An engine holds some tensors on several of its ranks, each of which gets them.
    repeated = engine.weights * split.gpus_per_engine / whole
    return max(round(sent * itemsize * repeated), engine.weights)


def _engine_nodes(config: RunConfig, split: GpuSplit) -> int:
    """Return the number of nodes with engines, of each of which one reads the files of a version."""
    engine, cluster = config.rollout.engine, config.cluster
    if cluster.type == "local":
        return engine.nodes
    per_node = max(config.actor.parallel.world_size // (cluster.trainer_nodes or 1), engine.ranks_per_node)
    return max(-(-split.engine_gpus // per_node), engine.nodes)
