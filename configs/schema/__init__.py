"""The typed recipe, one short file per section."""

from configs.schema.actor import ActorConfig, LoraConfig, ParallelConfig
from configs.schema.checkpoint import CheckpointConfig
from configs.schema.models import AverageReference, CheckpointReference, CriticConfig, KLConfig, TeacherConfig
from configs.schema.objective import CorrectionConfig, Objective, TurnsConfig
from configs.schema.optimizer import ConstantRate, CosineDecay, LinearDecay, OptimizerConfig
from configs.schema.plugin import PluginConfig
from configs.schema.rollout import EngineConfig, RolloutConfig, SamplingConfig
from configs.schema.run import (
    DataConfig,
    EvalConfig,
    LocalCluster,
    ModelConfig,
    RunConfig,
    SlurmCluster,
)
from configs.schema.simulate import SimulateConfig
from configs.schema.weights import (
    DeltaTransport,
    DiskTransport,
    DistributedTransport,
    TensorTransport,
    Transport,
    Verify,
    VerifyOff,
    WeightsConfig,
)

__all__ = [
    "ActorConfig",
    "AverageReference",
    "CheckpointConfig",
    "CheckpointReference",
    "ConstantRate",
    "CorrectionConfig",
    "CosineDecay",
    "CriticConfig",
    "DataConfig",
    "DeltaTransport",
    "DiskTransport",
    "DistributedTransport",
    "EngineConfig",
    "EvalConfig",
    "KLConfig",
    "LinearDecay",
    "LocalCluster",
    "LoraConfig",
    "ModelConfig",
    "Objective",
    "OptimizerConfig",
    "ParallelConfig",
    "PluginConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SimulateConfig",
    "SlurmCluster",
    "TeacherConfig",
    "TensorTransport",
    "Transport",
    "TurnsConfig",
    "Verify",
    "VerifyOff",
    "WeightsConfig",
]
