"""A recipe of ``slipstream sft``: supervised training, by the same trainer."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from slipstream.configs.schema.actor import TrainedConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.checkpoint import CheckpointConfig
from slipstream.configs.schema.plugin import Plugin
from slipstream.configs.schema.run import Cluster, LocalCluster, ModelConfig, RunSection


class ExamplesConfig(Section):
    path: Path = Field(
        description="Examples: .jsonl or .parquet with the columns `prompt` and `response`, or `prompt`, "
        "`chosen` and `rejected`."
    )
    shuffle: bool = True


class SupervisedConfig(Section):
    learn: Literal["responses", "preferences"] = Field(
        "responses",
        description="responses: a policy is to give them. preferences: a reward model is to value a `chosen` "
        "answer above a `rejected` one.",
    )
    run: RunSection
    model: ModelConfig
    data: ExamplesConfig
    actor: TrainedConfig = TrainedConfig()
    batch_size: int = Field(64, ge=1, description="Examples of a training step.")
    checkpoint: CheckpointConfig = CheckpointConfig(every=100)
    cluster: Cluster = LocalCluster()
    prepare: Plugin | None = Field(
        None, description="Makes model.path and data.path before the run when one of them is not there."
    )
