"""``slipstream import``: a recipe from a configuration of another system, which is read and never run."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from slipstream.configs.load import load_recipe
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.violations import RecipeError
from slipstream.rollout.compat.hooks import slime_recipe
from slipstream.rollout.compat.imports.configurations import OVERRIDE, read_configuration
from slipstream.rollout.compat.imports.recipe import MAPPED, NEEDS_NOTHING, FlagOutcome, ImportedRecipe
from slipstream.rollout.compat.imports.shell_words import UnreadableScript
from slipstream.rollout.compat.imports.table import KeyTable

MOST_ROUNDS = 20
"""Rounds of loading a recipe without what the loader has refused before."""

OF_MACHINE = re.compile(r"is not installed|on this machine")
"""Reasons that depend on what is installed, and which teachers there are, where the run will be."""

REQUIRED = ("", "actor", "cluster", "data", "model", "rollout", "rollout.engine", "run")
"""Sections that stay where one of their settings is missing."""

WITHOUT_INPUTS = (f"prepare={NO_INPUTS}",)
"""The model and the prompts may be on another machine."""

_NOTHING = re.compile("(?!)")
_OF_VERL = re.compile(
    r"(?!.*(?:generation|_eval))(?:(?:[A-Za-z_]\w*\.)+(?:\w*main\w*|train_agent_ppo)|\S*main_\w+\.py)"
)
SYSTEMS = {"verl": _OF_VERL, "areal": _NOTHING, "prime-rl": _NOTHING}
"""Systems that have a table, with the programs that their launch scripts start."""


def import_report(
    system: str, words: Sequence[str], out: Path, *, as_json: bool, without_unknown: bool = False
) -> str:
    """Write a recipe as ``import_recipe`` does. Return what has become of the keys, as text or JSON."""
    recipe = import_recipe(system, words, out, without_unknown=without_unknown)
    return _as_json(recipe) if as_json else "\n".join(_lines(recipe, out))


def import_recipe(
    system: str, words: Sequence[str], out: Path, *, without_unknown: bool = False
) -> ImportedRecipe:
    """Write the recipe of a configuration to ``out``. Returns what has become of its keys.

    ``words``: files, of which the later ones count, and overrides as the system's users write them.

    Raises OSError, and ValueError for what is no configuration of reinforcement learning, and for unknown
    keys, unless the recipe is to be ``without_unknown`` ones.
    """
    words = [word for word in words if word != "@"]  # prime-rl's users write one before each file
    files = [Path(word) for word in words if Path(word).is_file() or not OVERRIDE.fullmatch(word)]
    if absent := [file for file in files if not file.is_file()]:
        why = "this is a folder" if any(file.is_dir() for file in absent) else "no such file"
        raise UnreadableScript(f"{', '.join(map(str, absent))}: {why}; expected a configuration of {system}")
    if not files:
        raise UnreadableScript("expected a file to read before the overrides")
    if out.exists():
        raise UnreadableScript(f"{out} exists: choose another name, or remove it")
    overrides = [word for word in words if Path(word) not in files]
    recipe = recipe_of(system, files, overrides, without_unknown=without_unknown)
    _keep_what_loads(recipe, out)
    return recipe


def recipe_of(
    system: str, files: Sequence[Path], overrides: Sequence[str], *, without_unknown: bool = False
) -> ImportedRecipe:
    """Return the recipe of a configuration. The loader has not seen it. Raises as ``import_recipe`` does."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", files[0].stem).strip("-.") or "imported"
    if system == "slime":
        recipe, known = slime_recipe(files, overrides, name)
    else:
        table = table_of(system)
        read = read_configuration(files, overrides, SYSTEMS[system])
        if not any(key.startswith(f"{table.part}.") for key in read.values):
            raise UnreadableScript(f"{files[0]}: nothing sets {table.part}, expected reinforcement learning")
        recipe, known = table.recipe(system, read.values, name), table.known
        recipe.notes[:0] = read.notes
    if (unknown := recipe.unknown(known)) and not without_unknown:
        unknown.append("correct them, or make a recipe without them: --without-unknown")
        raise UnreadableScript("\n".join(unknown))
    recipe.name_hub()
    return recipe


def table_of(system: str) -> KeyTable:
    """Return the table of a system other than slime. Raises ValueError for any other name."""
    if system not in SYSTEMS:
        names = ", ".join(("slime", *SYSTEMS))
        raise UnreadableScript(f"{system!r} is no system that can be imported, expected one of: {names}")
    return KeyTable(Path(__file__).with_name(f"{system}.yaml"))


def _keep_what_loads(recipe: ImportedRecipe, out: Path) -> None:
    """Write the recipe without the settings that the loader refuses."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(MOST_ROUNDS):
        out.write_text(recipe.text(), encoding="utf-8")
        try:
            load_recipe(out, list(WITHOUT_INPUTS))
        except RecipeError as error:
            problems = [problem for problem in error.violations if not OF_MACHINE.search(problem.reason)]
            if not problems:
                recipe.notes += [f"{each.path}, on this machine: {each.reason}" for each in error.violations]
                return
            mended = [_mended(recipe, problem.path, problem.reason) for problem in problems]
            if not any(mended):
                out.unlink()
                raise UnreadableScript(f"it makes no recipe that can be loaded: {error}") from None
        else:
            return
    out.unlink()
    raise UnreadableScript(
        f"after {MOST_ROUNDS} rounds the recipe still holds settings that the loader refuses"
    )


def _mended(recipe: ImportedRecipe, path: str, reason: str) -> bool:
    """Take out what is refused, or give what is missing its fallback. Return whether anything has changed."""
    section = path.rpartition(".")[0]
    return (
        recipe.fill_in(path)
        or recipe.refuse(path, reason)
        or (section not in REQUIRED and recipe.refuse(section, f"without {path} it has no effect"))
    )


def _lines(recipe: ImportedRecipe, out: Path) -> Iterator[str]:
    """Yield a report for the user: every key with its setting, or with the reason why it has none."""
    yield f"{out}: {_said(recipe.counts())}"
    order = (MAPPED, NEEDS_NOTHING)  # what the user has to look at comes last
    places = {outcome: place for place, outcome in enumerate(order)}
    for each in sorted(recipe.outcomes, key=lambda each: places.get(each.outcome, len(order))):
        yield f"{each.outcome}: {recipe.written(each.flag)} ({each.reason})"
    yield from (f"note: {note}" for note in recipe.notes)


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


def _as_json(recipe: ImportedRecipe) -> str:
    """Return what has become of every key, for scripts."""
    return json.dumps(
        {
            "flags": [_entry(each) for each in recipe.outcomes],
            "notes": recipe.notes,
            "counts": recipe.counts(),
        },
        indent=1,
    )


def _entry(outcome: FlagOutcome) -> dict[str, str]:
    name, value = outcome.flag.name, outcome.flag.text
    return {"flag": name, "value": value, "outcome": outcome.outcome, "reason": outcome.reason}
