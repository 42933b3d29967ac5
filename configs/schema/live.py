"""``live``: how the policy learns from the users whom a gateway serves."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.rollout import JudgingConfig


class LiveJudgingConfig(JudgingConfig):
    """The processes in which `judge` judges live turns. They are apart from those of `rollout.reward`."""

    processes: int = Field(
        default=1, ge=1, le=1024, description="Number of processes that judge the turns of live users."
    )
    concurrency: int = Field(
        default=32,
        ge=1,
        description="Largest number of turns that one process judges at a time if `judge` is `async def`. If "
        "it is a plain `def`, a process judges one at a time.",
    )
    timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds that the judge may take for one turn. The time begins when the judge does: "
        "neither the wait for a process nor its start counts.",
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description="Number of attempts at judging a turn before it is put off. The turn goes on waiting for "
        "its verdict, and gets no score.",
    )
    memory_mb: int | None = Field(
        default=4096,
        ge=256,
        description="Largest heap of a judge process, and of each process that it starts, in MB: beyond it, "
        "allocations raise MemoryError. A process that still holds three quarters of it between two turns is "
        "replaced. null: no limit.",
    )
    start_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds that a judge process may take to import and construct it.",
    )


class NoBaseline(Section):
    """The advantage of a turn is its score."""

    type: Literal["none"] = "none"


class RunningBaseline(Section):
    """The advantage of a turn is its score minus the mean of the scores trained before it."""

    type: Literal["running"] = "running"
    decay: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="Factor by which each trained turn reduces the weight of all turns before it. 0.99 is a "
        "mean over about 100 turns.",
    )
    per: Literal["all", "key"] = Field(
        default="all",
        description="`all`: one mean over the turns of all users. `key`: one for each API key, which begins "
        "at the mean of all.",
    )


Baseline = Annotated[RunningBaseline | NoBaseline, Field(discriminator="type")]


class LiveConfig(Section):
    """How the policy learns from the turns of live users."""

    train: bool = Field(
        default=True,
        description="Train on the turns. False: they are recorded, but neither judged nor trained.",
    )
    judging: LiveJudgingConfig = Field(
        default=LiveJudgingConfig(), description="The processes in which the judge runs."
    )
    share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the batch that turns of live users make: of `rollout.batch_size` groups, so "
        "many are replaced by one live trajectory each. 1: a batch holds live trajectories alone.",
    )
    max_wait_s: float = Field(
        default=60,
        ge=0,
        description="Seconds that a batch which lacks nothing but live trajectories waits for them. Then it "
        "is trained with those that are there, and no further batch waits until a turn has become ready.",
    )
    baseline: Baseline = Field(
        default=RunningBaseline(), description="What a turn's score is compared with for its advantage."
    )


def live_places(live: LiveConfig | None, batch_size: int) -> int:
    """Return how many of ``batch_size`` places in a batch live trajectories get. Rounded half up."""
    if live is None or not live.train:
        return 0
    return max(1, int(live.share * batch_size + 0.5))
