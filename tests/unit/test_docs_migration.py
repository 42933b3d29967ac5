"""docs/migration.md: its settings exist and take its values, its recipes load, and it covers the settings
that the example configurations of the other systems use. ``test_slime_migration`` holds its rows of slime.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import pytest
import yaml

from slipstream.backend.commands.check import NO_INPUTS
from slipstream.configs.installed import passthrough_path
from slipstream.configs.load import load_recipe
from slipstream.configs.rules import trainer
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.paths import schema_paths
from slipstream.configs.violations import RecipeError
from tests.environment import ROOT
from tests.migration_keys import Usage, recorded

Piece = dict[str, Any]

PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
USAGES = recorded()
SYSTEMS = {"slime": "slime", "AReaL": "areal", "verl": "verl", "prime-rl": "prime-rl"}
"""Heading of a system on the page, and its name in the record of the settings that are used."""

SPAN = re.compile(r"`([^`]+)`")
OURS = re.compile(rf"(?:{'|'.join(RunConfig.model_fields)})(?:(?:\.[a-z_0-9]+)+(?:: .+)?|: .+)")
"""A setting, or a piece of a recipe: `run.steps`, `actor.objective: {type: gspo}`."""

TO_SET, NOTHING, WITHOUT = "Slipstream", "why nothing is set", "reason"
"""Second column of the tables: keys with a setting, keys that need none, and keys without a counterpart."""

NOT_HERE = "expected a Hugging Face checkpoint directory on this machine"
"""Why a reference or a teacher of an example is refused. ``prepare`` excuses the policy and prompts alone."""


@dataclass(frozen=True)
class Row:
    """A row of a table: patterns of another system's keys, and what there is to say about them."""

    system: str
    keys: tuple[str, ...]
    setting: str
    """The cell that says what to set here, or NOTHING. Empty: the keys have no counterpart."""
    remark: str

    def pieces(self) -> Iterator[str]:
        """Yield what the row names of Slipstream's settings. A remark also names keys of the system."""
        yield from (span for span in SPAN.findall(self.setting) if OURS.fullmatch(span))
        theirs = {*USAGES[self.system].uses, *self.keys}
        spans = (span for span in SPAN.findall(self.remark) if span not in theirs)
        yield from (span for span in spans if OURS.fullmatch(span))


def rows() -> Iterator[Row]:
    system = table = ""
    for line in PAGE.splitlines():
        if heading := re.fullmatch(r"## (.+)", line):
            system = SYSTEMS.get(heading[1], "")
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line[:2] == "| " else []
        if not line.startswith("|"):
            table = ""
        elif cells and not table:
            table = cells[1]
        elif cells and system and table in (TO_SET, NOTHING, WITHOUT):
            setting = {TO_SET: cells[1], NOTHING: NOTHING, WITHOUT: ""}[table]
            yield Row(
                system, tuple(SPAN.findall(cells[0])), setting, " ".join(cells[1 + (table == TO_SET) :])
            )


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
    assert row.setting in ("", NOTHING) or all(OURS.fullmatch(span) for span in SPAN.findall(row.setting))
    assert row.remark or row.setting not in ("", NOTHING)
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


def covered(usage: Usage, table: list[Row]) -> Counter[str]:
    """Return the uses of the keys that a row of ``table`` names."""
    patterns = [key.removeprefix("--") for row in table if row.system == usage.system for key in row.keys]
    keys = (key for key in usage.uses if any(fnmatchcase(key, pattern) for pattern in patterns))
    return Counter({key: usage.uses[key] for key in keys})


@pytest.mark.parametrize(("heading", "system"), SYSTEMS.items())
def test_the_tables_cover_nine_uses_of_ten_and_the_page_says_how_many(heading, system):
    usage = USAGES[system]
    uses = sum(usage.uses.values())
    tables = [[row for row in ROWS if row.setting not in ("", NOTHING)]]
    tables += [[row for row in ROWS if row.setting == setting] for setting in (NOTHING, "")]
    shares, before = list[float](), Counter[str]()
    for table in tables:
        shares.append(100 * (covered(usage, table) - before).total() / uses)
        before |= covered(usage, table)
    assert shares[0] + shares[1] >= 90
    source = f"[{usage.repository}](https://github.com/{usage.repository}), `{usage.commit[:12]}` of "
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {heading} | {source}")]
    cells = [str(usage.configurations), f"{uses:,}", *(f"{share:.1f} %" for share in shares)]
    assert line.endswith(f" | {' | '.join(cells)} |")


def test_no_key_has_two_rows_in_the_same_table():
    for system in SYSTEMS.values():
        keys = Counter(key for row in ROWS if row.system == system and row.setting for key in row.keys)
        assert not [key for key, count in keys.items() if count > 1], system
