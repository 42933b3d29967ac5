"""The base of every recipe section."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, Strict

HUB = "hf://"
"""Begins the path of what is on the Hugging Face Hub, as the hub's own libraries write it."""


class Section(BaseModel):
    """A frozen group of settings.

    An unknown key is an error, and no value is converted: quoted text is not a number, and a number is
    neither text nor a boolean. A whole number is accepted where a fraction is expected.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True
    )


def is_on_hub(path: Path) -> bool:
    """True if a path names files on the Hugging Face Hub."""
    return path.parts[:1] == ("hf:",)


def path_text(path: Path) -> str:
    """Return a path as a recipe writes it."""
    return HUB + "/".join(path.parts[1:]) if is_on_hub(path) else str(path)


def hub_model(path: Path) -> tuple[str, str | None] | None:
    """Return the repository and the revision of a model on the hub; None if the path names no such model."""
    named = re.fullmatch(r"hf://(?!datasets/|spaces/)([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", path_text(path))
    return (named[1], named[2]) if named else None


def _expanded(path: Path) -> Path:
    if re.search(r"\$[{\w]", str(path)) and not os.path.lexists(path):
        plain = os.path.expandvars(path)
        write = "the path itself" if "$" in plain else plain
        raise ValueError(f"variables are not read in a recipe; expected {write}")
    return Path(os.path.expanduser(path))


PathSetting = Annotated[
    Path,
    Strict(False),
    AfterValidator(_expanded),
    PlainSerializer(path_text, return_type=str, when_used="json"),
]
"""A path, which a recipe writes as text. `~` is the home folder."""


def _of_model(path: Path) -> Path:
    if is_on_hub(path) and hub_model(path) is None:
        raise ValueError("expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
    return path


OF_MODEL = AfterValidator(_of_model)
"""Marks the settings that name a model or an adapter."""

ModelSetting = Annotated[PathSetting, OF_MODEL]
"""The folder of a model or an adapter, or its name on the Hugging Face Hub."""
