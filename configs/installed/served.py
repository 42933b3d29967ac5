"""Read from the source of the installed SGLang what it can do with a model, without importing it."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from slipstream.configs.installed import package_folder

Ability = Literal["data_parallel", "pipeline_parallel"]

MARKS: dict[Ability, tuple[str, ...]] = {
    "data_parallel": ("attn_tp_size", "get_attention_tp_size"),
    "pipeline_parallel": ("pp_group", "PPMissingLayer"),
}
"""Names that the source of a model uses if its attention can be data-parallel, or its layers pipelined."""

_IMPORTED = re.compile(r"^from sglang\.srt\.models\.(\w+) import", re.MULTILINE)


def model_files() -> list[Path]:
    """Return the files of SGLang's models; none if it is not installed."""
    folder = package_folder("sglang.srt.models")
    return sorted(folder.glob("*.py")) if folder else []


def files_of(architecture: str) -> list[Path]:
    """Return the files of SGLang that have a class of this architecture."""
    return [file for file in model_files() if f"class {architecture}(".encode() in file.read_bytes()]


@cache
def can(architecture: str, ability: Ability) -> bool | None:
    """True if SGLang's class of an architecture has an ability, or another model's that it may be made of.

    None if SGLang is not installed, or does not have the architecture.
    """
    files = files_of(architecture)
    if not files:
        return None
    return any(mark in text for file in files for text in _texts(file) for mark in MARKS[ability])


def _texts(file: Path) -> Iterator[str]:
    """Yield the source of a model, and of the models from which it imports."""
    text = file.read_text()
    yield text
    for name in dict.fromkeys(_IMPORTED.findall(text)):
        imported = file.with_name(f"{name}.py")
        if imported.exists():
            yield imported.read_text()
