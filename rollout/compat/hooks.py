"""The parts that a recipe's ``rollout.hooks`` may replace, with their adapters, which are named only here.

    rollout.hooks ──► import path of an adapter ──► plug-in loader ──► workflow, judge, choice of groups,
                                                                       evaluation, drawing, batch hooks

Hooks have the signatures of slime. What is made of them has the types that everybody's plug-ins have, so that
nothing else knows which system they were written for. The adapters are a leaf: no import leads to them, and
without their folder every recipe without hooks runs as before. ``backend.trainer.hooks`` does the same on
the ranks of the trainer.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.rollout.compat.imports.recipe import ImportedRecipe
from slipstream.rollout.control.filters import GroupChoice
from slipstream.rollout.prompts.sources.drawn_prompts import Drawing, DrawnPrompts
from slipstream.rollout.reward.value import EpisodeJudge
from slipstream.rollout.system.plugins import PluginError, resolve
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import NamedNumbers
from slipstream.rollout.tokens.tokenizer import Tokenizer
from slipstream.rollout.tokens.trajectory import Prompt, Trajectory, TrajectoryHeader
from slipstream.rollout.workflow import Workflow
from slipstream.rollout.workflow.endpoint import PolicyEndpoint

PROBLEMS = "slipstream.rollout.compat.slime.checking.hook_problems"
PARTS = "slipstream.rollout.compat.slime.parts.hook_parts"
DRAWING = "slipstream.rollout.compat.slime.data_source_process.slime_drawing"
SERVE_BATCHES = "slipstream.rollout.compat.slime.batch_process.serve"
SLIME_RECIPE = "slipstream.rollout.compat.slime.launch_recipe.read_recipe"


def adapter(path: str) -> object:
    """Return the adapter at an import path. Raises PluginError."""
    try:
        return resolve(path)
    except PluginError as error:
        raise PluginError(
            f"this installation has nothing that runs code written for slime: {error}"
        ) from error


# ---- before a run


def hook_problems(config: RunConfig) -> list[str]:
    """Return everything that is wrong with ``rollout.hooks``, each with the name of its setting."""
    if config.rollout.hooks is None:
        return []
    try:
        return cast("Callable[[RunConfig], list[str]]", adapter(PROBLEMS))(config)
    except PluginError as error:
        return [f"rollout.hooks: {error}"]


def slime_recipe(
    files: Sequence[Path], overrides: Sequence[str], name: str
) -> tuple[ImportedRecipe, Collection[str]]:
    """Return the recipe of a launch script of slime, and all flags that are known.

    ``name``: of the run. Raises PluginError, OSError, and ValueError for what is no such script.
    """
    read = cast(
        "Callable[[Sequence[Path], Sequence[str], str], tuple[ImportedRecipe, Collection[str]]]",
        adapter(SLIME_RECIPE),
    )
    return read(files, overrides, name)


# ---- a collector


EvaluateSets = Callable[[int], Awaitable[tuple[list[EvaluatedSet], NamedNumbers]]]
"""Evaluates whole sets of prompts by itself, given the number of the rollout: returns what it says of each
set, and metrics of the whole evaluation. Raises NoEngine, and whatever user code raises."""


@dataclass(frozen=True)
class CallSurroundings:
    """The parts of a collector that functions for whole batches and evaluations use."""

    endpoint: PolicyEndpoint
    """Serves rollout functions; its completions are trained."""
    greedy: PolicyEndpoint
    """Serves evaluations."""
    limit: TimeLimit
    """Of episodes."""
    version: Callable[[], int]
    """Returns the policy version that the engines serve."""
    give_up: Callable[[str], None]
    """Ends the process, given the reason: a function cannot be ended otherwise."""


@dataclass(frozen=True)
class HookParts:
    """Parts of a collector that a recipe's hooks replace; None: the collector's own one stays."""

    workflow: Workflow | None = None
    filter: GroupChoice | None = None
    reward: EpisodeJudge | None = None
    evaluation: EvaluateSets | None = None


def hook_parts(
    config: RunConfig,
    tokenizer: Tokenizer,
    judge: EpisodeJudge,
    version: Callable[[], int],
    surroundings: Callable[[], CallSurroundings],
) -> HookParts:
    """Return the parts that a recipe's hooks replace.

    ``judge``: asks the recipe's own reward. ``version``: returns the policy version that the engines serve.
    ``surroundings``: of functions for whole batches.

    Raises PluginError, and ValueError and OSError for ``custom_config_path``.
    """
    if config.rollout.hooks is None:
        return HookParts()
    make = cast("Callable[..., HookParts]", adapter(PARTS))
    return make(config, tokenizer, judge, version, surroundings)


class Unrewarded:
    """The reward of a recipe whose hooks reward: no trajectory may come without one."""

    def score(self, prompt: Prompt, response: str, trajectory: Trajectory) -> float:
        raise ValueError(
            f"the hooks have left {prompt.reference} without a reward, and the recipe has no rollout.reward"
        )


UNREWARDED = PluginConfig(path="slipstream.rollout.compat.hooks.Unrewarded")


# ---- beside the driver


def hook_drawing(
    config: RunConfig, prompts: DrawnPrompts, logs: Path, *, ahead: int, note: Callable[[str], None]
) -> Drawing:
    """Return the drawing from ``rollout.hooks.data_source``. ``ahead``, ``note``: as of ``Drawing``."""
    make = cast("Callable[..., Drawing]", adapter(DRAWING))
    return make(config, prompts, logs, ahead=ahead, note=note)


class HookSetup(msgspec.Struct, array_like=True, frozen=True):
    """Setup of the process of hooks that see whole batches: ``SERVE_BATCHES``."""

    config: bytes
    """The recipe as JSON."""
    hooks: dict[str, str]
    """Import path of each hook, by its setting."""


class RecordedEpisode(msgspec.Struct, array_like=True, frozen=True):
    """One episode of a batch, as it was recorded."""

    group: int
    prompt: Prompt
    header: TrajectoryHeader
    chunks: bytes


class BatchQuestion(msgspec.Struct, array_like=True, frozen=True):
    """One call of one hook. A batch has episodes, an evaluation has sets."""

    setting: str
    rollout_id: int
    episodes: tuple[RecordedEpisode, ...] = ()
    sets: tuple[EvaluatedSet, ...] = ()
    metrics: dict[str, float] = {}
    seconds: float = 0.0


class TrainingData(msgspec.Struct, frozen=True):
    """A batch as hooks want it trained; the lists are over all of its trajectories."""

    rewards: list[float]
    masks: list[list[int]] | None = None
    """1 where a response token keeps its loss; None: all do."""
