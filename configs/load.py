"""A recipe and its overrides become a ``RunConfig``, or one report of everything that is wrong.

    text -> plain data -> typed sections -> rules between settings, fields of Megatron and SGLang
            document.py   here              rules.py                installed.py

A mistake must not hide another one. So the schema is walked section by section, and a wrong value is replaced
by its default, or by a hole where it has none; checks that read such a value are skipped, all others run.
Each section is built by pydantic itself unless it has a hole: types and bounds are known to the schema only.
"""

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AliasChoices, BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from slipstream.configs.document import read_document
from slipstream.configs.installed import check_passthrough, passthrough_path
from slipstream.configs.rules import check_rules
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.actor import ParallelConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.supervised import AS_IN_SUPERVISED, Supervised, preferences_are_not_shared, run_of
from slipstream.configs.violations import ABSENT, RecipeError, Violation, join, nearest, one_of, shown

SAME_SECTION = 0.8
"""How alike a key and a name of its own section must be to be suggested before the same name elsewhere."""


def load_recipe(recipe: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``recipe`` (a file, or the bare name of a recipe in configs/recipes), then apply ``overrides``.

    An override is ``dotted.path=value`` with the value in YAML; later ones win.
    Raises ``RecipeError`` with every violation there is, and nothing else.
    """
    recipe = Path(recipe)
    document = read_document(recipe, overrides)
    violations = document.violations
    if document.data is not None:
        reading = _Reading(violations, document.overridden, document.unsure)
        config = reading.section(RunConfig, document.data, ())
        violations.extend(check_rules(config, reading.unsure))
        violations.extend(check_passthrough(config))
    if violations:
        raise RecipeError(violations, str(recipe))
    return config


def load_supervised(recipe: Path, overrides: Sequence[str] = ()) -> Supervised:
    """As ``load_recipe``, of ``slipstream sft``: a ``SupervisedConfig`` is read, and what comes out is a run
    whose trainer does it.
    """
    recipe = Path(recipe)
    document = read_document(recipe, overrides)
    violations, config = document.violations, None
    if document.data is not None:
        reading = _Reading(violations, document.overridden, document.unsure, SupervisedConfig)
        asked = reading.section(SupervisedConfig, document.data, ())
        as_run = _Reading([], set(), reading.unsure)
        config = as_run.section(RunConfig, run_of(document.data), ())
        found = [*check_rules(config, as_run.unsure), *check_passthrough(config)]
        violations.extend(violation.renamed(AS_IN_SUPERVISED) for violation in found)
        violations.extend(preferences_are_not_shared(asked))
    if config is None or violations:
        raise RecipeError(violations, str(recipe))
    return Supervised(config, asked.learn)


def load_layout(model: Path, parallel: Mapping[str, Any]) -> ParallelConfig:
    """``actor.parallel`` without the rest of a recipe, checked as one for the HF checkpoint at ``model``.

    Raises ``RecipeError`` with every violation. Whether ``model`` is a checkpoint is not said.
    """
    reading = _Reading([], set(), set())
    data = {"model": {"path": str(model)}, "actor": {"parallel": dict(parallel)}}
    config = reading.section(RunConfig, data, ())
    violations = [*reading.violations, *check_rules(config, reading.unsure)]
    if found := [violation for violation in violations if violation.path.startswith("actor.parallel.")]:
        raise RecipeError(found, "the layout")
    return config.actor.parallel


@dataclass(frozen=True)
class SectionType:
    """What a field that holds a section accepts: one section, or several told apart by the key ``tag``."""

    choices: Mapping[str, type[Section]]
    tag: str | None
    nullable: bool
    before: Callable[[Any], Any] | None
    """Turns the short form of the section (an import path, or a tag alone) into the full one."""


class _Reading:
    """One walk over the schema: builds sections, collects violations and the paths not to be relied on."""

    def __init__(
        self,
        violations: list[Violation],
        overridden: set[str],
        unsure: set[str],
        root: type[Section] = RunConfig,
    ) -> None:
        self.violations = violations
        self._root = root
        self.overridden = overridden
        self.unsure = unsure

    def section(self, model: type[Section], data: dict[str, Any], path: tuple[str, ...]) -> Any:
        values: dict[str, Any] = {}
        complete = True
        for name, field in model.model_fields.items():
            here = (*path, name)
            present = [key for key in _spellings(name, field) if key in data]
            if len(present) > 1:
                present = self._one_spelling(present, data, path)
            value = data[present[0]] if present else ABSENT
            if value is ABSENT:
                if field.is_required():
                    self._refuse(here, ABSENT, f"missing; expected {_expected(field)}")
            elif (kind := section_type(field)) is not None:
                value = self._subsection(kind, value, here, f"expected {_expected(field)}")
            else:
                value = self._leaf(model, name, value, here)
            if value is not ABSENT:
                values[name] = value
            elif field.is_required():
                complete = False
        known = {key for name, field in model.model_fields.items() for key in _spellings(name, field)}
        for key in data:
            if key not in known:
                self._unknown(model, key, data, path)
        if complete:
            try:
                return model.model_validate(values)
            except ValidationError as error:  # a validator of the section as a whole
                for item in error.errors(include_url=False):
                    own = item.get("ctx", {}).get("error", item["msg"])
                    self._refuse((*path, *map(str, item["loc"])), ABSENT, str(own))
        return _with_holes(model, values)

    def _one_spelling(self, present: list[str], data: dict[str, Any], path: tuple[str, ...]) -> list[str]:
        chosen = [key for key in present if join(*path, key) in self.overridden]
        if len(chosen) == 1:
            return chosen
        reason = f"also given as {one_of(present[1:])}; keep one of them"
        self._refuse((*path, present[0]), data[present[0]], reason)
        return present

    def _subsection(self, kind: SectionType, value: object, path: tuple[str, ...], expected: str) -> Any:
        if value is None and kind.nullable:
            return None
        full = kind.before(value) if kind.before else value
        if not isinstance(full, dict):
            return self._refuse(path, value, expected)
        if kind.tag is None:
            return self.section(kind.choices[""], full, path)
        tag = full.get(kind.tag, ABSENT)
        if isinstance(tag, str) and tag in kind.choices:
            return self.section(kind.choices[tag], full, path)
        word = "missing; expected" if tag is ABSENT else "expected"
        self._refuse((*path, kind.tag), tag, f"{word} {_named(list(kind.choices))}")
        self.unsure.add(join(*path))
        near = nearest(tag, list(kind.choices)) if isinstance(tag, str) else None
        if near is None:
            return ABSENT
        return self.section(kind.choices[near], {**full, kind.tag: near}, path)

    def _leaf(self, model: type[Section], name: str, value: object, path: tuple[str, ...]) -> Any:
        field = model.model_fields[name]
        expected = f"expected {_expected(field)}"
        if isinstance(value, float) and not math.isfinite(value):
            return self._refuse(path, value, expected)
        try:
            return _adapter(model, name).validate_python(value, strict=not _takes(field, Path))
        except ValidationError as error:
            own = error.errors(include_url=False)[0].get("ctx", {}).get("error")
            return self._refuse(path, value, str(own) if own is not None else expected)

    def _unknown(self, model: type[Section], key: str, data: dict[str, Any], path: tuple[str, ...]) -> None:
        """Name the setting that was meant: by spelling here, by name elsewhere, else list what goes here."""
        names, leaf = list(model.model_fields), key.rpartition(".")[2]
        near = nearest(key, names, SAME_SECTION)
        if join(*path, key) in schema_paths(self._root):
            hint = f"another type has it; the keys here are {_keys(model)}"
        elif near is None and (found := _elsewhere(leaf, self._root)):
            hint = f"did you mean {one_of(found)}?"
        elif near is None and (passed := passthrough_path(leaf)):
            hint = f"did you mean {passed}?"
        elif near := near or nearest(key, names):
            hint = f"did you mean {join(*path, near)}?"
            if near not in data:
                self.unsure.add(join(*path, near))
        else:
            hint = f"the keys here are {_keys(model)}"
        self.violations.append(Violation(join(*path, key), data[key], f"unknown key; {hint}"))

    def _refuse(self, path: tuple[str, ...], value: object, reason: str) -> Any:
        self.violations.append(Violation(join(*path), value, reason))
        self.unsure.add(join(*path))
        return ABSENT


def _spellings(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    others = [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else []
    return [name, *(other for other in others if other != name)]


def _unwrap(field: FieldInfo) -> tuple[Any, list[Any], bool]:
    """The type of a field without ``Annotated`` and ``| None``, its metadata, and whether null is allowed."""
    annotation, metadata, nullable = field.annotation, list(field.metadata), False
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *more = get_args(annotation)
            metadata.extend(more)
            continue
        if origin in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            nullable = nullable or len(members) < len(get_args(annotation))
            if len(members) == 1:
                annotation = members[0]
                continue
        return annotation, metadata, nullable


def section_type(field: FieldInfo) -> SectionType | None:
    """How ``field`` holds a section, or None when it holds a plain value."""
    annotation, metadata, nullable = _unwrap(field)
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    sections = [member for member in members if isinstance(member, type) and issubclass(member, Section)]
    if not sections:
        return None
    tags = [field.discriminator, *(getattr(item, "discriminator", None) for item in metadata)]
    tag = next((item for item in tags if isinstance(item, str)), None)
    before = next((item.func for item in metadata if isinstance(item, BeforeValidator)), None)
    if tag is None:
        return SectionType({"": sections[0]}, None, nullable, before)
    choices = {choice: model for model in sections for choice in get_args(model.model_fields[tag].annotation)}
    return SectionType(choices, tag, nullable, before)


@cache
def _adapter(model: type[Section], name: str) -> TypeAdapter[Any]:
    """Validates one value by the type and the bounds of one field, apart from the rest of its section."""
    field = model.model_fields[name]
    return TypeAdapter(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def _with_holes(model: type[Section], values: Mapping[str, Any]) -> Any:
    """A section of ``values`` and defaults, not validated.

    What is required and not there becomes None, or an empty section where a section is required, so that the
    checks can follow every path of the schema.
    """
    fields = model.model_fields.items()
    rest = {name: _stopgap(field) for name, field in fields if name not in values}
    return model.model_construct(**values, **rest)


def _stopgap(field: FieldInfo) -> Any:
    kind = section_type(field)
    if field.is_required():
        return _with_holes(next(iter(kind.choices.values())), {}) if kind else None
    value = field.get_default(call_default_factory=True)
    if kind and kind.before and isinstance(value, str):
        return kind.choices[""].model_validate(kind.before(value))
    return value


def _takes(field: FieldInfo, kind: type) -> bool:
    return _unwrap(field)[0] is kind


def _expected(field: FieldInfo) -> str:
    """What a field accepts, in words: 'a whole number of at least 1', 'true or false', 'a path or null'."""
    kind = section_type(field)
    annotation, metadata, nullable = _unwrap(field)
    if kind is not None:
        words = f"a mapping with {_keys(next(iter(kind.choices.values())))}"
        if kind.before:
            short = f"{_named(list(kind.choices))}, or" if kind.tag else "an import path or"
            words = f"{short} {words}"
    elif get_origin(annotation) is Literal:
        words = _named(get_args(annotation))
    elif get_origin(annotation) is list and get_origin(item := get_args(annotation)[0]) is Literal:
        words = f"a list of one or more of {', '.join(map(shown, get_args(item)))}"
    elif get_origin(annotation) is dict:
        words = "a mapping"
    else:
        words = _PLAIN.get(annotation, "another kind of value") + _bounds(metadata)
    return f"{words} or null" if nullable else words


_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    list[int]: "a list of whole numbers",
}


def _bounds(metadata: list[Any]) -> str:
    words = []
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=bound):
                words.append(f"of at least {bound}")
            case annotated_types.Gt(gt=bound):
                words.append(f"greater than {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"less than {bound}")
            case _ if getattr(item, "pattern", None):
                words.append(f"that matches {item.pattern}")
    return " " + " and ".join(words) if words else ""


def _named(choices: Sequence[object]) -> str:
    return one_of([shown(choice) for choice in choices])


def _keys(model: type[Section]) -> str:
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    others = [name for name in model.model_fields if name not in required]
    return ", ".join([*(f"{name} (required)" for name in required), *others])


@cache
def schema_paths(root: type[Section] = RunConfig) -> tuple[str, ...]:
    """The dotted path of every setting and section of the schema, outer ones first."""
    return tuple(dict.fromkeys(join(*path) for path, _, _ in schema_fields(root)))


def schema_fields(
    model: type[Section] = RunConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Section], FieldInfo]]:
    """Every field of the schema with its path and the section that declares it, in schema order."""
    for name, field in model.model_fields.items():
        yield (*path, name), model, field
        kind = section_type(field)
        for section in dict.fromkeys(kind.choices.values()) if kind else ():
            yield from schema_fields(section, (*path, name))


def _elsewhere(name: str, root: type[Section]) -> list[str]:
    """Paths outside the section at hand that end in ``name``; none when there are too many to be of help."""
    found = [path for path in schema_paths(root) if path.rpartition(".")[2] == name]
    return found if len(found) <= 4 else []
