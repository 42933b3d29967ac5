"""``log``: what a run writes for people to look into, beside its metrics."""

from typing import Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class EpisodeLogConfig(Section):
    """Trained episodes as text, for `slipstream report`. Trainer ranks write them beside their steps."""

    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of groups whose episodes are recorded. All episodes of a group are, or none.",
    )
    max_mib: float = Field(
        default=256, gt=0, description="Largest size of all files in MiB; the oldest are deleted first."
    )
    max_rows: int = Field(
        default=100_000, ge=1, description="Largest number of episodes; the oldest are deleted first."
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


class LogConfig(Section):
    """Records for people."""

    episodes: EpisodeLogConfig | None = Field(
        default=EpisodeLogConfig(), description="Trained episodes in `episodes/`; null: none are written."
    )
