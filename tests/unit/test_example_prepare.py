"""The example of a ``prepare``, called as a run calls it: in a process of its own, for what is missing."""

import asyncio
import csv
import json
from pathlib import Path

import pytest

import slipstream
from slipstream.backend.driver.start.prepare import PrepareFailed, prepare_inputs
from slipstream.configs.schema import RunConfig
from tests.environment import ROOT

RECIPE = ROOT / "examples/prepare/recipe.yaml"
TABLE = ROOT / "examples/prepare/sums.csv"


def config(folder: Path, *overrides: str) -> RunConfig:
    """Return the recipe of the example with its inputs in ``folder``, where a policy is already."""
    (folder / ".made/policy").mkdir(parents=True, exist_ok=True)
    paths = {"model": ".made/policy", "data": ".made/train.jsonl", "eval": ".made/heldout.jsonl"}
    settings = [f"{section}.path={folder / path}" for section, path in paths.items()]
    return slipstream.load_recipe(RECIPE, [*settings, f"prepare.args.table={TABLE}", *overrides])


def prepared(config: RunConfig) -> tuple[list[str], list[list[dict]]]:
    """Return what the user is shown, and the rows of both files."""
    said: list[str] = []
    asyncio.run(prepare_inputs(config, said.append))
    files = (config.data.path, config.eval.path)  # type: ignore[union-attr]
    return said, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_the_table_is_split_by_the_seed_into_prompts_to_train_on_and_to_hold_out(tmp_path):
    said, [train, held_out] = prepared(config(tmp_path))
    with TABLE.open(newline="") as file:
        table = [(row["question"], row["answer"]) for row in csv.DictReader(file)]
    assert sorted((row["prompt"], row["label"]) for row in train + held_out) == sorted(table)
    assert len(held_out) == 16 and len(set(table)) == len(table)
    assert any("writing 16 prompts" in line for line in said)
    assert prepared(config(tmp_path)) == ([], [train, held_out]), "nothing is missing: it is not called"
    (tmp_path / ".made/train.jsonl").unlink()
    said, again = prepared(config(tmp_path))
    assert again == [train, held_out] and not any("heldout" in line for line in said)
    (tmp_path / "other").mkdir()
    assert prepared(config(tmp_path / "other", "run.seed=5"))[1] != [train, held_out]


def test_what_the_function_raises_is_shown_to_the_user(tmp_path):
    with pytest.raises(PrepareFailed, match="has 80 rows, expected more than the 80 to hold out"):
        prepared(config(tmp_path, "prepare.args.held_out=80"))
    assert not (tmp_path / ".made/train.jsonl").exists()
