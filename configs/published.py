"""The models of the bundled recipes: their config.json files, which ship in ``models/``, and their origin.

``slipstream plan`` and ``simulate`` need no more of a model that is not on the machine.
"""

# The stubs of PyYAML leave results untyped.
# pyright: reportUnknownMemberType=false

import shlex
from functools import cache
from pathlib import Path
from typing import cast

import yaml

from slipstream.configs.document import RECIPES
from slipstream.configs.schema import hub_model, is_on_hub

MODELS = Path(__file__).parent / "models"


@cache
def repositories() -> dict[str, str]:
    """Return the repository on the Hugging Face Hub of each model, by the last part of its name."""
    return cast("dict[str, str]", yaml.safe_load((MODELS / "sources.yaml").read_text(encoding="utf-8")))


def shipped_config(model: Path) -> Path | None:
    """Return the folder with the config.json that ships for the model at a path; None: there is none.

    The last part of the path names the model. What a bundled recipe writes (`runs/NAME/checkpoint-hf`) has
    the shape of the recipe's model.
    """
    if is_on_hub(model):
        repository, _ = hub_model(model) or ("", None)
        name = repository.rpartition("/")[2]
        return MODELS / name if repositories().get(name) == repository else None
    if model.name in repositories():
        return MODELS / model.name
    recipe = RECIPES / f"{model.parent.name}.yaml"
    if model.name != "checkpoint-hf" or not recipe.is_file():
        return None
    return shipped_config(Path(yaml.safe_load(recipe.read_text(encoding="utf-8"))["model"]["path"]))


def download_command(model: Path) -> str:
    """Return the command that puts a model at a path."""
    repository = repositories().get(model.name, "OWNER/NAME")
    return f"hf download {repository} --local-dir {shlex.quote(str(model))}"
