"""The limits of a model that engines serve, of whatever family: what its config.json says."""

import json
from pathlib import Path
from typing import cast


def vocabulary_of(folder: Path) -> int:
    """Return the number of token ids. Raises ValueError and OSError."""
    return _number(folder, "vocab_size")


def context_of(folder: Path) -> int:
    """Return the largest number of tokens of prompt and completion together. Raises ValueError, OSError."""
    return _number(folder, "max_position_embeddings")


def _number(folder: Path, key: str) -> int:
    """Return a number of the language model, which may be a part of a larger one."""
    content: object = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = cast("dict[str, object]", content) if isinstance(content, dict) else {}
    inner = config.get("text_config")
    for each in (config, cast("dict[str, object]", inner) if isinstance(inner, dict) else {}):
        number = each.get(key)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    raise ValueError(f"{folder / 'config.json'} has no {key}, expected a positive whole number")
