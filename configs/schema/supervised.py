"""A recipe of ``slipstream sft``: supervised training on demonstrations, by the same trainer."""

from pathlib import Path

from pydantic import Field

from configs.schema.actor import TrainedConfig
from configs.schema.base import Section
from configs.schema.plugin import Plugin
from configs.schema.run import Cluster, LocalCluster, ModelConfig, RunSection


class DemonstrationsConfig(Section):
    path: Path = Field(
        description="Demonstrations: .jsonl or .parquet with the columns `prompt` and `response`."
    )
    shuffle: bool = True


class SupervisedConfig(Section):
    run: RunSection
    model: ModelConfig
    data: DemonstrationsConfig
    actor: TrainedConfig = TrainedConfig()
    batch_size: int = Field(64, ge=1, description="Demonstrations of a training step.")
    cluster: Cluster = LocalCluster()
    prepare: Plugin | None = Field(
        None, description="Makes model.path and data.path before the run when one of them is not there."
    )
