"""``log``: what a run writes for people to look into, beside its metrics."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class EpisodeLogConfig(Section):
    """Every episode as text, in `episodes/` of the run folder, for `slipstream report`: trained, given up, or
    an evaluation (docs/report.md#episodes). Turns of live users are never in it."""

    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of groups, and of held-out prompts, whose episodes are recorded. Of a group, "
        "all episodes are recorded or none.",
    )
    max_mib: float = Field(
        default=256,
        gt=0,
        description="Largest size of all files in MiB; the oldest are deleted first. A quarter of it is "
        "for episodes that are never trained.",
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
        description="Number of tokens of a response, counted from its first, that are recorded one by one "
        "with their log-probs and advantages. The text is always whole.",
    )
    format: Literal["jsonl", "parquet"] = Field(
        default="jsonl",
        description="`jsonl`: a line of JSON for each episode. `parquet`: files that are full become "
        "parquet files; the newest file stays lines of JSON.",
    )


class WandbConfig(Section):
    """Every metric also on Weights & Biases (https://wandb.ai): `log: {wandb: {project: my-project}}`.
    Numbers and histograms have the names of metrics, and the policy version is their x-axis. Needs `pip
    install wandb` in the environment of the driver; the API key is the one of `wandb login` or of
    `WANDB_API_KEY`. An outage never reaches the run: docs/metrics.md#on-other-services."""

    project: str = Field(min_length=1, description="Project of the run.")
    entity: str | None = Field(
        default=None, min_length=1, description="User or team of the project; null: the one of the API key."
    )
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: `run.name`.")
    group: str | None = Field(default=None, min_length=1, description="Group of runs; null: none.")
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="`online`: send metrics while the run goes on. `offline`: write into `wandb/` of the "
        "run folder, for `wandb sync` later.",
    )
    timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds to wait for the first connection, and at the end of the run for unsent records.",
    )


class MlflowConfig(Section):
    """Every number also on MLflow (https://mlflow.org): `log: {mlflow: {tracking_uri: "http://host:5000"}}`.
    The recipe becomes an artifact. MLflow has no histograms. Needs `pip install mlflow-skinny` in the
    environment of the driver, or `mlflow` for a database. An outage never reaches the run:
    docs/metrics.md#on-other-services."""

    tracking_uri: str = Field(
        min_length=1,
        description="Address of a tracking server, or a database: `http://host:5000`, "
        "`sqlite:///runs/mlflow.db`.",
    )
    experiment: str = Field(default="slipstream", min_length=1, description="Experiment of the run.")
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: `run.name`.")
    timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds to wait for a reply, and at the end of the run for unsent records.",
    )


class LogConfig(Section):
    """Records for people, beside the metrics."""

    episodes: EpisodeLogConfig | None = Field(
        default=EpisodeLogConfig(), description="`log: {episodes: null}` writes none."
    )
    wandb: WandbConfig | None = Field(default=None, description="Without the section nothing is sent there.")
    mlflow: MlflowConfig | None = Field(
        default=None, description="Without the section nothing is sent there."
    )
