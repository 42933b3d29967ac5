"""Slipstream: asynchronous reinforcement learning of language models.

    import slipstream

    recipe = slipstream.load_recipe("my.yaml", ["run.steps=10"])
    slipstream.check(recipe)
    summary = slipstream.train(recipe)

``OwnRun`` gives the training loop to you: batches, steps, publications and evaluations by hand.

A recipe names code of yours by import path. The Protocols here say which methods it needs, what they are
given, and in which process they run (docs/customization.md). Everything that is not named here is internal
and may change.
"""

from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slipstream.backend.commands.own_run import OwnRun, StepsDone, TrainerFailed
    from slipstream.backend.monitor.summary import RunSummary
    from slipstream.backend.trainer.protocols import (
        BatchMetrics,
        BatchTransform,
        MicroBatch,
        PolicyLoss,
        ReferencePenalty,
        Scores,
        TokenAdvantage,
        TokenObjective,
        Tokens,
        TrainBatch,
    )
    from slipstream.bridge.families import Family
    from slipstream.configs.schema import RunConfig
    from slipstream.rollout.control.filters import GroupFilter
    from slipstream.rollout.prompts.sources import DataSource
    from slipstream.rollout.reward import Reward
    from slipstream.rollout.tokens.teacher import TeacherScores
    from slipstream.rollout.tokens.trajectory import Group, Prompt, Trajectory, TrajectoryBuilder
    from slipstream.rollout.workflow import Generator, Workflow, WorkflowContext

__all__ = [
    "BatchMetrics",
    "BatchTransform",
    "DataSource",
    "Family",
    "Generator",
    "Group",
    "GroupFilter",
    "MicroBatch",
    "OwnRun",
    "PolicyLoss",
    "Prompt",
    "ReferencePenalty",
    "Reward",
    "RunConfig",
    "Scores",
    "StepsDone",
    "TeacherScores",
    "TokenAdvantage",
    "TokenObjective",
    "Tokens",
    "TrainBatch",
    "TrainerFailed",
    "Trajectory",
    "TrajectoryBuilder",
    "Workflow",
    "WorkflowContext",
    "check",
    "load_recipe",
    "train",
]

_WHERE = {
    "BatchMetrics": "slipstream.backend.trainer.protocols",
    "BatchTransform": "slipstream.backend.trainer.protocols",
    "DataSource": "slipstream.rollout.prompts.sources",
    "Family": "slipstream.bridge.families",
    "Generator": "slipstream.rollout.workflow",
    "Group": "slipstream.rollout.tokens.trajectory",
    "GroupFilter": "slipstream.rollout.control.filters",
    "MicroBatch": "slipstream.backend.batch.micro_batch",
    "OwnRun": "slipstream.backend.commands.own_run",
    "PolicyLoss": "slipstream.backend.objective.policy_loss",
    "Prompt": "slipstream.rollout.tokens.trajectory",
    "ReferencePenalty": "slipstream.backend.objective.kl",
    "Reward": "slipstream.rollout.reward",
    "RunConfig": "slipstream.configs.schema",
    "Scores": "slipstream.backend.trainer.prepared",
    "StepsDone": "slipstream.backend.commands.own_run",
    "TeacherScores": "slipstream.rollout.tokens.teacher",
    "TokenAdvantage": "slipstream.backend.trainer.protocols",
    "TokenObjective": "slipstream.backend.objective.losses",
    "Tokens": "slipstream.backend.objective.losses",
    "TrainBatch": "slipstream.backend.batch.train_batch",
    "TrainerFailed": "slipstream.backend.commands.own_run",
    "Trajectory": "slipstream.rollout.tokens.trajectory",
    "TrajectoryBuilder": "slipstream.rollout.tokens.trajectory",
    "Workflow": "slipstream.rollout.workflow",
    "WorkflowContext": "slipstream.rollout.workflow",
}
"""Module of each class. Every process of a run imports this package, and most need none of them."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")


def load_recipe(
    recipe: "str | PathLike[str] | Mapping[str, object]", overrides: "Sequence[str]" = ()
) -> "RunConfig":
    """Read a recipe: a YAML file, the bare name of one that comes with Slipstream, or a dict with the content
    of a file.

    ``overrides`` are ``dotted.key=value`` with the value in YAML; later ones win. Raises
    ``slipstream.configs.violations.RecipeError``, whose ``violations`` list everything that is wrong.

    A recipe can also be built from the models of ``slipstream.configs.schema``: ``RunConfig(run=..., ...)``.
    ``check`` and ``train`` compare its settings with each other.
    """
    from slipstream.configs.load import load_recipe

    return load_recipe(Path(recipe) if isinstance(recipe, str | PathLike) else recipe, overrides)


def check(recipe: "RunConfig") -> None:
    """Compare the models and the code that a recipe names with its layout and their files. Starts nothing.

    Raises ``RecipeError`` for settings that contradict each other, and
    ``slipstream.backend.commands.outcome.WrongInput``; its message lists everything that is wrong.
    """
    from slipstream.backend.commands.check import check
    from slipstream.configs.load import check_recipe

    check_recipe(recipe)
    check(recipe)


def train(recipe: "RunConfig", *, resume: bool = False, accept_changed_inputs: bool = False) -> "RunSummary":
    """Run a recipe from its first step to its last, with progress in the terminal. Return the run's summary.

    ``resume``: go on with the run of this name where its last process ended; with ``accept_changed_inputs``
    also if the content of a data set or of the model has changed. Code of yours must be importable in every
    process of the run: from the working directory or an installed package.

    Raises ``RecipeError`` and ``WrongInput`` before anything is started, and ``Failed`` when the run has
    failed or was stopped (both in ``slipstream.backend.commands.outcome``). Nothing that was started is left
    running.
    """
    from slipstream.backend.commands.run import train
    from slipstream.configs.load import check_recipe

    check_recipe(recipe)
    return train(recipe, resume=resume, accept_changed_inputs=accept_changed_inputs)
