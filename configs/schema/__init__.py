"""The typed recipe, one short file per section."""

from configs.schema.actor import (
    ActorConfig,
    ConstantRate,
    CosineDecay,
    LinearDecay,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
)
from configs.schema.checkpoint import CheckpointConfig
from configs.schema.objective import CorrectionConfig, Objective
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
    "CheckpointConfig",
    "ConstantRate",
    "CorrectionConfig",
    "CosineDecay",
    "DataConfig",
    "DeltaTransport",
    "DiskTransport",
    "DistributedTransport",
    "EngineConfig",
    "EvalConfig",
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
    "TensorTransport",
    "Transport",
    "Verify",
    "VerifyOff",
    "WeightsConfig",
]
