"""Reading an HF ``config.json``. Imports no torch."""

import json
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """The HF config asks for something that the bridge cannot map."""


def read_config(model_path: Path) -> dict[str, Any]:
    """``config.json`` of an HF checkpoint directory. Raises UnsupportedModel when there is none."""
    path = Path(model_path) / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModel(
            f"{path} does not exist: model.path must be an HF checkpoint directory"
        ) from None
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return found


def numbers(hf: dict[str, Any], *names: str) -> list[int]:
    """Settings that have no default: that of transformers would describe some other checkpoint."""
    if absent := [name for name in names if type(hf.get(name)) is not int]:
        raise UnsupportedModel(f"{hf.get('model_type')}: config.json has no number for: {', '.join(absent)}")
    return [hf[name] for name in names]


def refuse(hf: dict[str, Any], **expected: tuple[Any, ...]) -> None:
    """Raise UnsupportedModel for settings that are there with another value than one of ``expected``.

    They would silently make a different model.
    """
    wrong = [
        f"{name}={hf[name]!r}" for name, values in expected.items() if name in hf and hf[name] not in values
    ]
    if wrong:
        raise UnsupportedModel(f"{hf.get('model_type')}: not mapped: {', '.join(wrong)}")
