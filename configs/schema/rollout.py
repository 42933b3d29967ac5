"""``rollout``: how trajectories are generated, judged and admitted."""

from typing import Any

from pydantic import Field

from configs.schema.base import Section
from configs.schema.plugin import Plugin


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
    start_timeout_s: float = Field(600, gt=0, description="Longest time from start to healthy.")
    request_timeout_s: float = Field(600, gt=0, description="Longest time of one generation request.")
    restarts: int = Field(3, ge=0, description="Restarts of one engine before the run fails.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of SGLang's ServerArgs, by their own names."
    )


class RolloutConfig(Section):
    max_head_offpolicyness: int = Field(
        ge=0,
        description="Bound on the lag of every trained token, in policy versions; 0: synchronous.",
    )
    allow_extreme_offpolicyness: bool = Field(False, description="Permit a bound above 16.")
    batch_size: int = Field(ge=1, description="Groups per training step.")
    n_samples_per_prompt: int = Field(ge=1, description="Trajectories per group.")
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
        default="rollout.workflow.SingleTurn",
        description="What an episode does (`rollout.workflow.Workflow`).",
    )
    reward: Plugin = Field(description="What an episode is worth (`rollout.reward.Reward`).")
    group_filter: Plugin | None = Field(
        None, description="Which finished groups are trained (`rollout.control.filters.GroupFilter`)."
    )
