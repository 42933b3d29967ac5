"""Every setting of a recipe, as `slipstream train --help` and `slipstream sft --help` print them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand

from slipstream.configs.schema import PluginConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.paths import schema_fields, sections_of
from slipstream.configs.violations import shown

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", object: "any"}
"""Types as people who write YAML call them."""


@dataclass(frozen=True)
class Setting:
    """A setting that a recipe may have, and each type of its section that has it."""

    path: str
    kind: str
    default: str
    meaning: str
    types: tuple[str, ...]
    """Empty: its section has one type alone."""


def settings(root: type[Section]) -> Iterator[Setting]:
    """Yield every setting in the order of the schema, each once for every meaning that it has.

    The ``type`` of a section comes once, with all types that there are.
    """
    found: dict[tuple[str, str], Setting] = {}
    for path, section, field in schema_fields(root):
        if section is PluginConfig or not set(sections_of(field).values()) <= {PluginConfig}:
            continue
        name, meaning = ".".join(path), field.description or ""
        type_ = section.model_fields.get("type")
        if field is type_:
            meaning = f"{field.default}: {' '.join((section.__doc__ or '').split())}"
            known = found.get((name, ""))
            if known is not None:
                kind, meaning = f"{known.kind} | {field.default}", f"{known.meaning} {meaning}"
                found[name, ""] = replace(known, kind=kind, meaning=meaning)
            else:
                found[name, ""] = Setting(name, str(field.default), _default(field), meaning, ())
            continue
        of_type = () if type_ is None else (str(type_.default),)
        known = found.get((name, meaning))
        types = of_type if known is None else (*known.types, *of_type)
        found[name, meaning] = Setting(name, _kind(field), _default(field), meaning, types)
    yield from found.values()


def _kind(field: FieldInfo) -> str:
    name, null, _ = _name(field.annotation).partition(" or null")
    bounds = ", ".join(f"{sign} {value:g}" for sign, value in _bounds(field))
    return f"{name} {bounds}".strip() + null


def _bounds(field: FieldInfo) -> Iterator[tuple[str, float]]:
    for part in field.metadata:
        for name, sign in _BOUNDS.items():
            if (value := getattr(part, name, None)) is not None:
                yield sign, value


def _name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(parts[0])
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _name(part) for part in parts)
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin is list:
        return f"list of {_name(parts[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, PluginConfig):
        return "import path, or {path, args}"
    return _KINDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    value = value.path if isinstance(value, PluginConfig) else value
    return str(value) if isinstance(value, str | Path) else shown(value)


def command_with_settings(root: type[Section]) -> type[TyperCommand]:
    """Return a kind of command whose help ends with every setting of ``root``."""

    class CommandWithSettings(TyperCommand):
        def format_help(self, ctx: typer.Context, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            print_settings(root, Console(highlight=False))

    return CommandWithSettings


def print_settings(root: type[Section], console: Console) -> None:
    """Print every setting by its path, as KEY=VALUE takes it, with its kind, its default and its meaning."""
    console.print(Text("\n Settings, each as KEY=VALUE or in the recipe\n", style="bold"))
    for setting in settings(root):
        head = Text.assemble(
            (setting.path, "cyan"), f"  {setting.kind}  ", (f"[{setting.default}]", "dim"), overflow="fold"
        )
        console.print(Padding(head, (0, 1), expand=False))
        types = f"{', '.join(setting.types)}: " if setting.types else ""
        console.print(Padding(Text(f"{types}{setting.meaning}"), (0, 1, 0, 7), expand=False))
