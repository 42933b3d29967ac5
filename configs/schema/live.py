"""``live``: how the policy learns from the users whom a gateway serves."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.rollout import JudgingConfig


class LiveJudgingConfig(JudgingConfig):
    """The processes in which `judge` judges live turns, apart from those of `rollout.reward`."""

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
        description="Number of attempts at judging a turn before the turn is put off. It goes on waiting "
        "for its verdict, and gets no score meanwhile.",
    )
    memory_mb: int | None = Field(
        default=4096,
        ge=256,
        description="Largest heap of a judge process, and of each process that it starts, in MB. Beyond "
        "it, allocations raise MemoryError. A process that still holds three quarters of it between two "
        "turns is replaced. null: no limit.",
    )
    start_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds that a judge process may take to import and construct the judge.",
    )


class NoBaseline(Section):
    """The advantage of a turn is its score."""

    type: Literal["none"] = "none"


class RunningBaseline(Section):
    """The advantage of a turn is its score minus the mean of the scores trained before it. A resumed run
    computes the mean from the ledger, so that it is the mean that the restored weights have seen."""

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


class LastCredit(Section):
    """The last main turn of a session gets the session's reward, and its other turns get none from it."""

    type: Literal["last"] = "last"

    @property
    def share(self) -> float:
        """Factor of a turn's share for each main turn that follows."""
        return 0.0


class SumCredit(Section):
    """Each main turn of a session gets the sum of the rewards that follow, which is the session's reward."""

    type: Literal["sum"] = "sum"

    @property
    def share(self) -> float:
        """Factor of a turn's share for each main turn that follows."""
        return 1.0


class DiscountCredit(Section):
    """Each main turn of a session gets the session's reward times `discount` for each main turn after it."""

    type: Literal["discount"] = "discount"
    discount: float = Field(default=0.9, gt=0, lt=1, description="Factor for each main turn that follows.")

    @property
    def share(self) -> float:
        """Factor of a turn's share for each main turn that follows."""
        return self.discount


Credit = Annotated[SumCredit | LastCredit | DiscountCredit, Field(discriminator="type")]


class LiveConfig(Section):
    """How the policy learns from the users whom a gateway serves (docs/live.md)."""

    train: bool = Field(
        default=True,
        description="Train on the turns. false: turns are recorded, but neither judged nor trained.",
    )
    judging: LiveJudgingConfig = Field(default=LiveJudgingConfig())
    share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the batch that live users get: of the `rollout.batch_size` groups, this "
        "share is replaced by one live trajectory each. 1: a batch holds live trajectories alone.",
    )
    max_wait_s: float = Field(
        default=60,
        ge=0,
        description="Seconds that a batch which lacks only live trajectories waits for them. Then it is "
        "trained with those that have come. Until a turn is ready, batches wait for a tenth of the time at "
        "most. Users and judge should take less: steps that are quicker let turns expire.",
    )
    baseline: Annotated[RunningBaseline | NoBaseline, Field(discriminator="type")] = Field(
        default=RunningBaseline(),
        description="Number that is subtracted from the score of a turn for its advantage.",
    )
    credit: Credit = Field(
        default=SumCredit(),
        description="Share of each main turn in a reward that a client gives to a whole session without a "
        "`discount` of its own.",
    )


def live_places(live: LiveConfig | None, batch_size: int) -> int:
    """Return how many of ``batch_size`` places in a batch live trajectories get. Rounded half up."""
    if live is None or not live.train:
        return 0
    return max(1, int(live.share * batch_size + 0.5))
