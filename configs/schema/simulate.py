"""``simulate``: the cost model of ``slipstream simulate``. A run that trains does not read it.

docs/simulator.md says what each constant stands for and where its default comes from.
"""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.configs.schema.base import Section


class RecipeLayout(Section):
    """The GPUs that the recipe asks for: rollout.engine.count engines, and the ranks of actor.parallel."""

    type: Literal["recipe"] = "recipe"


class ClusterLayout(Section):
    """Whole nodes, divided between trainer and engines."""

    type: Literal["cluster"] = "cluster"
    nodes: int = Field(1, ge=1, description="Nodes, unless --nodes gives their number.")
    gpus_per_node: int = Field(8, ge=1)
    trainer_share: float = Field(
        0.25, gt=0, lt=1, description="Part of all GPUs that trains; the others generate."
    )


LayoutConfig = Annotated[RecipeLayout | ClusterLayout, Field(discriminator="type")]


class LengthModel(Section):
    """Log-normal lengths in tokens."""

    median: float = Field(ge=1)
    sigma: float = Field(ge=0, le=4, description="Standard deviation of the logarithm.")
    cap: int | None = Field(None, ge=1, description="Longest; null: rollout.sampling.max_new_tokens.")


class ResponseModel(LengthModel):
    """How long responses are. ``--lengths`` replaces median, sigma and cap."""

    median: float = Field(7000, ge=1)
    sigma: float = Field(0.9, ge=0, le=4, description="Standard deviation of the logarithm.")
    straggler_fraction: float = Field(0.0, ge=0, le=1, description="Part of the responses that straggle.")
    straggler_factor: float = Field(
        10.0, ge=1, description="How many times longer a straggler is; the cap does not hold for it."
    )


class PromptModel(LengthModel):
    """How long prompts are."""

    median: float = Field(500, ge=1)
    sigma: float = Field(0.5, ge=0, le=4, description="Standard deviation of the logarithm.")
    cap: int | None = Field(4096, ge=1, description="Longest prompt.")


class EngineModel(Section):
    """One decode step of an engine gives each running request a token in ``step_s + request_s * running``."""

    step_s: float = Field(0.0145, gt=0, description="Seconds of a decode step, whatever its batch.")
    request_s: float = Field(1e-4, ge=0, description="Further seconds of a decode step per running request.")
    prefill_tokens_per_s: float = Field(
        40_000, gt=0, description="Prompt tokens per second; decoding stands still meanwhile."
    )
    max_running: int = Field(256, ge=1, description="Requests that decode at one time; others queue.")
    kv_tokens: int | None = Field(
        None, ge=1, description="Tokens that the KV memory of one engine holds; null: no limit."
    )
    resend_s: float = Field(
        0.002, ge=0, description="Seconds per running request that aborting and sending it again costs."
    )
    slowdown: float = Field(
        1.0, ge=1, description="Decode steps take this many times longer while the trainer trains."
    )


class TrainerModel(Section):
    """A training step takes ``step_s + tokens / (tokens_per_s * GPUs)``, prompt tokens included."""

    tokens_per_s: float = Field(13_000, gt=0, description="Tokens per second and GPU, the whole step.")
    step_s: float = Field(5.0, ge=0, description="Seconds of a step that do not depend on its batch.")
    slowdown: float = Field(
        1.0, ge=1, description="A step takes this many times longer if engines decode when it begins."
    )


class TransferModel(Section):
    """A version reaches all engines in ``prepare_s + pause_s + bytes / bytes_per_s``.

    Engines generate during the first of these times and are paused during the others.
    """

    parameters: float = Field(1.54e9, gt=0, description="Parameters of the model, 2 bytes each.")
    bytes: int | None = Field(None, ge=0, description="Bytes that travel; null: 2 * parameters.")
    bytes_per_s: float = Field(14e9, gt=0)
    pause_s: float = Field(0.5, ge=0, description="Seconds of the pause besides the transfer.")
    prepare_s: float = Field(0.0, ge=0, description="Seconds before the pause, after training.")

    @property
    def total_bytes(self) -> int:
        return int(2 * self.parameters) if self.bytes is None else self.bytes


class RewardModel(Section):
    """Log-normal time from the end of a response to its reward."""

    median_s: float = Field(0.5, ge=0)
    sigma: float = Field(0.5, ge=0, le=4, description="Standard deviation of the logarithm.")


class FailureModel(Section):
    """What goes wrong, at seeded times."""

    engine_mean_time_s: float | None = Field(
        None, gt=0, description="Mean time from an engine's start to its failure; null: none fails."
    )
    engine_restart_s: float = Field(120, ge=0, description="From a failure until the engine can be updated.")
    episode: float = Field(
        0.0, ge=0, le=1, description="Part of the attempts at an episode that fail after generation."
    )


class SimulateConfig(Section):
    layout: LayoutConfig = Field(RecipeLayout(), description="The simulated cluster.")
    prompts: PromptModel = PromptModel()
    responses: ResponseModel = ResponseModel()
    engine: EngineModel = EngineModel()
    trainer: TrainerModel = TrainerModel()
    transfer: TransferModel = TransferModel()
    reward: RewardModel = RewardModel()
    failures: FailureModel = FailureModel()
    compare: bool = Field(
        True, description="Also simulate other schedules and other splits of the GPUs, for the tables."
    )
