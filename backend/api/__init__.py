"""Slipstream: asynchronous reinforcement learning of language models.

    import slipstream

    recipe = slipstream.load_recipe("my.yaml", ["run.steps=10"])
    slipstream.check(recipe)
    summary = slipstream.train(recipe)

Rewards and workflows are classes of yours that a recipe names by import path; ``Reward`` and ``Workflow`` say
which method they need. Everything that is not named here is internal and may change.
"""

from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.backend.monitor.summary import RunSummary
    from slipstream.configs.schema import RunConfig
    from slipstream.rollout.reward import Reward
    from slipstream.rollout.teacher import TeacherScores
    from slipstream.rollout.trajectory import Prompt, Trajectory, TrajectoryBuilder
    from slipstream.rollout.workflow import Generator, Workflow

__all__ = [
    "Generator",
    "Prompt",
    "Reward",
    "TeacherScores",
    "Trajectory",
    "TrajectoryBuilder",
    "Workflow",
    "check",
    "load_recipe",
    "train",
]

_WHERE = {
    "Generator": "slipstream.rollout.workflow",
    "Prompt": "slipstream.rollout.trajectory",
    "Reward": "slipstream.rollout.reward",
    "TeacherScores": "slipstream.rollout.teacher",
    "Trajectory": "slipstream.rollout.trajectory",
    "TrajectoryBuilder": "slipstream.rollout.trajectory",
    "Workflow": "slipstream.rollout.workflow",
}
"""Module of each class. Every process of a run imports this package, and most need none of them."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream")
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")


def load_recipe(recipe: str | PathLike[str], overrides: "Sequence[str]" = ()) -> "RunConfig":
    """Read a recipe: a YAML file, or the bare name of one that comes with Slipstream.

    ``overrides`` are ``dotted.key=value`` with the value in YAML; later ones win. Raises
    ``slipstream.configs.violations.RecipeError``, whose ``violations`` are everything that is wrong.
    """
    from slipstream.configs.load import load_recipe

    return load_recipe(Path(recipe), overrides)


def check(recipe: "RunConfig") -> None:
    """Compare the models that a recipe names with its layout and with their files. Starts nothing.

    Raises ``slipstream.backend.commands.outcome.WrongInput``; its message lists everything that is wrong.
    """
    from slipstream.backend.commands.check import check

    check(recipe)


def train(recipe: "RunConfig", *, resume: bool = False, accept_changed_inputs: bool = False) -> "RunSummary":
    """Run a recipe from its first step to its last, with progress in the terminal. Return the run's summary.

    ``resume``: go on with the run of this name where its last process ended; with ``accept_changed_inputs``
    also if the content of a data set or of the model has changed. Rewards and workflows must be importable in
    every process of the run: from the working directory or an installed package.

    Raises ``WrongInput`` before anything is started, and ``Failed`` when the run has failed or was stopped
    (both in ``slipstream.backend.commands.outcome``). Nothing that was started is left running.
    """
    from slipstream.backend.commands.run import train

    return train(recipe, resume=resume, accept_changed_inputs=accept_changed_inputs)
