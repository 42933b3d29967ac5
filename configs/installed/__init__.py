"""Settings that go through to Megatron-Core and SGLang, checked against the installed versions.

``actor.megatron``, and the ``args`` of engines and of their sampling, hold fields of other projects' classes.
The fields and their types are read from the installed source (``source``). What Slipstream says of each of
them stands in ``megatron_fields`` and ``sglang_fields``.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from slipstream.configs.installed.fields import FieldVerdict, Table
from slipstream.configs.installed.megatron_fields import MEGATRON_FIELDS
from slipstream.configs.installed.sglang_fields import FLAGS, JUDGE_FIELDS, SAMPLING_FIELDS, SGLANG_FIELDS
from slipstream.configs.installed.source import Fields, read_megatron, read_sampling, read_sglang
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import own_engines
from slipstream.configs.violations import Violation, join, nearest


@dataclass(frozen=True)
class Library:
    """A library whose fields a recipe may set."""

    section: str
    """The setting that holds the fields."""
    package: str
    distribution: str
    classes: str
    """The library's classes that declare the fields, in words."""
    table: Table
    """Slipstream's verdict on every field."""
    read: Callable[[Path], Fields]
    """Reads the fields in a source directory. Raises LookupError when they are not where expected."""
    untested: str | None = None
    """The setting that lists fields which a recipe sets although they are untested; None: there is none."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names of fields, by which users know them."""

    def verdict(self, name: str) -> FieldVerdict | None:
        """Return the verdict on a field, or on the one that ``name`` is another name of."""
        return self.table.get(self.aliases.get(name, name))

    def refusal(self, name: str, value: object, listed: Sequence[str] = ()) -> str | None:
        """Return why a recipe may not set a field to ``value``; None: it may, or the field is unknown.

        ``listed``: fields that the recipe sets although they are untested.
        """
        verdict = self.verdict(name)
        if verdict is None:
            return None
        if verdict.kind in ("owned", "refused"):
            return verdict.why
        if not verdict.permits(value):
            return f"expected {verdict.choices}: Slipstream has tried no other"
        if verdict.kind == "untested" and name not in listed:
            return self.untested_words(name, verdict.why)
        return None

    def untested_words(self, name: str, why: str) -> str:
        """Return the words about an untested field, and how it can be set nevertheless."""
        way = f"; leave it out, or list it: {self.untested}: [{name}]" if self.untested else ""
        return f"untested: {why}{way}"


MEGATRON = Library(
    section="actor.megatron",
    package="megatron.core",
    distribution="megatron-core",
    classes="TransformerConfig or OptimizerConfig",
    table=MEGATRON_FIELDS,
    read=read_megatron,
    untested="actor.untested",
)
SGLANG = Library(
    section="rollout.engine.args",
    package="sglang",
    distribution="sglang",
    classes="ServerArgs",
    table=SGLANG_FIELDS,
    read=read_sglang,
    untested="rollout.engine.untested",
    aliases=FLAGS,
)
JUDGES_SGLANG = replace(
    SGLANG, section="judge.endpoint.args", table=JUDGE_FIELDS, untested="judge.endpoint.untested"
)
SAMPLING = replace(
    SGLANG,
    section="rollout.sampling.args",
    classes="SamplingParams",
    table=SAMPLING_FIELDS,
    read=read_sampling,
    untested=None,
    aliases={},
)
EVAL_SAMPLING = replace(
    SAMPLING,
    section="eval.sampling.args",
    table={
        name: replace(verdict, why=verdict.why.replace("rollout.sampling", "eval.sampling"))
        for name, verdict in SAMPLING_FIELDS.items()
    },
)
LIBRARIES = (MEGATRON, SGLANG, SAMPLING)


@dataclass(frozen=True)
class _Given:
    """The fields of a library that a recipe sets, and those that it lists as untested."""

    library: Library
    fields: Mapping[str, object]
    untested: Sequence[str] = ()


def _given(config: RunConfig) -> Iterator[_Given]:
    actor, engine, judge = config.actor, config.rollout.engine, own_engines(config.judge)
    yield _Given(MEGATRON, actor.megatron, actor.untested)
    yield _Given(SGLANG, engine.args, engine.untested)
    if judge is not None:
        yield _Given(JUDGES_SGLANG, judge.args, judge.untested)
    yield _Given(SAMPLING, config.rollout.sampling.args)
    if config.eval is not None:
        yield _Given(EVAL_SAMPLING, config.eval.sampling.args or {})


def check_passthrough(config: RunConfig) -> Iterator[Violation]:
    """Check every setting that holds fields of another library."""
    for given in _given(config):
        if given.fields:
            yield from _check(given)
        yield from _check_untested(given)


def untested_fields(config: RunConfig) -> list[str]:
    """Return the paths of the fields that a recipe sets although they are untested."""
    return [
        join(given.library.section, name)
        for given in _given(config)
        for name in given.untested
        if name in given.fields
    ]


def untested_notes(config: RunConfig) -> list[str]:
    """Return what a user is told of fields that a recipe sets although they are untested; empty: none."""
    fields = untested_fields(config)
    return [f"untested with Slipstream, and set nevertheless: {', '.join(fields)}"] if fields else []


def passthrough_path(name: str) -> str | None:
    """The path at which a recipe sets the Megatron or SGLang field ``name``; None if it can set no such."""
    for library in LIBRARIES:
        if name in (_fields(library) or ()) and _may_be_set(library, name):
            return f"{library.section}.{name}"
    return None


def _may_be_set(library: Library, name: str) -> bool:
    verdict = library.table.get(name)
    return verdict is None or verdict.kind in ("allowed", "untested")


def _check(given: _Given) -> Iterator[Violation]:
    library = given.library
    fields = _fields(library)
    unchecked: list[str] = []
    for name, value in given.fields.items():
        path, verdict = join(library.section, name), library.verdict(name)
        refusal = library.refusal(name, value, given.untested)
        if refusal is not None and verdict is not None and verdict.kind in ("owned", "refused"):
            yield Violation(path, value, refusal)
        elif fields is None:
            unchecked.append(name)
        elif name not in fields:
            yield Violation(path, value, _unknown(library, name, fields))
        elif value not in fields[name]:
            near = fields[name].nearest(value)
            hint = f"; did you mean {near}?" if near else ""
            yield Violation(path, value, f"{_version(library)} expects {fields[name]}{hint}")
        elif refusal is not None:
            yield Violation(path, value, refusal)
        elif verdict is None and name not in given.untested:
            why = f"Slipstream does not know this field of {_version(library)}"
            yield Violation(path, value, library.untested_words(name, why))
    if unchecked:
        reason = f"{', '.join(unchecked)} cannot be checked: {_why_unread(library)}"
        yield Violation(library.section, dict(given.fields), reason)


def _check_untested(given: _Given) -> Iterator[Violation]:
    """Check what a recipe lists as untested: a field that it sets, and that may be set in this way."""
    library = given.library
    for name in given.untested:
        verdict = library.verdict(name)
        if name not in given.fields:
            reason = f"expected a field that {library.section} sets, which {name} is not; leave it out"
        elif verdict is None or verdict.kind == "untested":
            continue
        elif verdict.kind == "allowed":
            reason = f"{name} is tested, and needs no entry here; leave it out"
        else:
            reason = f"{name} cannot be set, tested or not: {verdict.why}"
        yield Violation(str(library.untested), name, reason)


def _unknown(library: Library, name: str, fields: Fields) -> str:
    reason = f"{_version(library)} has no such field in {library.classes}"
    listed = library.verdict(name)
    if name in library.aliases:
        return f"{reason}; did you mean {library.section}.{library.aliases[name]}?"
    if listed is not None and listed.version is not None:
        return f"{reason}: {library.distribution} {listed.version} has it"
    elsewhere = passthrough_path(name)
    near = nearest(name, [*fields, *library.aliases])
    meant = library.verdict(near) if near is not None else None
    if elsewhere:
        return f"{reason}; did you mean {elsewhere}?"
    if near is not None and meant is not None and meant.kind in ("owned", "refused"):
        return f"{reason}; if {near} is meant: {meant.why}"
    return f"{reason}; did you mean {near}?" if near else reason


def _why_unread(library: Library) -> str:
    if package_folder(library.package) is None:
        return f"{library.distribution} is not installed"
    return f"{_version(library)} does not declare {library.classes} where Slipstream looks for it"


def _version(library: Library) -> str:
    try:
        return f"{library.distribution} {importlib.metadata.version(library.distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return library.distribution


def package_folder(name: str) -> Path | None:
    """Find the directory of a package without importing anything.

    Only the first part of a dotted name is looked up, and the rest is a path inside it: looking up
    ``megatron.core`` would import ``megatron``, a namespace package that may have several directories.
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
    """The fields of a library; None if it is not installed, or its source is not laid out as expected."""
    folder = package_folder(library.package)
    return None if folder is None else _read(library.read, folder)


@cache
def _read(read: Callable[[Path], Fields], folder: Path) -> Fields | None:
    try:
        return read(folder)
    except (LookupError, OSError, SyntaxError, ValueError):
        return None
