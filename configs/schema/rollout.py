"""``rollout``: how trajectories are generated, rewarded and admitted."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section
from slipstream.configs.schema.dialect import EndpointConfig
from slipstream.configs.schema.hooks import HooksConfig
from slipstream.configs.schema.plugin import Plugin, PluginConfig
from slipstream.configs.schema.sampling import SamplingConfig


class EngineConfig(Section):
    """The SGLang engines."""

    count: int = Field(default=1, ge=1, description="Number of engines, each of which is a server.")
    nodes: int = Field(
        default=1,
        ge=1,
        description="Number of nodes of each engine, with equally many ranks on each. More than one needs "
        "`cluster.type: slurm`, and a transport that reaches several nodes.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Number of tensor-parallel ranks per engine, or per pipeline stage of an engine.",
    )
    data_parallel: int = Field(
        default=1,
        ge=1,
        description="Number of groups into which the tensor-parallel ranks divide for attention (SGLang's "
        "data-parallel attention). Each group serves requests of its own and holds their KV cache alone, so "
        "that heads are split over `tensor_parallel / data_parallel` ranks.",
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        description="Number of groups into which the tensor-parallel ranks divide for experts. Each group "
        "holds its share of the experts, each split over `tensor_parallel / expert_parallel` ranks.",
    )
    pipeline_parallel: int = Field(default=1, ge=1, description="Number of pipeline stages per engine.")
    quantization: Literal["fp8"] | None = Field(
        default=None,
        description="How the engines hold the weights of the policy. `fp8`: projections in blocks of 128 x "
        "128, which the trainer quantizes for each version; the trainer's own weights stay as they are. "
        "null: in `model.dtype`.",
    )
    colocated: bool = Field(
        default=False,
        description="Place the engines on the trainer's GPUs. Trainer and engines take turns, and the one "
        "that waits keeps its state in host memory. Generation stops while the trainer trains.",
    )
    start_timeout_s: float = Field(
        default=600, gt=0, description="Seconds that an engine may take to start and become healthy."
    )
    request_timeout_s: float = Field(
        default=600,
        gt=0,
        description="Seconds for which an engine may send nothing about a request. Then the engine is "
        "checked and the request is continued. Pauses for an update count, turns of a colocated trainer do "
        "not.",
    )
    answer_timeout_s: float = Field(
        default=20,
        gt=0,
        description="Seconds within which an engine must say that it is well. It is asked every few seconds. "
        "One that does not say so is given up: its requests go on elsewhere, and it is started again.",
    )
    stream_interval: int = Field(
        default=64,
        ge=1,
        description="Number of tokens between two messages of an engine about a request: the most that is "
        "lost of a completion when its engine dies.",
    )
    adaptive_concurrency: bool = Field(
        default=True,
        description="Generate fewer than `rollout.max_concurrent` trajectories at a time while the engines' "
        "KV memory cannot hold that many.",
    )
    restarts: int = Field(
        default=3, ge=0, description="Number of restarts of one engine before the run fails."
    )
    args: dict[str, object] = Field(
        default={}, description="Further fields of SGLang's ServerArgs, under their own names."
    )

    @property
    def ranks(self) -> int:
        """Number of ranks of an engine, each of which takes a GPU."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of an engine on each of its nodes."""
        return self.ranks // self.nodes


class JudgingConfig(Section):
    """The processes in which the reward runs. There it may block, crash and print without harm to the run."""

    processes: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of judge processes of each collector. A reward that computes needs one for each "
        "CPU core that it shall keep busy.",
    )
    concurrency: int = Field(
        default=32,
        ge=1,
        description="Largest number of trajectories that one process judges at a time if `score` is "
        "`async def`. If it is a plain `def`, a process judges one at a time.",
    )
    timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds that the reward may take for one trajectory. The time begins when the reward "
        "does: neither the wait for a process nor its start counts.",
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description="Number of attempts at judging a trajectory before its group is lost as `failed`. The "
        "trajectory is kept meanwhile: no token is generated again.",
    )
    retry_after_s: float = Field(
        default=1,
        gt=0,
        description="Seconds between a failed attempt and the next. They double with each further failure, "
        "up to a minute.",
    )
    memory_mb: int | None = Field(
        default=4096,
        ge=256,
        description="Largest heap of a judge process, and of each process that it starts, in MB: beyond it, "
        "allocations raise MemoryError. A process that still holds three quarters of it between two "
        "trajectories is replaced. null: no limit.",
    )
    start_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds that a judge process may take to import and construct the reward.",
    )


class SlotsAdmission(Section):
    """(max_head_offpolicyness + 1) * batch_size slots. A slot is freed when the policy version trained on its
    group is published."""

    type: Literal["slots"] = "slots"


class VolumeAdmission(Section):
    """AReaL's gate, for comparison. It bounds how many groups were ever accepted, not how old they become."""

    type: Literal["volume"] = "volume"


AdmissionConfig = Annotated[SlotsAdmission | VolumeAdmission, Field(discriminator="type")]


class ReadyFirstConsumption(Section):
    """Ready groups are trained, oldest first. Tokens beyond the bound are treated by `on_stale`."""

    type: Literal["ready_first"] = "ready_first"
    on_stale: Literal["mask", "requeue", "drop"] = Field(
        default="mask",
        description="Treatment of a group with tokens beyond the bound. `mask`: those tokens carry no loss. "
        "`requeue`: the group is given up and its prompt admitted again. `drop`: the group is given up.",
    )


class FifoConsumption(Section):
    """Groups are trained in the order of their admission. A slow group delays its batch."""

    type: Literal["fifo"] = "fifo"


class WindowedConsumption(Section):
    """A slow group may be overtaken as long as it can still be trained within the bound. No token is lost."""

    type: Literal["windowed"] = "windowed"
    fraction: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="Fraction of the slots that admission leaves empty. That many groups may be overtaken.",
    )


ConsumptionConfig = Annotated[
    ReadyFirstConsumption | FifoConsumption | WindowedConsumption, Field(discriminator="type")
]


class RolloutConfig(Section):
    """How trajectories are generated, rewarded and admitted."""

    max_head_offpolicyness: int = Field(
        ge=0,
        description="Bound on the lag of every trained token, in policy versions; 0 is synchronous.",
    )
    allow_extreme_offpolicyness: bool = Field(default=False, description="Permit a bound above 16.")
    batch_size: int = Field(
        ge=1, description="Number of groups in a batch. A training step consumes one batch."
    )
    n_samples_per_prompt: int = Field(ge=1, description="Number of trajectories in a group.")
    admission: AdmissionConfig = Field(
        default=SlotsAdmission(), description="Condition for starting the next group."
    )
    consumption: ConsumptionConfig = Field(
        default=ReadyFirstConsumption(), description="Choice of the ready groups that make the next batch."
    )
    over_sampling: float = Field(
        default=1.0,
        ge=1,
        le=4,
        description="Number of groups to start per group that a batch needs. Groups that are not needed in "
        "time are given up.",
    )
    max_concurrent: int = Field(
        default=256,
        ge=1,
        description="Largest number of trajectories that all engines together generate at a time.",
    )
    collectors: int | None = Field(
        default=None,
        ge=1,
        description="Number of processes that run episodes; null: one on each node.",
    )
    collector_restarts: int = Field(
        default=16, ge=0, description="Number of times that a collector may be started again."
    )
    collector_timeout_s: float = Field(
        default=60,
        gt=0,
        description="Seconds for which the code of a workflow may compute without awaiting anything. It "
        "holds up all episodes of its collector meanwhile, which is then ended and started again.",
    )
    episode_attempts: int = Field(
        default=3,
        ge=1,
        description="Number of attempts at an episode before its group is lost as `failed`. The loss of an "
        "engine does not count as an attempt.",
    )
    episode_timeout_s: float = Field(
        default=600, gt=0, description="Seconds that one attempt at an episode may take."
    )
    sampling: SamplingConfig = Field(
        default=SamplingConfig(), description="How the behaviour policy samples."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="The SGLang engines.")
    workflow: Plugin = Field(
        default=PluginConfig(path="slipstream.rollout.workflow.SingleTurn"),
        description="Import path of a class with the method `run` of `slipstream.rollout.workflow.Workflow`, "
        "which executes one episode.",
    )
    endpoint: EndpointConfig | None = Field(
        default=None,
        description="How the endpoint of each collector speaks for the policy: OpenAI's and Anthropic's "
        "protocols and SGLang's own, on loopback. Only for workflows that need it, such as "
        "`slipstream.rollout.workflow.Agent`, and for hooks that may ask the policy; null: the defaults.",
    )
    reward: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `score` of `slipstream.rollout.reward.Reward`, "
        "which returns the reward of an episode, or `score_group` of `GroupReward`, which returns those of a "
        "group, or of a function with the parameters of one of them. null: only without prompts.",
    )
    reward_key: str = Field(
        default="reward",
        min_length=1,
        description="Name of the number that trains, where the reward returns a mapping of numbers. The "
        "others are metrics: `reward/NAME`.",
    )
    judging: JudgingConfig = Field(
        default=JudgingConfig(), description="The processes in which the reward runs."
    )
    data_source: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `prompts` of `slipstream.DataSource`, which "
        "gives the prompts to train on in the place of `data`; null: those of `data.path`.",
    )
    group_filter: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `keep` of "
        "`slipstream.rollout.control.filters.GroupFilter`, which says whether a finished group is trained; "
        "null: all are.",
    )
    hooks: HooksConfig | None = Field(
        default=None, description="Code written for slime, which runs unchanged; null: none."
    )
