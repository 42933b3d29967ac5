"""docs/migration.md and rollout/compat/imports/*.yaml: settings exist and take their values, recipes load,
and the settings that the examples of other systems use are covered. ``test_slime_migration``: those of slime.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import pytest
import yaml

from slipstream.configs.installed import passthrough_path
from slipstream.configs.load import load_recipe
from slipstream.configs.rules import trainer
from slipstream.configs.rules.inputs import NO_INPUTS
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.paths import schema_paths
from slipstream.configs.violations import RecipeError
from tests.environment import ROOT
from tests.migration_keys import recorded

Piece = dict[str, Any]

PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
USAGES = recorded()
SYSTEMS = {"slime": "slime", "AReaL": "areal", "verl": "verl", "prime-rl": "prime-rl"}
"""Heading of a system on the page, and its name in the record of the settings that are used."""

SPAN = re.compile(r"`([^`]+)`")
OURS = re.compile(rf"(?:{'|'.join(RunConfig.model_fields)})(?:(?:\.[a-z_0-9]+)+(?:: .+)?|: .+)")
"""A setting, or a piece of a recipe: `run.steps`, `actor.objective: {type: gspo}`."""

SECTIONS = {
    ".".join(path.split(".")[:length]) for path in schema_paths() for length in range(1, path.count(".") + 2)
}

NOT_HERE = "expected a Hugging Face checkpoint directory on this machine"
"""Why a reference or a teacher of an example is refused. ``prepare`` excuses the policy and prompts alone."""


@dataclass(frozen=True)
class Row:
    """Patterns of another system's keys, and what a file says about them."""

    system: str
    table: str
    """`set`, `nothing` or `without`."""
    keys: tuple[str, ...]
    here: tuple[str, ...]
    """Settings, or pieces of a recipe: what to set here."""
    remark: str

    def pieces(self) -> Iterator[str]:
        """Yield what the row names of Slipstream's settings. A remark also names keys of the system."""
        yield from self.here
        theirs = {*USAGES[self.system].uses, *self.keys}
        spans = (span for span in SPAN.findall(self.remark) if span not in theirs)
        yield from (span for span in spans if OURS.fullmatch(span))


def rows() -> Iterator[Row]:
    for path in sorted((ROOT / "rollout/compat/imports").glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for table in ("set", "nothing", "without"):
            for entry in content[table]:
                texts = [entry[name] for name in ("why", "nearest", "remark") if name in entry]
                keys, here = tuple(entry["keys"]), tuple(entry.get("here", ()))
                yield Row(path.stem, table, keys, here, " ".join(texts))


ROWS = list(rows())
RECIPES: list[Piece] = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


@pytest.fixture(autouse=True)
def what_the_page_takes_for_granted(tmp_path, monkeypatch):
    """Code of the user's is in `my_package`, and Transformer Engine is installed."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trainer, "transformer_engine_is_installed", lambda: True)


def merged(below: Piece, above: Piece) -> Piece:
    """Return both pieces together; ``above`` counts where both have a value."""
    together = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        together[name] = merged(below[name], value) if both else value
    return together


def piece_of(path: str, value: Any) -> Piece:
    for name in reversed(path.split(".")):
        value = {name: value}
    return cast(Piece, value)


def leaves(piece: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in piece.items():
        path = f"{above}{name}"
        yield path, value
        if isinstance(value, dict):
            yield from leaves(cast(Piece, value), f"{path}.")


def around(piece: Piece) -> Piece:
    """Return a recipe with ``piece`` in it, and with the sections that the piece needs beside it."""
    given = dict(leaves(piece))
    recipe = piece_of("cluster", {"type": "local", "device": "gpu"})
    recipe |= {"run": {"name": "x", "steps": 1000}, "model": {"path": "models/policy"}}
    sizes = {"max_head_offpolicyness": 0, "batch_size": 64, "n_samples_per_prompt": 8}
    recipe["rollout"] = {**sizes, "reward": "slipstream.rollout.reward.Exact"}
    if not {"data.sources", "rollout.data_source"} & given.keys():
        recipe["data"] = {"path": "train.jsonl"}
    if "eval" in given and not {"eval.path", "eval.sets"} & given.keys():
        recipe["eval"] = {"path": "heldout.jsonl"}
    if "critic" in given:
        recipe["actor"] = {"advantage": [{"type": "reward", "estimator": "gae"}]}
    if any(term.get("estimator") == "gae" for term in given.get("actor.advantage", [])):
        recipe["critic"] = {}
    if "rollout.endpoint" in given:
        agent = {"path": "slipstream.rollout.workflow.Agent", "args": {"run": "my_package.agents.solve"}}
        recipe["rollout"]["workflow"] = agent
    if given.get("rollout.engine.colocated"):
        recipe["weights"] = {"transport": {"type": "tensor"}}
    if given.get("rollout.engine.quantization"):
        recipe["weights"] = {"transport": {"type": "delta"}}
    return merged(recipe, piece)


def problems(recipe: Piece) -> list[str]:
    """Return what is wrong with a recipe, but for models that this machine lacks."""
    try:
        load_recipe(recipe, [f"prepare={NO_INPUTS}"])
    except RecipeError as error:
        violations = [each for each in error.violations if NOT_HERE not in each.reason]
        return [f"{each.path} = {each.value!r}: {each.reason}" for each in violations]
    return []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.system}:{row.keys[0]}")
def test_the_settings_of_a_row_exist_and_take_its_values(row: Row):
    assert all(OURS.fullmatch(setting) for setting in row.here)
    assert row.here if row.table == "set" else row.remark and row.table in ("nothing", "without")
    for text in row.pieces():
        path, colon, value = text.partition(": ")
        if colon:
            assert not problems(around(piece_of(path, yaml.safe_load(value)))), text
        else:
            assert path in schema_paths() or path == passthrough_path(path.rpartition(".")[2]), text


def test_settings_in_the_text_of_the_page_exist():
    text = re.sub(r"```.*?```|^\|.*?$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    theirs = {key for usage in USAGES.values() for key in usage.uses}
    named = [span for span in SPAN.findall(text) if OURS.fullmatch(span) and span not in theirs]
    assert len(named) > 10
    for span in named:
        path, colon, value = span.partition(": ")
        assert path in schema_paths(), span
        assert not colon or not problems(around(piece_of(path, yaml.safe_load(value)))), span


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.get("run", {}).get("name", "piece"))
def test_a_translated_recipe_loads(recipe: Piece):
    assert not problems(recipe if "run" in recipe else around(recipe))


def test_every_system_has_a_translated_recipe():
    names = {recipe["run"]["name"] for recipe in RECIPES if "run" in recipe}
    assert len(names) == len(SYSTEMS) and all(len(recipe) > 5 for recipe in RECIPES if "run" in recipe)


# ---- the keys that the other systems' examples use


def table_of(system: str, key: str) -> str:
    """Return where a key is mapped: `set`, `nothing`, `without`, or nowhere."""
    tables = (row for row in ROWS if row.system == system)
    found = [row.table for row in tables if any(fnmatchcase(key, pattern) for pattern in row.keys)]
    return min(found, key=("set", "nothing", "without").index, default="")


def nine_uses_of_ten_are_covered_and_the_page_says_what_imports_make(
    heading: str, system: str, table_of: Callable[[str], str]
) -> None:
    """The page has what imports made of the configurations. ``table_of`` returns where a key is mapped:
    `set`, `nothing`, `without`, or nowhere.
    """
    usage = USAGES[system]
    uses = Counter[str]()
    for key, times in usage.uses.items():
        uses[table_of(key)] += times
    shares = [100 * uses[table] / uses.total() for table in ("set", "nothing", "without")]
    assert shares[0] + shares[1] >= 90
    source = f"[{usage.repository}](https://github.com/{usage.repository}), `{usage.commit[:12]}` of "
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {heading} | {source}")]
    counts = [usage.imports[name] for name in ("recipes", "mapped", "ours by default", "refused")]
    cells = [f"{count:,}" for count in (usage.configurations, *counts)]
    assert line.endswith(f" | {' | '.join(cells)} |")


@pytest.mark.parametrize("heading", [heading for heading in SYSTEMS if heading != "slime"])
def test_nine_uses_of_ten_are_covered_and_the_page_says_what_imports_make(heading):
    system = SYSTEMS[heading]
    nine_uses_of_ten_are_covered_and_the_page_says_what_imports_make(
        heading, system, partial(table_of, system)
    )


def test_no_key_has_two_rows_in_the_same_table():
    for system in SYSTEMS.values():
        keys = Counter(
            key for row in ROWS if row.system == system and row.table != "without" for key in row.keys
        )
        assert not [key for key, count in keys.items() if count > 1], system
