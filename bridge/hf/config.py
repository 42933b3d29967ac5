"""Read an HF ``config.json`` through typed accessors. Imports no torch.

A setting that is null counts as absent. A setting of the wrong type is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, cast

HfConfig: TypeAlias = Mapping[str, object]
"""A ``config.json``, or a JSON object inside it."""


class UnsupportedModel(ValueError):
    """The HF config describes a model that the bridge cannot map."""


def read_config(model_path: Path) -> HfConfig:
    """Return the ``config.json`` of an HF checkpoint directory. Raises UnsupportedModel if it has none."""
    path = Path(model_path) / "config.json"
    try:
        content: object = json.loads(path.read_text())
    except FileNotFoundError:
        raise UnsupportedModel(
            f"{path} does not exist: model.path must be an HF checkpoint directory"
        ) from None
    except json.JSONDecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return cast("HfConfig", content)


def integers(hf: HfConfig, *names: str) -> list[int]:
    """Return settings that the config must state.

    They have no default here: the default of transformers would describe a different checkpoint.
    """
    if missing := [name for name in names if type(hf.get(name)) is not int]:
        raise UnsupportedModel(f"{hf.get('model_type')}: config.json has no number for: {', '.join(missing)}")
    return [value for name in names if type(value := hf.get(name)) is int]


def integer(hf: HfConfig, name: str) -> int | None:
    """Return a setting that may be absent."""
    value = hf.get(name)
    if value is not None and type(value) is not int:
        raise _wrong_type(hf, name, "an integer")
    return value


def integer_list(hf: HfConfig, name: str) -> list[int]:
    """Return a list that is empty if the setting is absent."""
    value = hf.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong_type(hf, name, "a list of integers")
    items = cast("list[object]", value)
    numbers = [item for item in items if type(item) is int]
    if len(numbers) != len(items):
        raise _wrong_type(hf, name, "a list of integers")
    return numbers


def optional_number(hf: HfConfig, name: str) -> float | None:
    """Return a setting that may be absent."""
    value = hf.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type(hf, name, "a number")
    return float(value)


def number(hf: HfConfig, name: str, default: float) -> float:
    """Return a setting, or ``default`` if it is absent."""
    value = optional_number(hf, name)
    return default if value is None else value


def section(hf: HfConfig, name: str) -> HfConfig:
    """Return a JSON object that the config must have."""
    value = hf.get(name)
    if not isinstance(value, dict):
        raise _wrong_type({name: None} | dict(hf), name, "a JSON object")
    return cast("HfConfig", value)


def refuse(hf: HfConfig, **supported: tuple[object, ...]) -> None:
    """Raise UnsupportedModel for every setting that is present with a value that is not in ``supported``.

    Such a setting would change the model without an error.
    """
    unsupported = [
        f"{name}={hf[name]!r}" for name, values in supported.items() if name in hf and hf[name] not in values
    ]
    if unsupported:
        raise UnsupportedModel(f"{hf.get('model_type')}: not mapped: {', '.join(unsupported)}")


def _wrong_type(hf: HfConfig, name: str, expected: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{hf.get('model_type')}: {name} is {hf[name]!r} in config.json, expected {expected}"
    )
