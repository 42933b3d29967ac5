"""Supervised training as a run of the trainer: plain policy gradient on demonstrations with reward 1.

    loss = -A log pi, A = reward = 1        the cross-entropy of the response

So there is no second trainer, and the rules between settings hold for both kinds of recipe.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.supervised import ExampleColumnsConfig, SupervisedConfig
from slipstream.configs.violations import Violation

_ACTOR = {
    "objective": {"type": "reinforce"},
    "advantage": [{"type": "reward", "estimator": "reward"}],
    "use_decoupled_loss": False,
    "recompute_logprobs": False,
}
_ROLLOUT = {
    "max_head_offpolicyness": 0,
    "n_samples_per_prompt": 1,
    "reward": "slipstream.rollout.reward.FinalAnswer",  # never used: there are no rollouts
    "sampling": {"max_new_tokens": 1},
}

SHARED = ("run", "model", "cluster", "prepare")
"""Sections that both kinds of recipe have."""

AS_IN_SUPERVISED = {"rollout.batch_size": "batch_size"}
"""Settings of a run that have another name in a recipe of ``slipstream sft``."""


@dataclass(frozen=True)
class Supervised:
    """A loaded recipe of ``slipstream sft``."""

    run: RunConfig
    learn: Literal["responses", "preferences"]
    columns: ExampleColumnsConfig = field(default_factory=ExampleColumnsConfig)

    @property
    def targets(self) -> int:
        """Number of texts to learn from in each example."""
        return 1 if self.learn == "responses" else 2


def run_of(recipe: SupervisedConfig) -> RunConfig:
    """Make the recipe of a run from a recipe of ``slipstream sft``."""
    given = recipe.model_dump(exclude_unset=True)
    return RunConfig.model_validate(
        {
            **{key: given[key] for key in SHARED if key in given},
            "data": {
                **{name: value for name, value in given["data"].items() if name != "columns"},
                "columns": {"prompt": _prompt_column(recipe), "label": None},
            },
            "actor": {**given.get("actor", {}), **_ACTOR},
            "rollout": {**_ROLLOUT, "batch_size": recipe.batch_size},
            "checkpoint": {**given.get("checkpoint", {}), "every": recipe.checkpoint.every},
        }
    )


def _prompt_column(recipe: SupervisedConfig) -> str:
    columns = recipe.data.columns
    return columns.messages if recipe.learn == "responses" and columns.messages else columns.prompt


def preferences_are_not_shared(config: SupervisedConfig) -> Iterator[Violation]:
    """A reward model's value of a response is at its last token, which only one context-parallel rank has."""
    context = config.actor.parallel.context
    if config.learn == "preferences" and context > 1:
        reason = "expected 1 with learn: preferences, because only one of the ranks has the last token"
        yield Violation("actor.parallel.context", context, reason)
