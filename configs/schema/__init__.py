"""The typed recipe, one short file per section."""

from slipstream.configs.schema.actor import ActorConfig, LoraConfig, ParallelConfig, RoutingReplay
from slipstream.configs.schema.advantage import TeacherTerm
from slipstream.configs.schema.base import hub_model, is_on_hub, path_text
from slipstream.configs.schema.checkpoint import CheckpointConfig
from slipstream.configs.schema.cluster import ContainerConfig, LocalCluster, RayCluster, SlurmCluster
from slipstream.configs.schema.data import (
    ColumnsConfig,
    DataConfig,
    EvalConfig,
    PromptFile,
)
from slipstream.configs.schema.gateway import GatewayConfig, LimitsConfig, TracesConfig, TurnRule
from slipstream.configs.schema.hooks import HooksConfig
from slipstream.configs.schema.judge import CodeJudge, Judge, ModelJudge
from slipstream.configs.schema.live import LiveConfig, LiveJudgingConfig
from slipstream.configs.schema.log import EpisodeLogConfig, LogConfig
from slipstream.configs.schema.models import (
    AverageReference,
    CheckpointReference,
    CriticConfig,
    KLConfig,
)
from slipstream.configs.schema.objective import CorrectionConfig, Objective, TurnsConfig
from slipstream.configs.schema.optimizer import ConstantRate, CosineDecay, LinearDecay, OptimizerConfig
from slipstream.configs.schema.plugin import PluginConfig
from slipstream.configs.schema.rollout import (
    DialectConfig,
    EndpointConfig,
    EngineConfig,
    JudgingConfig,
    RolloutConfig,
)
from slipstream.configs.schema.run import ModelConfig, RunConfig
from slipstream.configs.schema.sampling import EvalSamplingConfig, SamplingConfig
from slipstream.configs.schema.simulate import SimulateConfig
from slipstream.configs.schema.weights import (
    DeltaTransportConfig,
    DiskTransportConfig,
    ShardsTransportConfig,
    TensorTransportConfig,
    TransportConfig,
    Verify,
    VerifyDigests,
    VerifyOff,
    WeightsConfig,
)

__all__ = [
    "ActorConfig",
    "AverageReference",
    "CheckpointConfig",
    "CheckpointReference",
    "CodeJudge",
    "ColumnsConfig",
    "ConstantRate",
    "ContainerConfig",
    "CorrectionConfig",
    "CosineDecay",
    "CriticConfig",
    "DataConfig",
    "DeltaTransportConfig",
    "DialectConfig",
    "DiskTransportConfig",
    "EndpointConfig",
    "EngineConfig",
    "EpisodeLogConfig",
    "EvalConfig",
    "EvalSamplingConfig",
    "GatewayConfig",
    "HooksConfig",
    "Judge",
    "JudgingConfig",
    "KLConfig",
    "LimitsConfig",
    "LinearDecay",
    "LiveConfig",
    "LiveJudgingConfig",
    "LocalCluster",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "ModelJudge",
    "Objective",
    "OptimizerConfig",
    "ParallelConfig",
    "PluginConfig",
    "PromptFile",
    "RayCluster",
    "RolloutConfig",
    "RoutingReplay",
    "RunConfig",
    "SamplingConfig",
    "ShardsTransportConfig",
    "SimulateConfig",
    "SlurmCluster",
    "TeacherTerm",
    "TensorTransportConfig",
    "TracesConfig",
    "TransportConfig",
    "TurnRule",
    "TurnsConfig",
    "Verify",
    "VerifyDigests",
    "VerifyOff",
    "WeightsConfig",
    "hub_model",
    "is_on_hub",
    "path_text",
]
