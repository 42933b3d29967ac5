"""Reads configurations of other systems as keys and values: YAML, TOML, and overrides in shell scripts."""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from slipstream.rollout.compat.imports.launch_script import UnreadableScript, read_launch_script

OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w.]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
"""An override as Hydra reads it: ``trainer.nnodes=2``, ``+reward.num_workers=8``."""

_INTERPOLATION = re.compile(r"\$\{(?:oc\.env:([^,{}]+)(?:,([^{}]*))?|([^{}:]+))\}")
_DEEPEST = 8
"""References that lead to each other."""

_BELOW = re.compile(r"([\w./-]+)@_global_")
"""A file of which a YAML file changes some keys."""

PROGRAM = "-m"
"""The key that stands for the program which a script starts."""


class Several(list[Any]):
    """The different values of one key in the tables of a list."""


@dataclass
class Configuration:
    """Keys and values of files and overrides. What comes later counts."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """By dotted path."""
    notes: list[str] = field(default_factory=list[str])


def read_configuration(
    files: Sequence[Path], overrides: Iterable[str], starts: re.Pattern[str]
) -> Configuration:
    """Read files in their order, and then overrides, ``key=value``.

    ``starts``: matches the program that a shell script starts. Raises OSError, and UnreadableScript, which
    lists everything that cannot be read.
    """
    read, wrong = Configuration(), list[str]()
    for path in files:
        try:
            read.values |= _of_file(path, starts, read.notes)
        except UnreadableScript as error:
            wrong.append(str(error))
        except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            wrong.append(f"{path} cannot be read: {error}")
    for word in overrides:
        if match := OVERRIDE.fullmatch(word):
            read.values[match[1]] = scalar(match[2])
        else:
            wrong.append(f"{word}: expected a file that exists, or KEY=VALUE")
    if wrong:
        raise UnreadableScript("\n".join(wrong))
    read.values = {key: _resolved(value, read) for key, value in read.values.items()}
    return read


def _of_file(path: Path, starts: re.Pattern[str], notes: list[str]) -> dict[str, Any]:
    if path.suffix == ".sh":
        return _of_script(path, starts, notes)
    text = path.read_text(encoding="utf-8")
    content: Any = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    if not isinstance(content, dict):
        raise UnreadableScript(
            f"{path}: expected a table of settings, in YAML, TOML or a launch script (.sh)"
        )
    settings, below = cast("dict[str, Any]", content), dict[str, Any]()
    for name in _BELOW.findall(str(settings.pop("defaults", ""))):  # as Hydra puts files together
        below |= _of_file((path.parent / name).with_suffix(".yaml"), starts, notes)
    return below | leaves(settings)


def _of_script(path: Path, starts: re.Pattern[str], notes: list[str]) -> dict[str, Any]:
    script = read_launch_script(path, os.environ, starts)
    notes += script.notes
    values: dict[str, Any] = {PROGRAM: script.trainer}
    for word in script.words:
        if match := OVERRIDE.fullmatch(word):
            values[match[1]] = scalar(match[2])
        elif word.startswith("--config"):
            notes.append(f"{word}: the file that it names is not read; give it before the script")
    return values


def leaves(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value by its dotted path. Tables in a list have the path of the list: a key that differs
    in them has ``Several`` values.
    """
    found: dict[str, Any] = {}
    for path, value in _leaves(content, ""):
        if path not in found or found[path] == value:
            found[path] = value
        elif isinstance(found[path], Several):
            found[path].append(value)
        else:
            found[path] = Several([found[path], value])
    return found


def _leaves(content: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        path = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[str, Any]", value), path)
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):  # pyright: ignore[reportUnknownVariableType]
            for each in cast("list[Mapping[str, Any]]", value):
                yield from _leaves(each, path)
        else:
            yield path, scalar(value) if isinstance(value, str) else value


def scalar(text: str) -> Any:
    """Return the value of a text as Hydra reads it; the text itself where it is none."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):  # a text, to YAML 1.1
        return float(text)
    try:
        return yaml.safe_load(text) if text and "\n" not in text and "${" not in text else text
    except (yaml.YAMLError, ValueError):
        return text


def _resolved(value: Any, read: Configuration, depth: int = 0) -> Any:
    """Return a value with its references to other keys and to the environment."""
    if isinstance(value, list):
        each = [_resolved(one, read, depth) for one in cast("list[Any]", value)]
        return Several(each) if isinstance(value, Several) else each
    if not isinstance(value, str) or depth > _DEEPEST:
        return value
    if whole := _INTERPOLATION.fullmatch(value):
        return _resolved(_referred(whole, read), read, depth + 1)
    text = _INTERPOLATION.sub(lambda match: str(_referred(match, read)), value)
    return text if text == value else _resolved(text, read, depth + 1)


def _referred(match: re.Match[str], read: Configuration) -> Any:
    variable, otherwise, key = cast("tuple[str | None, str | None, str]", match.groups())
    if variable is not None:
        found = os.environ.get(variable.strip(), otherwise)
        return _unknown(match, read) if found is None else scalar(found)
    if key in read.values:
        return read.values[key]
    below = {
        path.removeprefix(f"{key}."): value
        for path, value in read.values.items()
        if path.startswith(f"{key}.")
    }
    return below or _unknown(match, read)


def _unknown(match: re.Match[str], read: Configuration) -> str:
    note = f"{match[0]}: nothing says its value"
    if note not in read.notes:
        read.notes.append(note)
    return match[0].replace("$", "")
