"""A folder with a sound recipe: a policy of two layers, prompts, held-out prompts, examples and plug-ins."""

import json
import shutil
from pathlib import Path

import yaml

from slipstream.backend.quickstart.policy import build_policy
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from tests.wrong_inputs.case import WrongInput

ROWS = [{"prompt": f"{number}+1=?", "label": str(number + 1), "level": 1} for number in range(9)]
EXAMPLES = [{"prompt": "1+1=?", "response": "2", "chosen": "2", "rejected": "3"}] * 9

PLUGINS = """
class Reward:
    def __init__(self, scale=1.0):
        self.scale = scale

    def score(self, prompt, response, trajectory):
        return self.scale


class Filter:
    def keep(self, group):
        return True
"""


def lines(rows: list[object]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_with(**changes: object) -> str:
    """Return the sound prompts with other columns in line 3; None removes a column."""
    row = {name: value for name, value in {**ROWS[2], **changes}.items() if value is not ...}
    return lines([*ROWS[:2], row, *ROWS[3:]])


def make_model(folder: Path) -> None:
    """Write the policy, whose tokenizer has 48 symbols, with a context of 512 tokens."""
    tokenizer = build_tokenizer()
    build_policy(tokenizer, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def recipe(folder: Path) -> dict[str, object]:
    """Return a sound recipe."""
    return {
        "run": {"name": "test", "root": str(folder / "runs"), "steps": 2},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / "data.jsonl")},
        "eval": {"path": str(folder / "heldout.jsonl")},
        "rollout": {
            "max_head_offpolicyness": 2,
            "batch_size": 2,
            "n_samples_per_prompt": 2,
            "sampling": {"max_new_tokens": 64},
            "reward": "slipstream.rollout.reward.FinalAnswer",
        },
    }


def supervised(folder: Path) -> dict[str, object]:
    """Return a sound recipe of ``slipstream sft``."""
    sections = {key: value for key, value in recipe(folder).items() if key in ("run", "model")}
    return {**sections, "data": {"path": str(folder / "examples.jsonl")}, "batch_size": 2}


def build(case: WrongInput, folder: Path, model: Path) -> None:
    """Write the folder of a case. ``model``: a sound model to copy."""
    shutil.copytree(model, folder / "model")
    (folder / "data.jsonl").write_text(lines([*ROWS]))
    (folder / "heldout.jsonl").write_text(lines([*ROWS]))
    (folder / "examples.jsonl").write_text(lines([*EXAMPLES]))
    (folder / "my_sound_plugins.py").write_text(PLUGINS)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder)))
    (folder / "sft.yaml").write_text(yaml.safe_dump(supervised(folder)))
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif callable(content):
            path.write_text(content(path.read_text()))
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(case.in_folder(content, folder))
