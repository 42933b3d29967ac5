"""Supervised training as a run of the trainer: plain policy gradient on demonstrations, each with reward 1.

    loss = -A log pi, A = reward = 1        the cross-entropy of the response

So there is no second trainer, and rules between settings hold for both kinds of recipe.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.violations import Violation

_ACTOR = {
    "objective": {"type": "reinforce"},
    "advantage": "reward",
    "use_decoupled_loss": False,
    "recompute_logprobs": False,
}
_ROLLOUT = {
    "max_head_offpolicyness": 0,
    "n_samples_per_prompt": 1,
    "reward": "slipstream.rollout.reward.FinalAnswer",  # never asked: there are no rollouts
    "sampling": {"max_new_tokens": 1},
}

SHARED = ("run", "model", "data", "cluster", "prepare")
"""Sections that are the run's as they are."""

AS_IN_SUPERVISED = {"rollout.batch_size": "batch_size"}
"""Settings that have another name in a run."""


@dataclass(frozen=True)
class Supervised:
    """A recipe of ``slipstream sft`` that has been read."""

    run: RunConfig
    learn: Literal["responses", "preferences"]


def run_of(data: dict[str, Any]) -> dict[str, Any]:
    """The run's recipe for a ``SupervisedConfig``, both as plain data that need not be valid."""
    actor = data.get("actor", {})
    return {
        **{key: data[key] for key in SHARED if key in data},
        "actor": {**actor, **_ACTOR} if isinstance(actor, dict) else actor,
        "rollout": {
            **_ROLLOUT,
            "batch_size": data.get("batch_size", SupervisedConfig.model_fields["batch_size"].default),
        },
        "checkpoint": _checkpoint(data.get("checkpoint", {})),
    }


def _checkpoint(given: Any) -> Any:
    default = SupervisedConfig.model_fields["checkpoint"].default
    return {"every": default.every, **given} if isinstance(given, dict) else given


def preferences_are_not_shared(asked: Any) -> Iterator[Violation]:
    """``asked``: a ``SupervisedConfig``, perhaps with holes."""
    context = asked.actor.parallel.context
    if asked.learn == "preferences" and context > 1:
        reason = "expected 1: the value of an answer is at its last token, which one rank alone would have"
        yield Violation("actor.parallel.context", context, reason)
