"""A recipe of ``slipstream sft``: supervised training with the same trainer."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.actor import TrainedConfig
from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.checkpoint import CheckpointConfig
from slipstream.configs.schema.cluster import Cluster, LocalCluster
from slipstream.configs.schema.plugin import Plugin
from slipstream.configs.schema.run import ModelConfig, RunSection


class ExampleColumnsConfig(Section):
    """The columns of an example file. A name that is not a column leads into objects by its dots."""

    prompt: str = Field(default="prompt", min_length=1, description="Column with the prompt: text or chat.")
    response: str = Field(
        default="response", min_length=1, description="Column with the text to learn, for `responses`."
    )
    chosen: str = Field(
        default="chosen", min_length=1, description="Column with the better text, for `preferences`."
    )
    rejected: str = Field(
        default="rejected", min_length=1, description="Column with the worse text, for `preferences`."
    )
    messages: str | None = Field(
        default=None,
        min_length=1,
        description="Column with a whole chat, whose last message is the text to learn, in place of "
        "`prompt` and `response`; null: there is none.",
    )


class ExamplesConfig(Section):
    """The examples to train on."""

    path: PathSetting = Field(
        description="Example file (.jsonl or .parquet), several of them (`part-*.parquet`), or a data set of "
        "the Hugging Face Hub (`hf://datasets/OWNER/NAME/FOLDER`)."
    )
    columns: ExampleColumnsConfig = Field(default=ExampleColumnsConfig())
    shuffle: bool = Field(
        default=True,
        description="Take the examples in random order, drawn anew in every epoch from "
        "`run.seed`, instead of the order of the file.",
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
        description="`responses`: train a policy on responses. `preferences`: train a reward model to give "
        "a chosen response a larger value than a rejected one.",
    )
    run: RunSection
    model: ModelConfig
    data: ExamplesConfig
    actor: TrainedConfig = Field(default=TrainedConfig())
    batch_size: int = Field(default=64, ge=1, description="Number of examples in a training step.")
    checkpoint: SupervisedCheckpointConfig = Field(default=SupervisedCheckpointConfig())
    cluster: Cluster = Field(default=LocalCluster(), description="The machines that the run uses.")
    prepare: Plugin | None = Field(
        default=None,
        description="Import path of a function that creates `model.path` and `data.path`. It is called "
        "before the run if one of them does not exist, which must lie in a hidden folder.",
    )
