"""Read the fields of a library's dataclasses, and the values they accept, from its source.

The source is parsed (``ast``), not imported: importing Megatron or SGLang takes seconds and loads torch.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from slipstream.configs.violations import nearest, one_of, shown

_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "a mapping",
    "null": "null",
}


@dataclass(frozen=True)
class Accepts:
    """The values that a field's annotation accepts, as far as a recipe can write them."""

    kinds: frozenset[str] = frozenset()
    choices: tuple[object, ...] = ()
    items: tuple["Accepts", ...] = ()
    """A list is accepted if one of these accepts all of its items."""
    open: bool = False
    """A part of the annotation is not understood here, so that any value may be right."""

    def __or__(self, other: "Accepts") -> "Accepts":
        return Accepts(
            self.kinds | other.kinds,
            self.choices + other.choices,
            self.items + other.items,
            self.open or other.open,
        )

    def __contains__(self, value: object) -> bool:
        if self.open or any(type(value) is type(choice) and value == choice for choice in self.choices):
            return True
        if isinstance(value, list):
            inside = cast("list[object]", value)
            return any(all(item in accepts for item in inside) for accepts in self.items)
        kind = "null" if value is None else type(value).__name__
        return kind in self.kinds or (kind == "int" and "float" in self.kinds)

    def nearest(self, value: object) -> str | None:
        """The choice that is spelled most like ``value``."""
        return nearest(str(value), [choice for choice in self.choices if isinstance(choice, str)])

    def __str__(self) -> str:
        words = [_WORDS[kind] for kind in _WORDS if kind in self.kinds and kind != "null"]
        words += [shown(choice) for choice in self.choices if choice is not None]
        words += ["a list" if each.open else f"a list of: {each}" for each in self.items]
        if not words:
            words.append("a Python object, which a recipe cannot write")
        if "null" in self.kinds or None in self.choices:
            words.append("null")
        return one_of(words)


Fields = Mapping[str, Accepts]

_ANYTHING = Accepts(open=True)
_UNWRITABLE = Accepts()


def read_megatron(folder: Path) -> Fields:
    """Read OptimizerConfig, and TransformerConfig with its base and the class for latent attention.

    If several have a field, that of a class of models wins.

    Raises LookupError when a class is not where it is expected.
    """
    fields: dict[str, Accepts] = {}
    for file, name in (
        ("transformer/transformer_config.py", "MLATransformerConfig"),
        ("optimizer/optimizer_config.py", "OptimizerConfig"),
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ):
        module = _module(folder / file, folder.parent.parent)
        fields.update(module.fields(module.classes[name]))
    return fields


def read_sglang(folder: Path) -> Fields:
    """Read ServerArgs: structs in srt/arg_groups/fields (0.5.21), or one dataclass in srt/server_args.py.

    Raises LookupError when a class is not where it is expected.
    """
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


def read_sampling(folder: Path) -> Fields:
    """Read SamplingParams. Raises LookupError when it is not where it is expected."""
    module = _Module(folder / "srt/sampling/sampling_params.py", folder.parent)
    return module.fields(module.classes["SamplingParams"])


class _Module:
    """One source file: its classes, their annotations, and the constant lists in those."""

    def __init__(self, file: Path, root: Path) -> None:
        """``root`` is the directory of the top-level package, where absolute imports are resolved."""
        self.tree = ast.parse(file.read_text(encoding="utf-8"))
        self.root = root
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def fields(self, declared: ast.ClassDef) -> Fields:
        """The fields of a dataclass or struct, without private names and class variables."""
        return {
            node.target.id: self.accepts(node.annotation)
            for node in declared.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not node.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(node.annotation)
        }

    def accepts(self, annotation: ast.expr) -> Accepts:
        """The values that ``annotation`` accepts."""
        match annotation:
            case ast.Constant(value=None):
                return Accepts(frozenset({"null"}))
            case ast.Constant(value=str(text)):
                return self.accepts(ast.parse(text, mode="eval").body)
            case ast.Name(id="list" | "List" | "Sequence"):
                return Accepts(items=(_ANYTHING,))
            case ast.Name(id="dict" | "Dict" | "Mapping"):
                return Accepts(frozenset({"dict"}))
            case ast.Name(id=("int" | "float" | "bool" | "str") as kind):
                return Accepts(frozenset({kind}))
            case ast.Name(id="Callable") | ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
                return _UNWRITABLE
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.accepts(left) | self.accepts(right)
            case ast.Subscript(value=generic, slice=inside):
                return self._generic(
                    ast.unparse(generic).rpartition(".")[2],
                    list(inside.elts) if isinstance(inside, ast.Tuple) else [inside],
                )
            case _:
                return _ANYTHING

    def _generic(self, name: str, items: list[ast.expr]) -> Accepts:
        if name == "Callable":
            return _UNWRITABLE
        if name in ("dict", "Dict", "Mapping"):
            return Accepts(frozenset({"dict"}))
        if name in ("list", "List", "Sequence"):
            return Accepts(items=(self.accepts(items[0]),))
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
        """The list in ``Arg(choices=[...])``. None if there is none, or if it is not constant."""
        for item in metadata:
            for keyword in item.keywords if isinstance(item, ast.Call) else ():
                if keyword.arg == "choices":
                    choices = self._constant(keyword.value)
                    if isinstance(choices, list | tuple | set):
                        return tuple(cast(Iterable[object], choices))
                    return None
        return None

    def _constant(self, value: ast.expr) -> object:
        match value:
            case ast.Name(id=name):
                return self._named(name)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = self._constant(left), self._constant(right)
                if isinstance(first, list) and isinstance(second, list):
                    return [*cast(list[object], first), *cast(list[object], second)]
                return None
            case _:
                pass
        try:
            return ast.literal_eval(value)
        except ValueError:
            return None

    def _named(self, name: str) -> object:
        """The constant ``name`` of this module, or of the module that it is imported from."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    return self._constant(value)
                case ast.ImportFrom(module=str(module), level=0, names=names):
                    if any((alias.asname or alias.name) == name for alias in names):
                        file = self.root.joinpath(*module.split(".")).with_suffix(".py")
                        return _module(file, self.root)._named(name) if file.is_file() else None
                case _:
                    pass
        return None


@cache
def _module(file: Path, root: Path) -> _Module:
    return _Module(file, root)
