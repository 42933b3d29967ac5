"""``simulate``: the cost model of ``slipstream simulate``. A run that trains does not read it.

docs/simulator.md says what each constant stands for and where its default comes from.
"""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class RecipeLayout(Section):
    """The GPUs of the recipe: `rollout.engine.count` engines and the ranks of `actor.parallel`."""

    type: Literal["recipe"] = "recipe"


class ClusterLayout(Section):
    """Whole nodes, whose GPUs are divided between trainer and engines."""

    type: Literal["cluster"] = "cluster"
    nodes: int = Field(default=1, ge=1, description="Number of nodes. The option `--nodes` replaces it.")
    gpus_per_node: int = Field(default=8, ge=1, description="Number of GPUs per node.")
    trainer_share: float = Field(
        default=0.25, gt=0, lt=1, description="Fraction of all GPUs that train; the others generate."
    )


class LengthModel(Section):
    """A log-normal distribution of lengths in tokens."""

    median: float = Field(ge=1, description="Median length in tokens.")
    sigma: float = Field(ge=0, le=4, description="Standard deviation of the logarithm of the length.")
    cap: int | None = Field(
        default=None, ge=1, description="Largest length in tokens; null: `rollout.sampling.max_new_tokens`."
    )


class ResponseModel(LengthModel):
    """Lengths of responses, log-normal. The option `--lengths` replaces `median`, `sigma` and `cap`."""

    median: float = Field(default=7000, ge=1, description="Median length in tokens.")
    sigma: float = Field(
        default=0.9, ge=0, le=4, description="Standard deviation of the logarithm of the length."
    )
    straggler_fraction: float = Field(
        default=0.0, ge=0, le=1, description="Fraction of the responses that are stragglers."
    )
    straggler_factor: float = Field(
        default=10.0,
        ge=1,
        description="Factor by which a straggler is longer. Stragglers may exceed the cap.",
    )


class PromptModel(LengthModel):
    """Lengths of prompts, log-normal."""

    median: float = Field(default=500, ge=1, description="Median length in tokens.")
    sigma: float = Field(
        default=0.5, ge=0, le=4, description="Standard deviation of the logarithm of the length."
    )
    cap: int | None = Field(
        default=4096, ge=1, description="Largest length in tokens; null: `rollout.sampling.max_new_tokens`."
    )


class EngineModel(Section):
    """Speed of an engine: a decode step takes `step_s + request_s * running` seconds and gives each running
    request one token."""

    step_s: float = Field(default=0.0145, gt=0, description="Seconds of a decode step without its requests.")
    request_s: float = Field(
        default=1e-4, ge=0, description="Additional seconds of a decode step per running request."
    )
    prefill_tokens_per_s: float = Field(
        default=40_000, gt=0, description="Prompt tokens per second. The engine does not decode meanwhile."
    )
    max_running: int = Field(
        default=256, ge=1, description="Largest number of requests that run at a time; others queue."
    )
    kv_tokens: int | None = Field(
        default=None, ge=1, description="Tokens that the KV memory of one engine holds; null: unlimited."
    )
    resend_s: float = Field(
        default=0.002,
        ge=0,
        description="Seconds per running request to abort it and send it again (`weights.interrupt: abort`).",
    )
    slowdown: float = Field(
        default=1.0, ge=1, description="Factor by which decode steps are longer while the trainer trains."
    )


class TrainerModel(Section):
    """Speed of the trainer: a training step takes `step_s + tokens / (tokens_per_s * GPUs)` seconds, prompt
    tokens included."""

    tokens_per_s: float = Field(
        default=13_000, gt=0, description="Tokens per second and GPU, over a whole training step."
    )
    step_s: float = Field(
        default=5.0, ge=0, description="Seconds of a training step that do not depend on its batch."
    )
    slowdown: float = Field(
        default=1.0,
        ge=1,
        description="Factor by which a training step is longer if engines generate when it begins.",
    )
    checkpoint_stall_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds for which training stands still at each checkpoint (`checkpoint.every`), where "
        "the trainer may fail.",
    )
    checkpoint_write_s: float = Field(
        default=60.0, ge=0, description="Seconds from there until the checkpoint can be restored."
    )


class TransferModel(Section):
    """Time to publish a version: it takes `prepare_s + pause_s + bytes / bytes_per_s` seconds to reach all
    engines. Engines generate during the first of these times and are paused during the others."""

    bytes: int = Field(
        default=3_080_000_000, ge=0, description="Bytes over the link that carries most of a version."
    )
    bytes_per_s: float = Field(default=14e9, gt=0, description="Bytes per second of this link.")
    pause_s: float = Field(default=0.5, ge=0, description="Seconds of the pause without the transfer.")
    prepare_s: float = Field(
        default=0.0, ge=0, description="Seconds between the end of the training step and the pause."
    )

    @property
    def stall_s(self) -> float:
        """Seconds of the pause, transfer included."""
        return self.pause_s + self.bytes / self.bytes_per_s


class RewardModel(Section):
    """Time from the end of a response to its reward, log-normal."""

    median_s: float = Field(default=0.5, ge=0, description="Median seconds.")
    sigma: float = Field(
        default=0.5, ge=0, le=4, description="Standard deviation of the logarithm of the time."
    )


class FailureModel(Section):
    """Failures, at times drawn from the seed."""

    engine_mean_time_s: float | None = Field(
        default=None,
        gt=0,
        description="Mean seconds from the start of an engine to its failure; null: no engine fails.",
    )
    engine_restart_s: float = Field(
        default=120, ge=0, description="Seconds from the failure of an engine until it can be updated."
    )
    episode: float = Field(
        default=0.0, ge=0, le=1, description="Fraction of attempts at an episode that fail after generation."
    )
    trainer_mean_time_s: float | None = Field(
        default=None, gt=0, description="Mean seconds between two deaths of a trainer rank; null: none dies."
    )
    trainer_restart_s: float = Field(
        default=120, ge=0, description="Seconds from such a death until a checkpoint is restored in place."
    )
    node_mean_time_s: float | None = Field(
        default=None,
        gt=0,
        description="Mean seconds until a node fails, with its engines or trainer ranks, or with the whole "
        "job if it is the first one; null: no node fails.",
    )
    node_repair_s: float = Field(
        default=86_400, ge=0, description="Seconds from the failure of a node until it is back."
    )
    spare_nodes: int = Field(default=0, ge=0, description="Nodes for engines and ranks without one.")
    engine_placement: Literal["elastic", "fixed"] = Field(
        default="elastic",
        description="Where an engine goes whose node is lost: to any node with room, as in a real run, or "
        "back to its own node once that is repaired.",
    )
    trainer_node_restart_s: float = Field(
        default=150,
        ge=0,
        description="Seconds from the failure of another node of the trainer until a checkpoint is restored, "
        "with the ranks on a spare node or on one whose engines have given way.",
    )
    job_restart_s: float = Field(
        default=300,
        ge=0,
        description="Seconds from the failure of the first node, or of one for which there is no other, "
        "until the job that was started again has restored a checkpoint.",
    )

    @property
    def of_trainer(self) -> bool:
        """True if the trainer may fail."""
        return self.trainer_mean_time_s is not None or self.node_mean_time_s is not None


class SimulateConfig(Section):
    """The cost model of `slipstream simulate`. A run that trains does not read it. docs/simulator.md says
    what each constant stands for and where its default comes from; `--fit RUN` takes the constants from a
    run."""

    layout: Annotated[RecipeLayout | ClusterLayout, Field(discriminator="type")] = Field(
        default=RecipeLayout(), description="The simulated cluster."
    )
    prompts: PromptModel = Field(default=PromptModel())
    responses: ResponseModel = Field(default=ResponseModel())
    engine: EngineModel = Field(default=EngineModel())
    trainer: TrainerModel = Field(default=TrainerModel())
    transfer: TransferModel = Field(default=TransferModel())
    reward: RewardModel = Field(default=RewardModel())
    failures: FailureModel = Field(default=FailureModel())
    compare: bool = Field(
        default=True,
        description="Simulate other schedules and other splits of the GPUs too, for the printed tables.",
    )
