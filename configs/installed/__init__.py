"""Settings that go through to Megatron-Core and SGLang, checked against the installed versions.

``actor.megatron``, and the ``args`` of engines and of their sampling, hold fields of other projects' classes.
The fields are read from the installed source (``source``). Fields that Slipstream sets itself are refused
(``owned``).
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from slipstream.configs.installed.owned import JUDGE_OWNED, MEGATRON_OWNED, SAMPLING_OWNED, SGLANG_OWNED
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
    owned: Mapping[str, str]
    """Fields that Slipstream sets, with the settings to use instead."""
    read: Callable[[Path], Fields]
    """Reads the fields in a source directory. Raises LookupError when they are not where expected."""


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
JUDGES_SGLANG = replace(SGLANG, section="judge.endpoint.args", owned=JUDGE_OWNED)
SAMPLING = replace(
    SGLANG,
    section="rollout.sampling.args",
    classes="SamplingParams",
    owned=SAMPLING_OWNED,
    read=read_sampling,
)
EVAL_SAMPLING = replace(
    SAMPLING,
    section="eval.sampling.args",
    owned={
        name: reason.replace("rollout.sampling", "eval.sampling") for name, reason in SAMPLING_OWNED.items()
    },
)
LIBRARIES = (MEGATRON, SGLANG, SAMPLING)


def check_passthrough(config: RunConfig) -> Iterator[Violation]:
    """Check every setting that holds fields of another library."""
    judge = own_engines(config.judge)
    for library, given in (
        (MEGATRON, config.actor.megatron),
        (SGLANG, config.rollout.engine.args),
        (JUDGES_SGLANG, judge.args if judge is not None else {}),
        (SAMPLING, config.rollout.sampling.args),
        (EVAL_SAMPLING, (config.eval.sampling.args or {}) if config.eval is not None else {}),
    ):
        if given:
            yield from _check(library, given)


def passthrough_path(name: str) -> str | None:
    """The path at which a recipe sets the Megatron or SGLang field ``name``; None if neither has it."""
    for library in LIBRARIES:
        if name in (_fields(library) or ()) and name not in library.owned:
            return f"{library.section}.{name}"
    return None


def _check(library: Library, given: Mapping[str, object]) -> Iterator[Violation]:
    fields = _fields(library)
    unchecked: list[str] = []
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
    if near is not None and near in library.owned:
        return f"{reason}; if {near} is meant: {library.owned[near]}"
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
