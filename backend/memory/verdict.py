"""What a recipe takes: parts that cannot fit into a GPU whatever the activations are, and its checkpoints.

A trained parameter has 2 + 4 + 8 bytes of a checkpoint in bfloat16, and 4 + 8 in float32. Random states and
the description are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from slipstream.backend.memory.activations import FLOAT
from slipstream.backend.memory.engine_memory import EngineMemory
from slipstream.backend.memory.parameters import stage_parameters
from slipstream.backend.memory.trainer_memory import StageMemory, state_bytes
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.schema import ActorConfig, CheckpointConfig, CriticConfig, EngineConfig, Judge
from slipstream.configs.schema.actor import LoraConfig
from slipstream.configs.schema.judge import OwnEngines, own_engines

GIB = 2**30


@dataclass(frozen=True)
class CheckpointPlan:
    """The size of a checkpoint, and how long it takes to write."""

    bytes: int
    bytes_per_s: float
    """``cluster.file_system_bytes_per_s``"""
    settings: CheckpointConfig
    share: int = 0
    """Most bytes of a rank's share on the disk of its node (``checkpoint.local_dir``); 0: none is written."""

    @property
    def seconds(self) -> float:
        return self.bytes / self.bytes_per_s

    @property
    def in_time(self) -> bool:
        """False if the writing would be given up."""
        return not self.settings.every or self.seconds <= self.settings.timeout_s

    def steps(self, step_s: float) -> int:
        """Return the training steps during which a checkpoint is written, if one takes ``step_s``."""
        return ceil(self.seconds / step_s)


def trainers_part(setting: EngineConfig, gpu_memory: int) -> int:
    """Return the bytes of a GPU that the trainer may use beside engines that work at the same time."""
    return round((1 - (setting.gpu_share or 0)) * gpu_memory)


def misfits(
    stages: Sequence[StageMemory], engine: EngineMemory | None, setting: EngineConfig, gpu_memory: int | None
) -> list[str]:
    """Return a line for everything that is too large; none if the bytes of a GPU's memory are not known.
    ``setting``: of the engines.

    Only what is computed exactly is compared: weights, gradients and optimizer of the trainer, weights of an
    engine. Activations are an estimate, and the KV cache takes what is left.
    """
    if gpu_memory is None:
        return []
    memory = gpu_memory / GIB
    problems: list[str] = []
    worst = max(stages, key=lambda stage: stage.held)
    exact = worst.held - worst.runtime
    left = trainers_part(setting, gpu_memory)
    if exact > left:
        has = f"a GPU has {memory:g} GiB (cluster.gpu_memory_gib)"
        if setting.gpu_share is not None:
            has += f", {left / GIB:.1f} of them for the trainer (rollout.engine.gpu_share)"
        problems.append(
            f"actor.parallel: weights, gradients and optimizer take {exact / GIB:.1f} GiB on each rank of "
            f"pipeline stage {worst.stage}, and {has}; split the model over more ranks (tensor, pipeline, "
            "expert), or the optimizer with actor.optimizer.distributed"
        )
    if engine is not None and engine.pool is not None and engine.pool <= 0:
        problems.append(
            f"rollout.engine.tensor_parallel: the weights take {engine.weights / GIB:.1f} GiB on each of the "
            f"{setting.ranks} ranks of an engine, which leaves no room for a KV cache: a GPU has "
            f"{memory:g} GiB (cluster.gpu_memory_gib), of which {engine.reserved / GIB:.1f} GiB are not for "
            "it; use more ranks (tensor_parallel, pipeline_parallel), over several nodes if need be (nodes)"
        )
    return problems


def late_checkpoints(checkpoint: CheckpointPlan) -> list[str]:
    """Return a line if every checkpoint would be given up: it is a note, because the rate is an estimate."""
    if checkpoint.in_time:
        return []
    size, rate = f"{checkpoint.bytes / 1e9:,.0f} GB", f"{checkpoint.bytes_per_s / 1e9:g} GB/s"
    return [
        f"checkpoint.timeout_s: {checkpoint.settings.timeout_s:g}: a checkpoint of {size} takes "
        f"{checkpoint.seconds:,.0f} s at {rate} (cluster.file_system_bytes_per_s) and would be given up; "
        "allow more seconds, or state the rate of your file system"
    ]


def judge_misfits(judge: Judge, gpu_memory: int | None) -> list[str]:
    """Return a line if the weights of the judge's own engines alone are too large for a GPU."""
    engines = own_engines(judge)
    if engines is None or gpu_memory is None or (weights := judge_weights(engines)) < gpu_memory:
        return []
    return [
        f"judge.endpoint.tensor_parallel: the weights take {weights / GIB:.1f} GiB on each of the "
        f"{engines.tensor_parallel} ranks of an engine, and a GPU has {gpu_memory / GIB:g} GiB "
        "(cluster.gpu_memory_gib); use more ranks, up to the GPUs of one node"
    ]


def judge_weights(engines: OwnEngines) -> int:
    """Return the bytes of weights on each rank of the judge's own engines, as their files have them."""
    size = sum(file.stat().st_size for file in engines.path.glob("*.safetensors"))
    return size // engines.tensor_parallel


def checkpoint_bytes(actor: ActorConfig, critic: CriticConfig | None, dtype: str, spec: ModelSpec) -> int:
    """Return the bytes of a checkpoint. ``dtype``: that of the model, by torch's name."""
    itemsize = ITEMSIZE[dtype]
    total = _trained(spec, actor.lora, itemsize)
    if critic is not None:
        total += _trained(value_spec(spec), None, itemsize)
    if actor.kl is not None and actor.kl.reference.type == "average":
        total += _elements(spec) * FLOAT
    return total


def share_bytes(actor: ActorConfig, critic: CriticConfig | None, dtype: str, plan: ExportPlan) -> int:
    """Return the most bytes of a rank's share, padding of buffers included. Raises UnevenSplit."""
    itemsize = ITEMSIZE[dtype]
    of_critic = stage_parameters(value_spec(plan.spec), plan.layout) if critic else []
    shares: list[int] = []
    for stage, held in enumerate(stage_parameters(plan.spec, plan.layout, actor.lora)):
        weights, _, optimizer = state_bytes(held, plan.layout, actor.optimizer, itemsize, stage)
        shares.append(weights + optimizer)
        if critic is not None:
            weights, _, optimizer = state_bytes(
                of_critic[stage], plan.layout, critic.optimizer, itemsize, stage
            )
            shares[-1] += weights + optimizer
        if actor.kl is not None and actor.kl.reference.type == "average":
            shares[-1] += (held.total + held.buffers) * FLOAT
    return max(shares)


def _trained(spec: ModelSpec, lora: LoraConfig | None, itemsize: int) -> int:
    [whole] = stage_parameters(spec, Layout(), lora)
    weights, trained = whole.weights[0], whole.trained[0]
    single = sum(weights.single) + whole.buffers
    bytes_ = (weights.total - sum(weights.single) + whole.adapters) * itemsize + single * FLOAT
    main = 0 if itemsize == FLOAT else FLOAT
    return bytes_ + (trained.total - sum(trained.single)) * main + trained.total * 2 * FLOAT


def _elements(spec: ModelSpec) -> int:
    [whole] = stage_parameters(spec, Layout())
    return whole.weights[0].total + whole.buffers
