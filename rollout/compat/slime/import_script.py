"""``slipstream import-slime``: a recipe from a slime launch script, which is read and never run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.configs.load import load_recipe
from slipstream.configs.violations import RecipeError
from slipstream.rollout.compat.slime.launch_flags import (
    MAPPED,
    NEEDS_NOTHING,
    FlagOutcome,
    ImportedRecipe,
    is_supervised,
)
from slipstream.rollout.compat.slime.launch_recipe import recipe_of, run_name
from slipstream.rollout.compat.slime.launch_script import UnreadableScript, read_launch_script

MOST_ROUNDS = 20
"""Rounds of loading a recipe without what the loader has refused before."""

OF_MACHINE = ("actor.layer_spec", "actor.advantage.scores.path")
"""Settings that depend on what is installed, and which teachers there are, where the run will be."""


def report_of(script: Path, out: Path, overrides: Sequence[str], as_json: bool) -> str:
    """Write a recipe as ``import_slime`` does. Return what has become of the flags, as text or JSON."""
    recipe = import_slime(script, out, overrides)
    return _as_json(recipe) if as_json else "\n".join(_lines(recipe, out))


def import_slime(script: Path, out: Path, overrides: Sequence[str]) -> ImportedRecipe:
    """Write the recipe of ``script`` to ``out``. Returns what has become of its flags.

    ``overrides``: settings with which a recipe loads where its model and its prompts are not.

    Raises OSError, and ValueError for a file that is no launch script, or one of supervised training.
    """
    launch = read_launch_script(script, os.environ)
    if is_supervised(launch):
        raise UnreadableScript(
            f"{script} trains on given responses (--loss-type sft_loss), expected reinforcement: write a "
            "recipe of `slipstream sft` (configs/recipes/sft-qwen3-4b-1n8g-dp8.yaml is one)"
        )
    if out.exists():
        raise UnreadableScript(f"{out} exists: choose another name, or remove it")
    recipe = recipe_of(launch, run_name(script))
    _keep_what_loads(recipe, out, overrides)
    return recipe


def _keep_what_loads(recipe: ImportedRecipe, out: Path, overrides: Sequence[str]) -> None:
    """Write the recipe without the settings that the loader refuses."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(MOST_ROUNDS):
        out.write_text(recipe.text(), encoding="utf-8")
        try:
            # The model and the prompts may be on another machine.
            load_recipe(out, list(overrides))
        except RecipeError as error:
            problems = [problem for problem in error.violations if problem.path not in OF_MACHINE]
            if not problems:
                recipe.notes += [f"{each.path}, on this machine: {each.reason}" for each in error.violations]
                return
            taken = [recipe.refuse(problem.path, problem.reason) for problem in problems]
            if not any(taken):
                out.unlink()
                raise UnreadableScript(f"the script makes no recipe that can be loaded: {error}") from None
        else:
            return
    out.unlink()
    raise UnreadableScript(
        f"after {MOST_ROUNDS} rounds the recipe still holds settings that the loader refuses"
    )


def _lines(recipe: ImportedRecipe, out: Path) -> list[str]:
    """Return a report for the user: every flag with its setting, or with the reason why it has none."""
    counts = recipe.counts()
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    order = (MAPPED, NEEDS_NOTHING)  # what the user has to look at comes last
    outcomes = sorted(
        recipe.outcomes, key=lambda each: order.index(each.outcome) if each.outcome in order else len(order)
    )
    return [f"{out}: {summary}", *map(_line, outcomes), *(f"note: {note}" for note in recipe.notes)]


def _line(outcome: FlagOutcome) -> str:
    return f"{outcome.outcome}: --{outcome.flag.name} {outcome.flag.text}".rstrip() + f" ({outcome.reason})"


def _as_json(recipe: ImportedRecipe) -> str:
    """Return what has become of every flag, for scripts."""
    flags = [
        {
            "flag": outcome.flag.name,
            "value": outcome.flag.text,
            "outcome": outcome.outcome,
            "reason": outcome.reason,
        }
        for outcome in recipe.outcomes
    ]
    return json.dumps({"flags": flags, "notes": recipe.notes, "counts": recipe.counts()}, indent=1)
