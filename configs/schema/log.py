"""``log``: what a run writes for people to look into, beside its metrics."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class EpisodeLogConfig(Section):
    """Every episode as text, for `slipstream report`: trained, given up, or an evaluation."""

    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of groups, and of held-out prompts, whose episodes are recorded. All episodes of "
        "a group are, or none.",
    )
    max_mib: float = Field(
        default=256,
        gt=0,
        description="Largest size of all files in MiB; the oldest are deleted first. A quarter of it is for "
        "episodes that are never trained.",
    )
    max_rows: int = Field(
        default=100_000,
        ge=1,
        description="Largest number of episodes; the oldest are deleted first. A quarter of it is for "
        "episodes that are never trained.",
    )
    max_tokens: int = Field(
        default=2048,
        ge=0,
        description="Number of tokens of a response, from its first, that are recorded one by one with their "
        "log-probs and advantages. Its text is always whole.",
    )
    format: Literal["jsonl", "parquet"] = Field(
        default="jsonl",
        description="`jsonl`: a line of JSON for each episode. `parquet`: a file that is full becomes one of "
        "parquet; the newest stays lines of JSON.",
    )


class WandbConfig(Section):
    """Metrics also on Weights & Biases. Needs the package `wandb` where the driver runs."""

    project: str = Field(min_length=1, description="Project of the run.")
    entity: str | None = Field(
        default=None, min_length=1, description="User or team of the project; null: that of the API key."
    )
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: `run.name`.")
    group: str | None = Field(default=None, min_length=1, description="Group of runs; null: none.")
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="`offline`: write into `wandb/` of the run folder, for `wandb sync` later.",
    )
    timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds to wait for the first connection, and at the end of the run for what is unsent.",
    )


class MlflowConfig(Section):
    """Metrics also on MLflow. Needs the package `mlflow` or `mlflow-skinny` where the driver runs."""

    tracking_uri: str = Field(
        min_length=1,
        description="Address of a tracking server, or a database: `http://host:5000`, `sqlite:///runs/mlflow.db`.",
    )
    experiment: str = Field(default="slipstream", min_length=1, description="Experiment of the run.")
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: `run.name`.")
    timeout_s: float = Field(
        default=30, gt=0, description="Seconds to wait for a reply, and at the end for what is unsent."
    )


class LogConfig(Section):
    """Records for people."""

    episodes: EpisodeLogConfig | None = Field(
        default=EpisodeLogConfig(), description="Episodes in `episodes/`; null: none are written."
    )
    wandb: WandbConfig | None = Field(
        default=None, description="Metrics also on Weights & Biases; null: not there."
    )
    mlflow: MlflowConfig | None = Field(default=None, description="Metrics also on MLflow; null: not there.")
