"""Settings handed through to Megatron-Core and SGLang, checked against the versions that are installed.

``actor.megatron`` and ``rollout.engine.args`` hold fields of other people's classes. Those are read from
the installed *source* (``ast``): importing either package takes seconds and brings in torch, while a recipe
should be checked in a moment, also on a login node. Fields that Slipstream sets itself are refused with the
setting to use instead (``owned``).
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slipstream.configs.owned import MEGATRON_OWNED, SGLANG_OWNED
from slipstream.configs.schema import RunConfig
from slipstream.configs.violations import Violation, join, nearest, one_of, shown


@dataclass(frozen=True)
class Accepts:
    """The values that a field's annotation admits, as far as a recipe can write them."""

    kinds: frozenset[str] = frozenset()
    choices: tuple[object, ...] = ()
    open: bool = False
    """Some part of the annotation is not understood here, so that any value may be right."""

    def __or__(self, other: "Accepts") -> "Accepts":
        return Accepts(self.kinds | other.kinds, self.choices + other.choices, self.open or other.open)

    def __contains__(self, value: object) -> bool:
        if self.open or any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        kind = "null" if value is None else type(value).__name__
        return kind in self.kinds or (kind == "int" and "float" in self.kinds)

    def nearest(self, value: object) -> str | None:
        return nearest(str(value), [choice for choice in self.choices if isinstance(choice, str)])

    def __str__(self) -> str:
        words = [_WORDS[kind] for kind in _WORDS if kind in self.kinds and kind != "null"]
        words += [shown(choice) for choice in self.choices if choice is not None]
        if not words:
            words.append("a Python object, which a recipe cannot write")
        if "null" in self.kinds or None in self.choices:
            words.append("null")
        return one_of(words)


_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "null": "null",
}
_ANYTHING = Accepts(open=True)
_UNWRITABLE = Accepts()

Fields = Mapping[str, Accepts]


@dataclass(frozen=True)
class Library:
    """One library whose fields a recipe may set."""

    section: str
    package: str
    distribution: str
    classes: str
    owned: Mapping[str, str]
    read: Callable[[Path], Fields]
    """The fields declared in a source directory; raises LookupError when they are not where expected."""


def check_passthrough(config: RunConfig) -> Iterator[Violation]:
    """Violations of ``actor.megatron`` and ``rollout.engine.args``."""
    for library, given in ((MEGATRON, config.actor.megatron), (SGLANG, config.rollout.engine.args)):
        if given:
            yield from _check(library, given)


def passthrough_path(name: str) -> str | None:
    """The path at which a recipe sets the Megatron or SGLang field ``name``; None when neither has one."""
    for library in LIBRARIES:
        if name in (_fields(library) or ()) and name not in library.owned:
            return f"{library.section}.{name}"
    return None


def _check(library: Library, given: Mapping[str, object]) -> Iterator[Violation]:
    fields = _fields(library)
    unchecked = []
    for name, value in given.items():
        path = join(library.section, name)
        if name in library.owned:
            yield Violation(path, value, library.owned[name])
        elif fields is None:
            unchecked.append(name)
        elif name not in fields:
            yield Violation(path, value, _unknown(library, name, fields))
        elif value not in fields[name]:
            near = fields[name].nearest(value)
            hint = f"; did you mean {near}?" if near else ""
            yield Violation(path, value, f"{_version(library)} expects {fields[name]}{hint}")
    if unchecked:
        reason = f"{', '.join(unchecked)} cannot be checked: {_why_unread(library)}"
        yield Violation(library.section, dict(given), reason)


def _unknown(library: Library, name: str, fields: Fields) -> str:
    reason = f"{_version(library)} has no such field in {library.classes}"
    elsewhere = passthrough_path(name)
    near = nearest(name, [*fields, *library.owned])
    if elsewhere:
        return f"{reason}; did you mean {elsewhere}?"
    if near in library.owned:
        return f"{reason}; if {near} is meant: {library.owned[near]}"
    return f"{reason}; did you mean {near}?" if near else reason


def _why_unread(library: Library) -> str:
    if _package(library.package) is None:
        return f"{library.distribution} is not installed"
    return f"{_version(library)} does not declare {library.classes} where Slipstream looks for them"


def _version(library: Library) -> str:
    try:
        return f"{library.distribution} {importlib.metadata.version(library.distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return library.distribution


def _package(name: str) -> Path | None:
    """The directory of a package, found without importing anything.

    Of a dotted name only the first part is looked up, the rest is a path inside it: looking up
    ``megatron.core`` would import ``megatron``, a namespace package that may lie in several directories.
    """
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (folder := Path(location, *inner)).is_dir():
            return folder
    return None


def _fields(library: Library) -> Fields | None:
    """The fields of a library, or None when it is not installed or its source is not laid out as expected."""
    folder = _package(library.package)
    return None if folder is None else _read(library.read, folder)


@cache
def _read(read: Callable[[Path], Fields], folder: Path) -> Fields | None:
    try:
        return read(folder)
    except (LookupError, OSError, SyntaxError, ValueError):
        return None


def read_megatron(folder: Path) -> Fields:
    """TransformerConfig with its base, and OptimizerConfig; for a name in both, the former has the say."""
    fields: dict[str, Accepts] = {}
    for file, name in (
        ("optimizer/optimizer_config.py", "OptimizerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ):
        module = _Module(folder / file, folder.parent.parent)
        fields.update(module.fields(module.classes[name]))
    return fields


def read_sglang(folder: Path) -> Fields:
    """ServerArgs: structs in srt/arg_groups/fields (as in 0.5.21), or one dataclass in srt/server_args.py."""
    fields: dict[str, Accepts] = {}
    for file in sorted((folder / "srt/arg_groups/fields").glob("*.py")):
        module = _Module(file, folder.parent)
        for declared in module.classes.values():
            if any(ast.unparse(base).rpartition(".")[2] == "Struct" for base in declared.bases):
                fields.update(module.fields(declared))
    if not fields:
        module = _Module(folder / "srt/server_args.py", folder.parent)
        fields.update(module.fields(module.classes["ServerArgs"]))
    if "model_path" not in fields:
        raise LookupError("ServerArgs without model_path")
    return fields


MEGATRON = Library(
    section="actor.megatron",
    package="megatron.core",
    distribution="megatron-core",
    classes="TransformerConfig or OptimizerConfig",
    owned=MEGATRON_OWNED,
    read=read_megatron,
)
SGLANG = Library(
    section="rollout.engine.args",
    package="sglang",
    distribution="sglang",
    classes="ServerArgs",
    owned=SGLANG_OWNED,
    read=read_sglang,
)
LIBRARIES = (MEGATRON, SGLANG)


class _Module:
    """One source file: its classes, the annotations in them, and the constant lists that they mention."""

    def __init__(self, file: Path, root: Path) -> None:
        """``root`` is the directory that holds the top-level package, where absolute imports are resolved."""
        self.tree = ast.parse(file.read_text(encoding="utf-8"))
        self.root = root
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def fields(self, declared: ast.ClassDef) -> Fields:
        """Annotated names of a dataclass or struct. Private names and class variables cannot be passed in."""
        return {
            node.target.id: self.accepts(node.annotation)
            for node in declared.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not node.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(node.annotation)
        }

    def accepts(self, annotation: ast.expr) -> Accepts:
        match annotation:
            case ast.Constant(value=None):
                return Accepts(frozenset({"null"}))
            case ast.Constant(value=str(text)):
                return self.accepts(ast.parse(text, mode="eval").body)
            case ast.Name(id=("int" | "float" | "bool" | "str") as kind):
                return Accepts(frozenset({kind}))
            case ast.Name(id="Callable") | ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
                return _UNWRITABLE
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.accepts(left) | self.accepts(right)
            case ast.Subscript(value=generic, slice=inside):
                return self._generic(ast.unparse(generic).rpartition(".")[2], _items(inside))
        return _ANYTHING

    def _generic(self, name: str, items: list[ast.expr]) -> Accepts:
        if name == "Callable":
            return _UNWRITABLE
        if name == "Optional":
            return self.accepts(items[0]) | Accepts(frozenset({"null"}))
        if name == "Union":
            merged = _UNWRITABLE
            for item in items:
                merged |= self.accepts(item)
            return merged
        if name == "Literal":
            return Accepts(choices=tuple(ast.literal_eval(item) for item in items))
        if name in ("A", "Annotated"):
            plain = self.accepts(items[0])
            choices = self._choices(items[1:])
            if choices is None or plain.open:
                return plain
            return Accepts(plain.kinds & {"null"}, choices)
        return _ANYTHING

    def _choices(self, metadata: list[ast.expr]) -> tuple[object, ...] | None:
        """``Arg(choices=[...])``; None without choices, or with ones that only running code would tell."""
        for item in metadata:
            for keyword in item.keywords if isinstance(item, ast.Call) else ():
                if keyword.arg == "choices":
                    found = self._constant(keyword.value)
                    return tuple(found) if isinstance(found, list | tuple | set) else None
        return None

    def _constant(self, value: ast.expr) -> object:
        match value:
            case ast.Name(id=name):
                return self._named(name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = self._constant(left), self._constant(right)
                both = isinstance(first, list) and isinstance(second, list)
                return [*first, *second] if both else None
        try:
            return ast.literal_eval(value)
        except ValueError:
            return None

    def _named(self, name: str) -> object:
        """A constant of this module, or of the module that it is imported from."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    return self._constant(value)
                case ast.ImportFrom(module=str(module), level=0, names=names):
                    if any((alias.asname or alias.name) == name for alias in names):
                        file = self.root.joinpath(*module.split(".")).with_suffix(".py")
                        return _module(file, self.root)._named(name) if file.is_file() else None
        return None


@cache
def _module(file: Path, root: Path) -> _Module:
    return _Module(file, root)


def _items(inside: ast.expr) -> list[ast.expr]:
    return list(inside.elts) if isinstance(inside, ast.Tuple) else [inside]
