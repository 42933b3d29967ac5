"""Makes the prompts of a run out of a table: a part to train on, and another one to hold out."""

import csv
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from slipstream.backend import quickstart


def prepare(
    model_path: Path,
    data_path: Path,
    eval_path: Path,
    *,
    seed: int,
    table: str,
    held_out: int = 20,
    say: Callable[[str], None] = print,
) -> None:
    quickstart.prepare(model_path, seed=seed, say=say)  # a policy to begin with, unless it exists
    with open(table, newline="") as file:
        rows = [{"prompt": row["question"], "label": row["answer"]} for row in csv.DictReader(file)]
    if len(rows) <= held_out:
        raise ValueError(f"{table} has {len(rows)} rows, expected more than the {held_out} to hold out")
    random.Random(seed).shuffle(rows)
    for path, part in ((eval_path, rows[:held_out]), (data_path, rows[held_out:])):
        if not path.exists():
            say(f"writing {len(part)} prompts to {path}")
            write(path, part)


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a file that is complete as soon as it exists: a later start does not make it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(unfinished, path)
