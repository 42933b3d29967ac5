"""``rollout``: how trajectories are generated, judged and admitted."""

from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.plugin import Plugin


class SamplingConfig(Section):
    """How the behaviour policy samples. Log-probs are those of the distribution at this temperature."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, description="-1 keeps the whole vocabulary.")
    max_new_tokens: int = Field(1024, ge=1)


class EngineConfig(Section):
    """The SGLang servers."""

    count: int = Field(1, ge=1, description="Independent servers.")
    tensor_parallel: int = Field(1, ge=1, description="Ranks of one server.")
    colocated: bool = Field(
        False,
        description="The engines are on the trainer's GPUs and take turns with it: who does not compute has "
        "its memory on the host. Generation stands still while the trainer trains.",
    )
    start_timeout_s: float = Field(600, gt=0, description="Longest time from start to healthy.")
    request_timeout_s: float = Field(
        600,
        gt=0,
        description="Longest silence of an engine about one request, pauses for an update included (but not "
        "the trainer's turns of `colocated`); a longer one has the engine checked and the request continued.",
    )
    stream_interval: int = Field(
        64,
        ge=1,
        description="Tokens from one message of an engine about a request to the next: what is lost of an "
        "answer at most when its engine dies.",
    )
    adaptive_concurrency: bool = Field(
        True,
        description="Generate fewer than `rollout.max_concurrent` trajectories at one time while the "
        "engines' KV memory does not hold them.",
    )
    restarts: int = Field(3, ge=0, description="Restarts of one engine before the run fails.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of SGLang's ServerArgs, by their own names."
    )


class SlotsAdmission(Section):
    """(max_head_offpolicyness + 1) * batch_size slots, freed when what was trained on them is published."""

    type: Literal["slots"] = "slots"


class VolumeAdmission(Section):
    """AReaL's gate, for comparison: bounds how many groups were ever accepted, not how old they become."""

    type: Literal["volume"] = "volume"


AdmissionConfig = Annotated[SlotsAdmission | VolumeAdmission, Field(discriminator="type")]


class ReadyFirstConsumption(Section):
    """What is ready is trained, oldest first, but for its tokens that are older than the bound by then."""

    type: Literal["ready_first"] = "ready_first"
    on_stale: Literal["mask", "requeue", "drop"] = Field(
        "mask",
        description="A group with tokens outside the bound: they get no loss (mask), its prompt is generated "
        "again (requeue), or it is given up (drop).",
    )


class FifoConsumption(Section):
    """Batches in admission order exactly. A slow group holds up its batch."""

    type: Literal["fifo"] = "fifo"


class WindowedConsumption(Section):
    """A slow group may be overtaken as long as it can still be trained within the bound. No token is lost."""

    type: Literal["windowed"] = "windowed"
    fraction: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="Part of the slots that is not admitted to, so that as many groups may be overtaken.",
    )


ConsumptionConfig = Annotated[
    ReadyFirstConsumption | FifoConsumption | WindowedConsumption, Field(discriminator="type")
]


class RolloutConfig(Section):
    max_head_offpolicyness: int = Field(
        ge=0,
        description="Bound on the lag of every trained token, in policy versions; 0: synchronous.",
    )
    allow_extreme_offpolicyness: bool = Field(False, description="Permit a bound above 16.")
    batch_size: int = Field(ge=1, description="Groups per training step.")
    n_samples_per_prompt: int = Field(ge=1, description="Trajectories per group.")
    admission: AdmissionConfig = Field(SlotsAdmission(), description="When one more group may start.")
    consumption: ConsumptionConfig = Field(
        ReadyFirstConsumption(), description="Which ready groups make the next batch."
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        le=4,
        description="Groups started per group that a batch needs; those not needed in time are given up.",
    )
    max_concurrent: int = Field(
        256, ge=1, description="Trajectories being generated at one time, all engines."
    )
    episode_attempts: int = Field(
        3, ge=1, description="Attempts of one episode before its group is `failed`; a lost engine costs none."
    )
    episode_timeout_s: float = Field(600, gt=0, description="Longest time of one attempt at an episode.")
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    workflow: Plugin = Field(
        default="slipstream.rollout.workflow.SingleTurn",
        description="What an episode does (`slipstream.rollout.workflow.Workflow`).",
    )
    reward: Plugin = Field(description="What an episode is worth (`slipstream.rollout.reward.Reward`).")
    group_filter: Plugin | None = Field(
        None,
        description="Which finished groups are trained (`slipstream.rollout.control.filters.GroupFilter`).",
    )
