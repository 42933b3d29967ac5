"""Text to plain data: a recipe file and ``key=value`` overrides become one nested mapping.

Nothing here knows the schema. What is wrong with the text is collected, not raised, so that it appears in the
same report as what is wrong with the values.

YAML is read by the 1.2 core rules rather than PyYAML's 1.1 ones: ``1e-5`` is a number (1.1 makes it text),
``on``, ``no``, ``010``, ``12:30`` and ``2026-01-01`` are text (1.1: true, false, 8, 750 and a date).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from slipstream.configs.violations import ABSENT, Violation, join, nearest, one_of, shown

RECIPES = Path(__file__).parent / "recipes"


@dataclass
class Document:
    """A recipe as plain data, and what was wrong with its text."""

    data: dict[str, Any] | None = None
    violations: list[Violation] = field(default_factory=list)
    overridden: set[str] = field(default_factory=set)
    """Paths set by an override: they win over another spelling of the same setting in the file."""
    unsure: set[str] = field(default_factory=set)
    """Paths whose value is in doubt: a key that is given twice."""


def read_document(recipe: Path, overrides: Sequence[str]) -> Document:
    """Read ``recipe`` and apply ``overrides`` in order; without a mapping to go on with, ``data`` is None."""
    document = Document()
    text = _read_text(recipe, document)
    if text is not None:
        document.data = _parse_recipe(text, str(recipe), document)
    for override in overrides:
        _override(override, document)
    if document.data is not None:
        _check_keys(document.data, (), document, set(), set())
    return document


class _Loader(yaml.SafeLoader):
    """Safe construction with the scalar types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


_DIGITS = "-+0123456789"
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list(_DIGITS)
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
            |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
            |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.X,
    ),
    list(_DIGITS + "."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


class _BadYaml(Exception):
    """YAML that cannot be read; the message says where and why."""


def _parse(text: str, repeated: list[tuple[tuple[str, ...], int, int]] | None = None) -> object:
    """The value of one YAML document. Keys that are given twice are added to ``repeated`` with both lines."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if repeated is not None:
                _find_repeated(node, (), repeated, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise _BadYaml(f"{where}{problem}") from error
    except yaml.reader.ReaderError as error:
        raise _BadYaml(f"character {error.position} is not allowed in YAML: {error.reason}") from error
    except (ValueError, OverflowError) as error:
        raise _BadYaml(f"a number cannot be read: {error}") from error
    except RecursionError as error:
        raise _BadYaml("nested too deeply") from error


def _find_repeated(
    node: yaml.Node, path: tuple[str, ...], repeated: list[tuple[tuple[str, ...], int, int]], seen: set[int]
) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _find_repeated(item, (*path, str(index)), repeated, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                repeated.append(((*path, key.value), lines[name], line))
            lines.setdefault(name, line)
            _find_repeated(value, (*path, key.value), repeated, seen)


def _read_text(recipe: Path, document: Document) -> str | None:
    try:
        return find_recipe(recipe).read_text(encoding="utf-8")
    except FileNotFoundError:
        names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
        near = nearest(recipe.stem, names)
        hint = f"did you mean {near}?" if near else f"the recipes of Slipstream are {one_of(names)}"
        reason = f"there is no such recipe file; {hint}"
    except UnicodeDecodeError as error:
        reason = f"the recipe is not UTF-8 text: {error.reason} at byte {error.start}"
    except (OSError, ValueError) as error:
        reason = f"the recipe cannot be read: {getattr(error, 'strerror', None) or error}"
    document.violations.append(Violation(join(str(recipe)), ABSENT, reason))
    return None


def find_recipe(recipe: Path) -> Path:
    """The file that ``recipe`` names: a path, or the bare name of one of the recipes in configs/recipes."""
    if recipe.is_file() or recipe.parent != Path():
        return recipe
    bundled = RECIPES / (recipe.name if recipe.suffix in (".yaml", ".yml") else f"{recipe.name}.yaml")
    return bundled if bundled.is_file() else recipe


def _parse_recipe(text: str, source: str, document: Document) -> dict[str, Any] | None:
    repeated: list[tuple[tuple[str, ...], int, int]] = []
    try:
        data = _parse(text, repeated)
    except _BadYaml as error:
        document.violations.append(Violation(join(source), ABSENT, f"this is not valid YAML: {error}"))
        return None
    for keys, first, again in repeated:
        lines = f"lines {first} and {again}" if first != again else f"line {first}"
        document.violations.append(Violation(join(*keys), ABSENT, f"given twice, on {lines}; keep one"))
        document.unsure.add(join(*keys))
    if isinstance(data, dict):
        return data
    reason = "the file is empty" if data is None else "expected a mapping with run, model, data and so on"
    document.violations.append(Violation(join(source), ABSENT if data is None else data, reason))
    return None


def _override(override: str, document: Document) -> None:
    """Set one dotted path. Sections on the way that are missing or null are made."""
    path, equals, text = override.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        reason = (
            "an override is written key=value; there is no '='"
            if not equals
            else "part of the key is empty; expected a key such as actor.optimizer.lr"
        )
        document.violations.append(Violation(f"override {shown(override)}", ABSENT, reason))
        return
    try:
        value = _parse(text)
    except _BadYaml as error:
        document.violations.append(Violation(join(*keys), text, f"this override is not valid YAML: {error}"))
        return
    if document.data is None:
        return
    section = document.data
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        if not isinstance(section[key], dict):
            reason = (
                f"{join(*keys[:depth])} is {shown(section[key])}, not a mapping, so nothing can be set "
                "below it; override it as a whole"
            )
            document.violations.append(Violation(join(*keys), value, reason))
            return
        section = section[key]
    section[keys[-1]] = value
    document.overridden.add(join(*keys))
    document.unsure.discard(join(*keys))


def _check_keys(
    mapping: dict[Any, Any], path: tuple[str, ...], document: Document, parents: set[int], done: set[int]
) -> None:
    """Report and remove keys that are not text, and values that contain themselves (an alias to a parent)."""
    if id(mapping) in done:
        return
    parents.add(id(mapping))
    for key, value in list(mapping.items()):
        here = (*path, key if isinstance(key, str) else shown(key))
        if not isinstance(key, str):
            reason = "a key must be text; write it in quotes"
        elif id(value) in parents:
            reason = "an alias that contains itself"
        else:
            if isinstance(value, dict):
                _check_keys(value, here, document, parents, done)
            continue
        document.violations.append(Violation(join(*here), ABSENT, reason))
        document.unsure.add(join(*here))
        del mapping[key]
    parents.discard(id(mapping))
    done.add(id(mapping))
