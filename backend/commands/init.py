"""``slipstream init``: a folder with a recipe, a reward and data, which runs as it is."""

import json
import os
import random
import re
from importlib.resources import files
from itertools import islice
from pathlib import Path
from string import Template

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.quickstart.task import Problem, held_out_set, train_problems
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.schema import hub_model, is_on_hub, path_text

TRAIN, HELD_OUT = 1000, 100
"""Numbers of prompts."""

OWN_MODEL = """\
# Makes a small policy, which has the alphabet of the data below. Name a model of yours in its place.
prepare: slipstream.backend.quickstart.prepare"""


def init(folder: Path, model: Path | None = None) -> list[Path]:
    """Write the files of a new run into ``folder``, and return them.

    ``model``: a Hugging Face checkpoint that chats, or its name on the hub; None: the run makes a policy of
    its own, without a download. Raises WrongInput when a file is there already, or the model is not.
    """
    run_name = re.sub("[^A-Za-z0-9._-]+", "-", Path(os.path.realpath(folder)).name).lstrip("._-") or "my-run"
    contents = _contents(model, run_name)
    there = [str(folder / name) for name in contents if os.path.lexists(folder / name)]
    problems = [f"{', '.join(there)}: there already, and not overwritten: name another folder"] * bool(there)
    if model is not None and hub_model(model) is None and not (model / "config.json").is_file():
        problems.append(
            f"--model {path_text(model)}: expected the folder of a Hugging Face checkpoint, with config.json,"
            " or hf://ORG/NAME"
        )
    if problems:
        raise WrongInput("\n".join(problems))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise WrongInput(
            f"{folder}: {error.strerror or error} ({error.filename}); expected a folder that can be made and "
            "written: name another one"
        ) from None
    return [folder / name for name in contents]


def _contents(model: Path | None, name: str) -> dict[str, str]:
    """Return the text of each file by its name."""
    starter = files("slipstream.configs") / "starter"
    if model is None:
        drawn = islice(train_problems(random.Random(0)), 2 * TRAIN)
        train = list({problem.prompt: problem for problem in drawn}.values())[:TRAIN]
        held_out = held_out_set(0, HELD_OUT)
        settings = {"prepare": OWN_MODEL, "model": "runs/.policy", "dtype": "float32", "lr": "2.5e-4"}
        settings |= {"tokens": "72", "steps": "30"}
    else:
        problems = _sums(random.Random(0))
        train, held_out = problems[:TRAIN], problems[TRAIN : TRAIN + HELD_OUT]
        settings = {
            "prepare": "",
            "model": json.dumps(path_text(model if is_on_hub(model) else model.resolve())),
            "lr": "1.0e-6",
        }
        settings |= {"dtype": "bfloat16" if has_gpus() else "float32", "tokens": "256", "steps": "100"}
    settings["name"] = name
    return {
        "recipe.yaml": Template((starter / "recipe.yaml").read_text())
        .substitute(settings)
        .replace("\n\n\n", "\n\n"),
        "my_reward.py": (starter / "my_reward.py").read_text(),
        "train.jsonl": _lines(train),
        "heldout.jsonl": _lines(held_out),
    }


def _sums(rng: random.Random) -> list[Problem]:
    """Return different sums of two numbers, as questions to a model that chats."""
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], TRAIN + HELD_OUT)
    return [
        Problem(f"What is {a} + {b}? Think, then write the number alone after a # at the end.", str(a + b))
        for a, b in pairs
    ]


def _lines(problems: list[Problem]) -> str:
    return "".join(json.dumps({"prompt": each.prompt, "label": each.label}) + "\n" for each in problems)
