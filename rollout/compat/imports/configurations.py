"""Reads configurations of other systems as keys and values: YAML, TOML, and overrides in shell scripts."""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, cast

import yaml

from slipstream.rollout.compat.imports.launch_script import read_launch_script
from slipstream.rollout.compat.imports.shell_words import UnreadableScript

OVERRIDE = re.compile(r"(?:~|(?=[^=]+=)\+{0,2})([A-Za-z_][\w.]*(?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
"""An override as Hydra reads it: ``trainer.nnodes=2``, ``+reward.num_workers=8``, ``~trainer.logger``."""

_INTERPOLATION = re.compile(r"\$\{(?:oc\.(env|select):([^,{}]+)(?:,([^{}]*))?|([^{}:]+))\}")
_DEEPEST = 8
"""References that lead to each other."""

_TABLE = re.compile(r"([{,]\s*[\w.\"'-]+:)(?=[^\s/])")
"""A key in a table as Hydra lets one write it, without the blank that YAML wants: ``{a:1}``."""

PROGRAM = "-m"
"""The key that stands for the program which a script starts."""


_MOST_NODES = 100_000
"""Values of a document in YAML with those that its aliases repeat: a few lines can make billions."""


class Several(list[Any]):
    """The different values of one key in the tables of a list."""


@dataclass
class Configuration:
    """Keys and values of files and overrides. What comes later counts."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    """By dotted path."""
    notes: list[str] = field(default_factory=list[str])

    def lay(self, content: Mapping[str, Any]) -> None:
        """Lay a table over what is there. A list replaces the one that was there, with its tables."""
        for path, value in leaves(content).items():
            self.remove(path)
            for place, dot in enumerate(path):
                if dot == ".":
                    self.values.pop(path[:place], None)
            self.values[path] = value

    def remove(self, path: str) -> None:
        """Take out a key, or a table."""
        for key in [key for key in self.values if key == path or key.startswith(f"{path}.")]:
            del self.values[key]

    def override(self, word: str) -> bool:
        """Do what an override says. Return whether the word is one."""
        if match := OVERRIDE.fullmatch(word):
            if word.startswith("~"):
                self.remove(match[1])
            else:
                self.lay({match[1]: scalar(match[2])})
        return bool(match)


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
            _read_file(path, starts, read)
        except UnreadableScript as error:
            wrong.append(str(error))
        except RecursionError:
            wrong.append(f"{path} cannot be read: its values are nested too deeply")
        except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            wrong.append(f"{path} cannot be read: {error}")
    for word in overrides:
        if not read.override(word):
            wrong.append(f"{word}: expected a file that exists, or KEY=VALUE")
    if wrong:
        raise UnreadableScript("\n".join(wrong))
    read.values = leaves({key: _resolved(value, read, key) for key, value in read.values.items()})
    return read


def _read_file(path: Path, starts: re.Pattern[str], read: Configuration) -> None:
    if path.suffix == ".sh":
        _read_script(path, starts, read)
        return
    text = path.read_text(encoding="utf-8")
    content: Any = tomllib.loads(text) if path.suffix == ".toml" else _in_yaml(text)
    if not isinstance(content, dict):
        raise UnreadableScript(
            f"{path}: expected a table of settings, in YAML, TOML or a launch script (.sh)"
        )
    settings = cast("dict[str, Any]", content)
    for name in _list(settings.pop("defaults", [])):  # as Hydra puts files together
        _read_default(path, name, read)
    for table in _lists_of_tables(settings, ""):
        read.remove(table)
    read.lay(settings)


def _read_default(path: Path, name: object, read: Configuration) -> None:
    """Read a file that another one names in its ``defaults``: a name, or ``group@table: name``."""
    group, file = next(iter(cast("dict[str, Any]", name).items())) if isinstance(name, dict) else ("", name)
    group, _, table = str(group).removeprefix("override ").removeprefix("optional ").partition("@")
    file, _, whole = str(file).partition("@")
    if file in ("_self_", "None", "null"):
        return
    place = (path.parent / group / file).with_suffix(".yaml")
    if whole != "_global_" and not place.is_file():
        read.notes.append(
            f"{path.name} is laid over {group or file}, which is not at {place}: it is not read"
        )
        return
    below = Configuration(notes=read.notes)
    _read_file(place, re.compile("(?!)"), below)
    table = (table or group.replace("/", ".")).strip(".")
    read.lay({f"{table}.{key}" if table and not whole else key: value for key, value in below.values.items()})


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _lists_of_tables(content: Mapping[str, Any], above: str) -> Iterator[str]:
    for name, value in content.items():
        path = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from _lists_of_tables(cast("Mapping[str, Any]", value), path)
        elif any(isinstance(each, Mapping) for each in _list(value)):
            yield path


def _read_script(path: Path, starts: re.Pattern[str], read: Configuration) -> None:
    script = read_launch_script(path, os.environ, starts)
    read.notes += script.notes
    named = re.findall(r"(?:^|\n)--config-(path|name|dir)[=\n](?:file://)?(.*)", "\n".join(script.words))
    _read_named(path, dict(named), starts, read)
    read.values[PROGRAM] = script.trainer
    for word in script.words:
        read.override(word)


def _read_named(path: Path, named: Mapping[str, str], starts: re.Pattern[str], read: Configuration) -> None:
    """Read the file that a script names with ``--config-path`` and ``--config-name``, if it is near."""
    if "name" not in named:
        return
    below = Path(re.sub(r"^\$\w+/?", "", named.get("path", named.get("dir", "config"))), named["name"])
    folders = path.resolve().parents
    place = next(
        (each for folder in folders if (each := (folder / below).with_suffix(".yaml")).is_file()), None
    )
    if place is None:
        read.notes.append(
            f"--config-name={named['name']}: {below} is not near {path.name} and not read; where it is not "
            "the system's own, give it before the script"
        )
    else:
        read.notes.append(f"--config-name={named['name']}: {place} is read")
        _read_file(place, starts, read)


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
    if text.startswith("{"):
        text = _TABLE.sub(r"\1 ", text)
    try:
        return _in_yaml(text) if text and "\n" not in text and "${" not in text else text
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _in_yaml(text: str) -> Any:
    """Return what a text in YAML holds. Raises YAMLError, ValueError and RecursionError."""
    root = cast("yaml.Node | None", yaml.compose(text, yaml.SafeLoader))  # pyright: ignore[reportUnknownMemberType]
    if root is not None and _nodes(root, {}) > _MOST_NODES:
        raise yaml.YAMLError(f"with what its aliases repeat it has more than {_MOST_NODES:,} values")
    return yaml.safe_load(text)


def _nodes(node: yaml.Node, counted: dict[int, float]) -> float:
    """Return the number of values below a node, each as often as it is repeated."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = inf  # until it is counted: one that holds itself has no end
    below: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        below = [part for pair in node.value for part in pair]
    counted[id(node)] = 1 + sum(_nodes(each, counted) for each in below)
    return counted[id(node)]


def _resolved(value: Any, read: Configuration, at: str, depth: int = 0) -> Any:
    """Return the value of the key ``at`` with its references to other keys and to the environment."""
    if isinstance(value, list):
        each = [_resolved(one, read, at, depth) for one in cast("list[Any]", value)]
        return Several(each) if isinstance(value, Several) else each
    if not isinstance(value, str) or depth > _DEEPEST:
        return value
    if whole := _INTERPOLATION.fullmatch(value):
        return _resolved(_referred(whole, read, at), read, at, depth + 1)
    text = _INTERPOLATION.sub(lambda match: str(_referred(match, read, at)), value)
    return text if text == value else _resolved(text, read, at, depth + 1)


def _referred(match: re.Match[str], read: Configuration, at: str) -> Any:
    kind, name, otherwise, key = cast("tuple[str | None, str | None, str | None, str]", match.groups())
    if kind == "env":
        found = os.environ.get((name or "").strip(), otherwise)
        return _unknown(match, read) if found is None else scalar(found)
    key = (name or key).strip()
    if up := len(key) - len(key.lstrip(".")):  # relative to the table that holds the reference
        key = ".".join([*at.split(".")[:-up], key[up:]])
    if key in read.values:
        return read.values[key]
    below = {
        path.removeprefix(f"{key}."): value
        for path, value in read.values.items()
        if path.startswith(f"{key}.")
    }
    return below or (_unknown(match, read) if otherwise is None else scalar(otherwise))


def _unknown(match: re.Match[str], read: Configuration) -> str:
    note = f"{match[0]}: nothing says its value"
    if note not in read.notes:
        read.notes.append(note)
    return "$" + re.sub(r"[${}]", "", match[0])
