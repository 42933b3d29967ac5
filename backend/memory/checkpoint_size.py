"""Bytes of a checkpoint of the trainer's whole state (``backend.megatron.checkpoint``), whatever the layout.

    policy   all weights, and of those that are trained Adam's main weight and moments
    critic   the same
    average  weights in single precision (``actor.kl.reference.type: average``)

In bfloat16 a trained parameter has 2 + 4 + 8 bytes, in float32 4 + 8. Random states and the description are
not counted. A rank's share on the disk of its node has all that the rank holds of these.
"""

from dataclasses import dataclass
from math import ceil

from slipstream.backend.memory.activations import FLOAT
from slipstream.backend.memory.parameters import stage_parameters
from slipstream.backend.memory.trainer_memory import state_bytes
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec, value_spec
from slipstream.bridge.shards.plan import ExportPlan
from slipstream.configs.schema import ActorConfig, CheckpointConfig, CriticConfig
from slipstream.configs.schema.actor import LoraConfig


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
