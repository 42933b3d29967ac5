"""``rollout``: how trajectories are generated, rewarded and admitted."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import PathSetting, Section
from slipstream.configs.schema.hooks import HooksConfig
from slipstream.configs.schema.plugin import Plugin, PluginConfig
from slipstream.configs.schema.sampling import SamplingConfig


class DialectConfig(Section):
    """How an endpoint reads and writes for the policy."""

    tool_parser: str | None = Field(
        default="auto",
        description="SGLang's parser of the policy's tool calls, such as `qwen25` or `llama3`. `auto`: the "
        "parser that the chat template suggests, if any. null: tool calls stay text.",
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="SGLang's parser of the policy's reasoning, such as `qwen3` or `deepseek-r1`. `auto`: "
        "the parser that the chat template suggests, if any. null: reasoning stays text.",
    )
    chat_template: PathSetting | None = Field(
        default=None, description="File with a Jinja chat template; null: the tokenizer's own template."
    )
    sampling: Literal["client", "recipe"] = Field(
        default="client",
        description="Treatment of sampling parameters that the trainer cannot reproduce. `client`: they "
        "are used, and the turn is not trained. `recipe`: turns of the type `main` are sampled with "
        "`rollout.sampling` instead.",
    )
    hosted_tools: Literal["drop", "refuse"] = Field(
        default="drop",
        description="Treatment of tools that a provider would run, such as a web search. `drop`: they are "
        "left out of the prompt, and named in the header `X-Slipstream-Dropped-Tools`. `refuse`: HTTP 400.",
    )
    contents: Literal["mark", "refuse"] = Field(
        default="mark",
        description="Treatment of images, documents and other contents that are no text. `mark`: a text "
        "like `[image]` stands for them in the prompt. `refuse`: HTTP 400.",
    )


class EndpointConfig(DialectConfig):
    """How the endpoint of each collector speaks for the policy, where a workflow has agents talk to it
    (docs/agents.md). It serves OpenAI's and Anthropic's protocols and SGLang's own, on loopback. The section
    is refused with a workflow that has no use for it."""


class EngineConfig(Section):
    """The SGLang engines."""

    count: int = Field(
        default=1, ge=1, description="Number of engines with which a run begins, each of which is a server."
    )
    min_count: int | None = Field(
        default=None,
        ge=1,
        description="Smallest number of engines with which a run begins if nodes are missing, and goes on "
        "when nodes are lost. null: it begins with `count`, and goes on with one.",
    )
    max_count: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of engines. More than `count` are started on GPUs that are free, or on "
        "nodes without GPUs and engines, as soon as such nodes belong to the Ray cluster; engines that join "
        "from outside count as well. null: `count`.",
    )
    patience_s: float = Field(
        default=1800,
        ge=0,
        description="Seconds for which a run waits for nodes while fewer than `min_count` engines have one. "
        "Then it ends.",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        description="Number of nodes of each engine, with equally many ranks on each. More than one needs "
        "`cluster.type: slurm` or `ray`, and a transport that reaches several nodes (`shards` or `disk`).",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Number of tensor-parallel ranks per engine, or per pipeline stage of an engine.",
    )
    data_parallel: int = Field(
        default=1,
        ge=1,
        description="Number of groups into which the tensor-parallel ranks are divided for attention "
        "(SGLang's data-parallel attention). Each group serves requests of its own and alone holds their "
        "KV cache, so heads are split over `tensor_parallel / data_parallel` ranks.",
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        description="Number of groups into which the tensor-parallel ranks are divided for experts. Each "
        "group holds its share of the experts, and each expert is split over `tensor_parallel / "
        "expert_parallel` ranks.",
    )
    pipeline_parallel: int = Field(default=1, ge=1, description="Number of pipeline stages per engine.")
    quantization: Literal["fp8"] | None = Field(
        default=None,
        description="Data type in which the engines hold the weights of the policy. `fp8`: projections in "
        "blocks of 128 x 128, which the trainer quantizes for each version while its own weights stay as "
        "they are. null: `model.dtype`.",
    )
    colocated: bool = Field(
        default=False,
        description="Place the engines on the trainer's GPUs. Trainer and engines take turns, and the one "
        "that waits keeps its state in host memory. Generation stops while the trainer trains. With "
        "`gpu_share` they work at the same time.",
    )
    gpu_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the memory of each of the trainer's GPUs that the engines have for weights "
        "and KV cache, beside a trainer that works at the same time and has the rest; needs `colocated`. One "
        "GPU is then enough for an asynchronous run. null: trainer and engines take turns.",
    )
    start_timeout_s: float = Field(
        default=600,
        gt=0,
        description="Seconds that an engine may take to start and become healthy. One that compiles kernels "
        "then, as the first start on a machine does, has half an hour more.",
    )
    request_timeout_s: float = Field(
        default=600,
        gt=0,
        description="Seconds for which an engine may send nothing about a request. Then the engine is "
        "checked and the request is continued. An engine whose schedulers answer no question for so long is "
        "started again. Pauses for an update count; the turns of a colocated trainer do not.",
    )
    answer_timeout_s: float = Field(
        default=20,
        gt=0,
        description="Seconds within which an engine must answer a question about its health, which it gets "
        "every few seconds. An engine that does not answer is given up: its requests continue on other "
        "engines, and it is started again.",
    )
    stream_interval: int = Field(
        default=64,
        ge=1,
        description="Number of tokens between two messages of an engine about a request. When the engine "
        "dies, at most this many tokens of a completion are lost.",
    )
    adaptive_concurrency: bool = Field(
        default=True,
        description="Generate fewer than `rollout.max_concurrent` trajectories at a time while the engines' "
        "KV memory cannot hold that many.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Number of restarts of one engine within `run.restart_window_s`. One more ends the run, "
        "and so does an engine that fails twice in the same way without serving in between. Restarts after "
        "a loss under requests of users are not counted.",
    )
    args: dict[str, object] = Field(
        default={},
        description="Further fields of SGLang's ServerArgs, under their own names. "
        "configs/installed/sglang_fields.py lists every field, and why a recipe may or may not set it.",
    )
    untested: list[str] = Field(
        default=[],
        description="Names of fields in `args` that nobody has tried with Slipstream, and that are passed on "
        "nevertheless. The start of the run, its report and its summary name them.",
    )

    @property
    def fewest(self) -> int:
        """Number of engines below which no run begins."""
        return self.count if self.min_count is None else self.min_count

    @property
    def fewest_left(self) -> int:
        """Number of engines below which a run waits for nodes."""
        return self.min_count or 1

    @property
    def most(self) -> int:
        """Number of engines above which none is started."""
        return self.count if self.max_count is None else self.max_count

    @property
    def takes_turns(self) -> bool:
        """True if the engines rest while the trainer trains."""
        return self.colocated and self.gpu_share is None

    @property
    def ranks(self) -> int:
        """Number of ranks of an engine, each of which takes a GPU."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of an engine on each of its nodes."""
        return self.ranks // self.nodes


class JudgingConfig(Section):
    """The processes in which the reward runs. There it may block, crash and print without harm to the run: a
    failed attempt costs a process and is repeated with the same trajectory. A group is lost as `failed` only
    when all attempts at one of its trajectories have failed, and the error contains their tracebacks. A
    reward that fails twice in a row in the same way at its start ends the run. The output of a process is in
    `logs/judge-*.log`, at most four megabytes of each."""

    processes: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Number of judge processes of each collector. A reward that computes needs one process "
        "for each CPU core to use.",
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
        "trajectory is kept meanwhile, and no token is generated again.",
    )
    retry_after_s: float = Field(
        default=1,
        gt=0,
        description="Seconds between a failed attempt and the next. They double with each further failure, "
        "up to a minute.",
    )
    reasoning: Literal["auto", "cut", "keep"] = Field(
        default="auto",
        description="Whether the reward reads the reasoning before an answer, such as `<think>...</think>`, "
        "where the model's chat template or vocabulary has such marks. `cut`: it reads what follows the "
        "reasoning, and nothing if the reasoning has no end. `keep`: it reads all. `auto`: `cut` for the "
        "rewards that come with Slipstream, except `Regex`, `ComputeScore`, `Remote`, and `Weighted` with "
        "one of them or arguments that name such a mark; `keep` for these and for code of yours.",
    )
    memory_mb: int | None = Field(
        default=4096,
        ge=256,
        description="Largest heap of a judge process, and of each process that it starts, in MB. Beyond "
        "it, allocations raise MemoryError. A process that still holds three quarters of it between two "
        "trajectories is replaced. null: no limit.",
    )
    start_timeout_s: float = Field(
        default=300,
        gt=0,
        description="Seconds that a judge process may take to import and construct the reward.",
    )


class SlotsAdmission(Section):
    """There are (max_head_offpolicyness + 1) * batch_size slots. A group takes one, which is freed when the
    policy version that was trained on the group is published."""

    type: Literal["slots"] = "slots"


class VolumeAdmission(Section):
    """AReaL's gate, for comparison. It bounds how many groups were ever accepted, but not how old they
    become. It needs `rollout.consumption.type: ready_first` and no `rollout.over_sampling`."""

    type: Literal["volume"] = "volume"


class ReadyFirstConsumption(Section):
    """Ready groups are trained, the oldest first. No batch waits for a particular group, so tokens may become
    older than the bound: `on_stale` says what happens to them."""

    type: Literal["ready_first"] = "ready_first"
    on_stale: Literal["mask", "requeue", "drop"] = Field(
        default="mask",
        description="Treatment of a group with tokens beyond the bound. `mask`: those tokens carry no loss. "
        "`requeue`: the group is given up and its prompt admitted again. `drop`: the group is given up.",
    )


class FifoConsumption(Section):
    """Groups are trained in the order of their admission. No token becomes too old, but a slow group delays
    its batch."""

    type: Literal["fifo"] = "fifo"


class WindowedConsumption(Section):
    """A slow group may be overtaken as long as it can still be trained within the bound. No token becomes too
    old."""

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
    """How trajectories are generated, rewarded and admitted. The mean reward of held-out prompts is shown as
    an accuracy, in per cent, only if the class of the reward has the attribute `is_accuracy = True`."""

    max_head_offpolicyness: int = Field(
        ge=0,
        description="Bound on the lag of every trained token, in policy versions; 0 is synchronous, and 2 "
        "to 8 is usual.",
    )
    allow_extreme_offpolicyness: bool = Field(default=False, description="Permit a bound above 16.")
    batch_size: int = Field(
        ge=1, description="Number of groups in a batch. A training step consumes one batch."
    )
    n_samples_per_prompt: int = Field(ge=1, description="Number of trajectories in a group.")
    admission: Annotated[SlotsAdmission | VolumeAdmission, Field(discriminator="type")] = Field(
        default=SlotsAdmission(), description="Condition for starting the next group."
    )
    consumption: ConsumptionConfig = Field(
        default=ReadyFirstConsumption(),
        description="Choice of the ready groups that make the next batch. "
        "`fifo` and `windowed` keep the bound by waiting: a straggler stops the run until it is finished, "
        "and a run may take up to four times as long (docs/benchmarks.md#staleness-what-a-bound-costs).",
    )
    over_sampling: float = Field(
        default=1.0,
        ge=1,
        le=4,
        description="Number of groups to start for each group that a batch needs. Groups that are not "
        "needed in time are given up.",
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
        default=16,
        ge=0,
        description="Number of restarts of one collector within `run.restart_window_s`. One more ends the "
        "run, and so does a collector that fails twice in the same way without finishing a group in between.",
    )
    collector_timeout_s: float = Field(
        default=60,
        gt=0,
        description="Seconds for which the code of a workflow may compute without awaiting anything. "
        "Meanwhile it holds up all episodes of its collector. After this time the collector is ended and "
        "started again.",
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
    sampling: SamplingConfig = Field(default=SamplingConfig())
    engine: EngineConfig = Field(default=EngineConfig())
    workflow: Plugin = Field(
        default=PluginConfig(path="slipstream.rollout.workflow.SingleTurn"),
        description="Import path of a class with the method `run` of `slipstream.rollout.workflow.Workflow`, "
        "which executes one episode.",
    )
    endpoint: EndpointConfig | None = Field(
        default=None,
        description="Without the section, such endpoints have the defaults.",
    )
    reward: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `score` of `slipstream.rollout.reward.Reward`, "
        "which returns the reward of an episode, or `score_group` of `GroupReward`, which returns the "
        "rewards of a group, or of a function with the parameters of one of them. null: only without "
        "prompts. Rewards may be any finite numbers (docs/rewards.md).",
    )
    reward_key: str = Field(
        default="reward",
        min_length=1,
        description="Name of the number that trains, if the reward returns a mapping of numbers. The other "
        "numbers are metrics: `reward/NAME`.",
    )
    judging: JudgingConfig = Field(default=JudgingConfig())
    data_source: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `prompts` of `slipstream.DataSource`, which "
        "gives the prompts to train on in place of `data`; null: the prompts of `data`.",
    )
    group_filter: Plugin | None = Field(
        default=None,
        description="Import path of a class with the method `keep` of "
        "`slipstream.rollout.control.filters.GroupFilter`, which says whether a finished group is trained; "
        "null: all groups are.",
    )
    hooks: HooksConfig | None = Field(default=None, description="Without the section there are none.")
