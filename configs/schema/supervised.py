"""A recipe of ``slipstream sft``: supervised training with the same trainer."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.actor import TrainedConfig
from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.checkpoint import CheckpointConfig
from slipstream.configs.schema.plugin import Plugin
from slipstream.configs.schema.run import Cluster, LocalCluster, ModelConfig, RunSection


class ExamplesConfig(Section):
    """The examples to train on."""

    path: PathSetting = Field(
        description="Example file (.jsonl or .parquet) with the columns `prompt` and `response`, or "
        "`prompt`, `chosen` and `rejected`."
    )
    shuffle: bool = Field(
        default=True, description="Take the examples in random order instead of the order of the file."
    )


class SupervisedCheckpointConfig(CheckpointConfig):
    """Checkpoints of supervised training, whose steps are shorter than those of a run."""

    every: int = Field(
        default=100, ge=0, description="Number of training steps between two checkpoints; 0 writes none."
    )


class SupervisedConfig(Section):
    """A recipe of ``slipstream sft``."""

    learn: Literal["responses", "preferences"] = Field(
        default="responses",
        description="`responses`: train a policy on responses. `preferences`: train a reward model to value "
        "a chosen response above a rejected one.",
    )
    run: RunSection
    model: ModelConfig
    data: ExamplesConfig
    actor: TrainedConfig = Field(default=TrainedConfig(), description="How the model is trained.")
    batch_size: int = Field(default=64, ge=1, description="Number of examples in a training step.")
    checkpoint: SupervisedCheckpointConfig = Field(
        default=SupervisedCheckpointConfig(), description="Checkpoints of the run."
    )
    cluster: Cluster = Field(default=LocalCluster(), description="Machines that the run uses.")
    prepare: Plugin | None = Field(
        default=None,
        description="Import path of a function that creates `model.path` and `data.path`. It is called "
        "before the run if one of them does not exist.",
    )
