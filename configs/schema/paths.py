"""The schema as a list: the path of every setting, and the sections that a field may hold."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import get_args

from pydantic.fields import FieldInfo

from slipstream.configs.schema.base import OF_MODEL, Section
from slipstream.configs.schema.run import RunConfig


def sections_of(field: FieldInfo) -> Mapping[str, type[Section]]:
    """The sections that ``field`` may hold, by their ``type``, or by "" if there is only one."""
    sections = list(_sections_in(field.annotation))
    if len(sections) == 1:
        return {"": sections[0]}
    return {section.model_fields["type"].default: section for section in sections}


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def schema_fields(
    root: type[Section] = RunConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Section], FieldInfo]]:
    """Every field of the schema with its path and the section that declares it, in schema order."""
    for name, field in root.model_fields.items():
        yield (*path, name), root, field
        for section in sections_of(field).values():
            yield from schema_fields(section, (*path, name))


@cache
def schema_paths(root: type[Section] = RunConfig) -> tuple[str, ...]:
    """The dotted path of every setting and section of the schema, each section before its settings."""
    return tuple(dict.fromkeys(".".join(path) for path, _, _ in schema_fields(root)))


@cache
def model_settings() -> tuple[str, ...]:
    """The dotted path of every setting of a run that names a model or an adapter."""
    return tuple(dict.fromkeys(".".join(path) for path, _, field in schema_fields() if _names_model(field)))


def _names_model(field: FieldInfo) -> bool:
    parts = (getattr(part, "__metadata__", ()) for part in get_args(field.annotation))
    return OF_MODEL in field.metadata or any(OF_MODEL in part for part in parts)
