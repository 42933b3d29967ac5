"""Read a recipe file and ``key=value`` overrides as one nested mapping.

Nothing here knows the schema. Mistakes in the text are collected, not raised, so that they appear in the same
report as mistakes in the values.

YAML is read by the rules of YAML 1.2, not by PyYAML's rules of 1.1: ``1e-5`` is a number (in 1.1 text);
``on``, ``no``, ``010``, ``12:30`` and ``2026-01-01`` are text (in 1.1 true, false, 8, 750 and a date).
"""

# The stubs of PyYAML leave parameters and results untyped.
# pyright: reportUnknownMemberType=false

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import yaml

from slipstream.configs.violations import ABSENT, Violation, join, nearest, one_of, shown

RECIPES = Path(__file__).parent / "recipes"

NO_EQUALS = "there is no '='; an override is key=value, without spaces around the '='"

_COLON = "write `key: value`, with a colon and a space"
_WAYS_OUT: Mapping[str, str] = {
    "'\\t'": "indent with spaces",
    "expected ':'": _COLON,
    "'<document start>'": _COLON,
    "another document": "keep one, without a line ---",
    "the tag": "leave the tag out",
    "unhashable key": "templates are not read; write a value that begins with { in quotes",
    "mapping values": "write a value with ': ' in quotes, and indent the keys of a section alike",
}
"""Ways out by parts of what PyYAML says."""

_ODD_SPACE = re.compile(r"[^\S \t\r\n]")
_ODD = "a space of another kind stands there, such as a no-break space"

SPELLINGS = {"actor.recompute_logprob": "actor.recompute_logprobs"}
"""Names of settings in AReaL, and the names that replace them."""


@dataclass
class Document:
    """A recipe as plain data, and its mistakes so far."""

    data: dict[str, object] | None = None
    """None if the recipe is not a YAML mapping."""
    violations: list[Violation] = field(default_factory=list[Violation])
    unsure: set[str] = field(default_factory=set[str])
    """Paths of settings whose intended value is unknown."""

    def refuse(self, path: Sequence[str], reason: str, value: object = ABSENT) -> None:
        """Report the value at ``path``, and mark the setting as unsure."""
        self.violations.append(Violation(join(*path), value, reason))
        self.unsure.add(join(*path))


def read_document(
    recipe: Path | Mapping[str, object], overrides: Sequence[str], site: Mapping[str, object] | None = None
) -> Document:
    """Read ``recipe``, a file or the content of one, and apply ``overrides`` in order.

    ``site``: settings of ``cluster`` for which neither of them has a value.
    """
    document = Document()
    document.data = _read_recipe(recipe, document) if isinstance(recipe, Path) else _copied(recipe)
    for override in overrides:
        _apply(override, document)
    if site and document.data is not None and isinstance(given := document.data.get("cluster") or {}, dict):
        document.data["cluster"] = {**site, **cast("dict[str, object]", given)}
    return document


def _copied(recipe: Mapping[str, object]) -> dict[str, object]:
    """Return a copy that overrides may change. Paths become text, tuples lists: what YAML would have."""

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in cast("Mapping[object, object]", value).items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in cast("Sequence[object]", value)]
        return str(value) if isinstance(value, Path) else value

    return {str(key): plain(value) for key, value in recipe.items()}


def read_text(text: str, source: str, holds: str) -> Document:
    """Read the content of the file ``source``, a mapping of the settings that ``holds`` names."""
    document = Document()
    document.data = _mapping(text, source, holds, document)
    return document


def _mapping(text: str, source: str, holds: str, document: Document) -> dict[str, object] | None:
    value: object = ABSENT
    try:
        data = _parse(text, (), document)
        if isinstance(data, dict):
            return cast(dict[str, object], data)
        value = ABSENT if data is None else data
        reason = f"{'the file is empty; ' if data is None else ''}expected a mapping with {holds}"
    except _BadYaml as error:
        reason = f"this is not valid YAML: {error}"
        if Path(source).suffix not in ("", ".yaml", ".yml"):
            reason = f"expected a YAML file with {holds}; {reason}"
    document.refuse([source], reason, value)
    return None


def _read_recipe(recipe: Path, document: Document) -> dict[str, object] | None:
    try:
        text = _find_recipe(recipe).read_text(encoding="utf-8-sig")
        return _mapping(text, str(recipe), "run, model, data and so on", document)
    except FileNotFoundError:
        reason = _absent(recipe)
    except IsADirectoryError:
        found = [str(recipe / name) for name in _recipes_in(recipe)] or ["FOLDER/recipe.yaml"]
        reason = f"this is a folder; expected a recipe file, such as {one_of(found[:3])}"
    except UnicodeDecodeError as error:
        reason = f"the recipe is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8"
    except (OSError, ValueError) as error:
        reason = f"the recipe cannot be read: {getattr(error, 'strerror', None) or error}"
    document.refuse([str(recipe)], reason)
    return None


def _absent(recipe: Path) -> str:
    """Return why there is no recipe of this name."""
    if recipe.is_symlink():
        return f"this is a link to {os.readlink(recipe)}, which is not there"
    if "=" in recipe.name:
        return "this is a setting; expected a recipe first, and settings after it"
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    beside = nearest(recipe.name, _recipes_in(recipe.parent))
    near = recipe.parent / beside if beside else nearest(recipe.stem, names)
    hint = f"did you mean {near}?" if near else f"the recipes of Slipstream are {one_of(names)}"
    if not near and recipe.parent != Path():
        hint = f"{recipe.parent} has {one_of(_recipes_in(recipe.parent)[:9] or ['no YAML file'])}"
    return f"there is no such recipe file; {hint}"


def _recipes_in(folder: Path) -> list[str]:
    """Return the names of the YAML files in a folder."""
    return sorted(path.name for path in folder.glob("*.y*ml")) if os.path.isdir(folder) else []


def _find_recipe(recipe: Path) -> Path:
    """The file that ``recipe`` names: a path, or the bare name of a recipe in configs/recipes."""
    if recipe.is_file() or recipe.parent != Path():
        return recipe
    bundled = RECIPES / (recipe.name if recipe.suffix in (".yaml", ".yml") else f"{recipe.name}.yaml")
    return bundled if bundled.is_file() else recipe


def _apply(override: str, document: Document) -> None:
    """Set the setting at one dotted path. Missing sections on the way to it are created."""
    name, equals, text = override.partition("=")
    path = SPELLINGS.get(name.strip(), name.strip()).split(".")
    if not equals:
        is_recipe = override.endswith((".yaml", ".yml"))
        reason = "expected one recipe, and then settings as key=value" if is_recipe else NO_EQUALS
        return document.refuse([f"override {shown(override)}"], reason)
    if not all(path):
        reason = "a part of the key is empty; expected a key such as actor.optimizer.lr"
        return document.refuse([f"override {shown(override)}"], reason)
    try:
        value = _parse(text, tuple(path), document)
    except _BadYaml as error:
        return document.refuse(path, f"this override is not valid YAML: {error}", text)
    section = {} if document.data is None else document.data
    for depth, key in enumerate(path[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        inner = section[key]
        if not isinstance(inner, dict):
            reason = f"{join(*path[:depth])} is {shown(inner)}, not a mapping; override it as a whole"
            return document.refuse(path, reason, value)
        section = cast(dict[str, object], inner)
    section[path[-1]] = value
    return document.unsure.discard(join(*path))


class _BadYaml(Exception):
    """YAML that cannot be read. The message says where and why."""


class _Loader(yaml.SafeLoader):
    """Constructs plain data only, with the scalar types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]


_TAG = "tag:yaml.org,2002:"
_FLOAT = r"""^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
            |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
            |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"""
for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern, re.X), _first)


def _parse(text: str, path: tuple[str, ...], document: Document) -> object:
    """The value of one YAML document, which belongs at ``path`` of the recipe."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_keys(node, path, document, set(), set())
            return cast(object, loader.construct_document(node))
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _BadYaml(_described(error, text)) from error
    except yaml.reader.ReaderError as error:
        raise _BadYaml(f"character {error.position} is not allowed in YAML: {error.reason}") from error
    except (ValueError, OverflowError) as error:
        raise _BadYaml(f"a number cannot be read: {error}") from error
    except RecursionError as error:
        raise _BadYaml("nested too deeply") from error


def _described(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return where PyYAML's error is, what it is, and the way out."""
    problem = " ".join(part for part in (error.context, error.problem) if part)
    # The problem's own mark is at the end of the key, which may be lines later.
    is_key = error.context == "while scanning a simple key"
    mark = (error.context_mark if is_key else error.problem_mark) or error.context_mark
    ways = [way for part, way in _WAYS_OUT.items() if part in problem]
    where = ""
    if mark is not None:
        where = f"line {mark.line + 1}, column {mark.column + 1}: "
        line = text.split("\n")[mark.line : mark.line + 1]
        ways += [_ODD] if line and _ODD_SPACE.search(line[0]) else []
    return where + "; ".join([problem, *ways])


def _check_keys(
    node: yaml.Node, path: tuple[str, ...], document: Document, parents: set[int], done: set[int]
) -> None:
    """Report repeated keys, and report and drop keys that are not text.

    ``parents`` and ``done`` hold node ids. A node with several aliases is checked once, at its first place.
    """
    if id(node) in parents:
        raise _BadYaml(f"line {node.start_mark.line + 1}: a mapping or list contains itself by an alias")
    if id(node) in done:
        return
    parents.add(id(node))
    done.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check_keys(item, (*path, str(index)), document, parents, done)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for pair in list(node.value):
            key, value = pair
            if not isinstance(key, yaml.ScalarNode):
                continue  # the constructor refuses it
            if (spelled := join(*path, key.value)) in SPELLINGS:
                key.value = SPELLINGS[spelled].rpartition(".")[2]
            key_path, line = (*path, key.value), key.start_mark.line + 1
            if key.tag not in (_TAG + "str", _TAG + "merge"):
                document.refuse(key_path, "a key must be text; write it in quotes")
                node.value.remove(pair)
            elif _ODD_SPACE.search(key.value):
                document.refuse(key_path, f"line {line}: {_ODD}")
                node.value.remove(pair)
            elif (first := lines.get(key.value)) is not None:
                where = f"on lines {first} and {line}" if first != line else f"on line {line}"
                document.refuse(key_path, f"given twice, {where}; keep one")
            lines.setdefault(key.value, line)
            _check_keys(value, key_path, document, parents, done)
    parents.discard(id(node))
