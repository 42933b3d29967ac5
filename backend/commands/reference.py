"""The reference of settings and metrics: every one with its type or unit, its default and its meaning.

`slipstream settings`, `slipstream metrics`, `--help` and two pages of the site print the same chapters. Their
texts stand once: on the fields and sections of ``configs/schema``, and in ``backend/monitor/tags.py``.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.monitor.tags import GROUPS, TAGS
from slipstream.configs.explain import OTHER_NAMES
from slipstream.configs.schema import PluginConfig, RunConfig
from slipstream.configs.schema.base import Section
from slipstream.configs.schema.paths import schema_fields, sections_of
from slipstream.configs.schema.supervised import SupervisedConfig
from slipstream.configs.violations import nearest, one_of, shown

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", object: "any"}
"""Types as people who write YAML call them."""


@dataclass(frozen=True)
class Explanation:
    """A setting or a metric."""

    name: str
    facts: tuple[str, ...]
    """Type and default of a setting, or unit of a metric."""
    meaning: str


@dataclass(frozen=True)
class Chapter:
    """A section of a recipe, or a group of metrics."""

    name: str
    text: str
    """Paragraphs of Markdown."""
    entries: tuple[Explanation, ...]


def metric_chapters() -> list[Chapter]:
    """Return every group of metrics, with each metric by its tag."""
    return [
        Chapter(
            group,
            text,
            tuple(
                Explanation(name, (tag.unit,), tag.meaning)
                for name, tag in TAGS.items()
                if name.partition("/")[0] == group
            ),
        )
        for group, text in GROUPS.items()
    ]


@dataclass
class _Draft:
    """The schema of one section, over all types that the section may have."""

    about: FieldInfo | None = None
    """Its own field."""
    sections: Mapping[str, type[Section]] = field(default_factory=dict)
    owners: list[str] = field(default_factory=list)
    """Types of the section around it that have it."""
    kinds: dict[tuple[str, str], dict[str, tuple[str, str]]] = field(default_factory=dict)
    """By name and meaning of a setting: its kind and its default in each type of the section."""


def setting_chapters(root: type[Section]) -> list[Chapter]:
    """Return every section of a recipe in the order of the schema, each setting once for each meaning."""
    drafts: dict[str, _Draft] = {}
    for path, section, about in schema_fields(root):
        if section is PluginConfig:
            continue
        name, around = ".".join(path), ".".join(path[:-1])
        type_ = _type_of(section)
        inner = sections_of(about)
        if set(inner.values()) <= {PluginConfig}:
            draft = drafts.setdefault(around or name, _Draft(about))
            if path[-1] != "type":
                meanings = draft.kinds.setdefault((name, " ".join((about.description or "").split())), {})
                meanings[type_] = (_kind(about), _default(about))
            continue
        draft = drafts.setdefault(name, _Draft())
        draft.about, draft.sections = about, inner
        draft.owners.append(type_)
        if "" not in inner:
            drafts[name].kinds[f"{name}.type", _types(inner)] = {}
    return [_chapter(name, draft, drafts) for name, draft in drafts.items()]


def _chapter(name: str, draft: _Draft, drafts: Mapping[str, _Draft]) -> Chapter:
    around = name.rpartition(".")[0]
    paragraphs = []
    if about := draft.sections.get(""):
        paragraphs += _paragraphs(about.__doc__ or "")
    if draft.about is not None and draft.sections and draft.about.description:
        paragraphs.append(draft.about.description)
    if around and set(draft.owners) != set(drafts[around].sections):
        paragraphs.append(f"Only with `{around}.type: {' | '.join(draft.owners)}`.")
    return Chapter(name, "\n\n".join(paragraphs), tuple(_entries(draft)))


def _paragraphs(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring, each on one line but those of code."""
    parts = inspect.cleandoc(docstring).split("\n\n")
    return [part if part.startswith("```") else " ".join(part.replace("``", "`").split()) for part in parts]


def _entries(draft: _Draft) -> Iterator[Explanation]:
    for (name, meaning), by_type in draft.kinds.items():
        if not by_type:
            yield Explanation(name, (_choices(draft.sections), _default_type(draft.about)), meaning)
            continue
        (kind, default), *_ = by_type.values()
        others = {type_: other for type_, (_, other) in by_type.items() if other != default}
        exceptions = [f" Default in `{type_}`: `{other}`." for type_, other in others.items()]
        is_common = set(by_type) >= set(draft.sections)
        types = "" if is_common else f"{', '.join(f'`{each}`' for each in by_type)}: "
        yield Explanation(name, (kind, default), f"{types}{meaning}{''.join(exceptions)}")


def _type_of(section: type[Section]) -> str:
    type_ = section.model_fields.get("type")
    return "" if type_ is None else str(type_.default)


def _types(sections: Mapping[str, type[Section]]) -> str:
    return " ".join(f"`{name}`: {' '.join((each.__doc__ or '').split())}" for name, each in sections.items())


def _choices(names: Iterable[object]) -> str:
    return one_of(f"`{name}`" for name in names)


def _default_type(about: FieldInfo | None) -> str:
    default = None if about is None or about.is_required() else about.get_default(call_default_factory=True)
    return _type_of(type(default)) if isinstance(default, Section) else "required"


def _kind(about: FieldInfo) -> str:
    name, null, _ = _name(about.annotation).partition(" or null")
    bounds = ", ".join(f"{sign} {value:g}" for sign, value in _bounds(about))
    return f"{name} {bounds}".strip() + null


def _bounds(about: FieldInfo) -> Iterator[tuple[str, float]]:
    for part in about.metadata:
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
        return _choices(parts)
    if origin is list:
        return f"list of {_name(parts[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, PluginConfig):
        return "import path, or {path, args}"
    return _KINDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(about: FieldInfo) -> str:
    if about.is_required():
        return "required"
    value = about.get_default(call_default_factory=True)
    value = value.path if isinstance(value, PluginConfig) else value
    return str(value) if isinstance(value, str | Path) else shown(value)


def selected(chapters: Sequence[Chapter], names: Sequence[str]) -> list[Chapter]:
    """Return the chapters, or parts of them, that ``names`` name; all of them without a name.

    The name of a section stands for all that is below it, and any other word for everything in whose name or
    meaning it occurs. Another system's name of a setting stands for the setting.

    Raises:
        WrongInput: a word occurs nowhere.
    """
    if not names:
        return list(chapters)
    entries = [entry for chapter in chapters for entry in chapter.entries]
    known = {each.name for each in chapters} | {entry.name for entry in entries}
    wanted = {name for name in names if name in known}
    for word in set(names) - known:
        found = {entry.name for entry in entries if word.lower() in f"{entry.name} {entry.meaning}".lower()}
        found |= known & {OTHER_NAMES.get(word.lower().replace("-", "_"), "")}
        if not found or not word.isidentifier():
            near = nearest(word, sorted(known))
            hint = f"did you mean {near}?" if near else "without a word, everything is printed"
            raise WrongInput(f"{word} is unknown; {hint}")
        wanted |= found
    parts = (_part(chapter, wanted) for chapter in chapters)
    return [part for part in parts if part is not None]


def _part(chapter: Chapter, names: Collection[str]) -> Chapter | None:
    if any(f"{chapter.name}.".startswith(f"{name}.") for name in names):
        return chapter
    entries = tuple(entry for entry in chapter.entries if entry.name in names)
    return replace(chapter, text="", entries=entries) if entries else None


def print_chapters(chapters: Iterable[Chapter], console: Console) -> None:
    """Print each entry by its name, with its facts and its meaning; the default or unit is in brackets."""
    for chapter in chapters:
        if chapter.text:
            console.print(Text(f"\n {chapter.name}", style="bold"))
            console.print(Padding(Text(f"{chapter.text}\n"), (0, 1, 0, 3), expand=False))
        for entry in chapter.entries:
            *kind, last = entry.facts
            head = Text.assemble(
                (entry.name, "cyan"), f"  {''.join(f'{each}  ' for each in kind)}", (f"[{last}]", "dim")
            )
            head.overflow = "fold"
            console.print(Padding(head, (0, 1), expand=False))
            console.print(Padding(Text(entry.meaning), (0, 1, 0, 7), expand=False))


COMMON = (
    "run.name",
    "run.steps",
    "model.path",
    "data.path",
    "eval.path",
    "eval.every",
    "batch_size",
    "actor.optimizer.lr",
    "actor.microbatch_tokens",
    "actor.parallel.tensor",
    "actor.parallel.data",
    "actor.use_decoupled_loss",
    "rollout.max_head_offpolicyness",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.max_concurrent",
    "rollout.sampling.max_new_tokens",
    "rollout.reward",
    "rollout.workflow",
    "rollout.engine.count",
    "checkpoint.every",
    "cluster.type",
)
"""The settings that most people change. Those that a kind of run has are in the help of its command."""


_ALONE = re.compile(r"[a-z_]\w*(\.\w+)*=.*|.*\.ya?ml", re.DOTALL)
"""A setting or a recipe, which no option names."""

MOST_MEANT = 4
"""Settings that are named for an option that does not exist."""


def command_with_settings(root: type[Section]) -> type[TyperCommand]:
    """Return a kind of command whose help ends with the settings of ``root`` that most people change."""

    class CommandWithSettings(TyperCommand):
        def format_help(self, ctx: typer.Context, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            entries = {entry.name: entry for each in setting_chapters(root) for entry in each.entries}
            console = Console(highlight=False)
            console.print(Text("\n Settings, each as KEY=VALUE or in the recipe", style="bold"))
            print_in_lines([entries[name] for name in COMMON if name in entries], console)
            command = "settings [WORD]" if root is RunConfig else "settings --sft [WORD]"
            console.print(Text(f"\n All {len(entries)}, or those about a word: slipstream {command}\n"))

    return CommandWithSettings


class Commands(TyperGroup):
    """The command line. It says how settings are written that somebody writes as options.

    A switch has no value, so that its help names none.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0].endswith((".yaml", ".yml")):
            ctx.fail(f"expected a command before the recipe, such as train {args[0]}")
        name, command, rest = super().resolve_command(ctx, args)
        parameters = [] if command is None else command.params
        if command is not None:
            _without_values(command.get_params(ctx))
        if any(each.name == "overrides" for each in parameters):
            _refuse_options(rest, parameters)
        return name, command, rest


def _refuse_options(args: Sequence[str], parameters: Sequence[Any]) -> None:
    """Raise BadParameter for settings, or a recipe, that are written as options."""
    flags = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
    valued = {opt for each in parameters if not getattr(each, "is_flag", False) for opt in each.opts}
    for before, arg, after in zip(["", *args], args, [*args[1:], ""], strict=False):
        option, equals, value = arg.partition("=")
        if not option.startswith("-") or option in {*flags, "--", "--help", "-h"} or before in valued:
            continue
        if meant := _meant(option):
            as_written = one_of(f"{setting}={value if equals else '...'}" for setting in meant)
            raise typer.BadParameter(f"{arg}: settings are written without dashes: {as_written}")
        is_name = option.startswith("--") or len(option) == 2
        if is_name and _ALONE.fullmatch(value or after):
            raise typer.BadParameter(f"{option}: leave it out, and write {value or after} alone")
        if "--sbatch" in flags and not get_close_matches(option, flags, cutoff=0.8):
            raise typer.BadParameter(
                f"{arg}: submit has no such option; it takes nodes by --nodes, a time limit by --time, and "
                "others of sbatch in one word after --sbatch=, as --sbatch=-pgpu or --sbatch=--exclude=n1"
            )


def _without_values(parameters: list[Any]) -> list[Any]:
    """Return parameters of which those that are switches have no kind of value in their help."""
    for each in parameters:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return parameters


def _meant(option: str) -> list[str]:
    """Return the settings that an option may stand for: those whose name ends as it does."""
    name = option.lstrip("-").replace("-", "_")
    chapters = [*setting_chapters(RunConfig), *setting_chapters(SupervisedConfig)]
    known = dict.fromkeys(entry.name for chapter in chapters for entry in chapter.entries)
    meant = [each for each in known if name and f".{each}".endswith(f".{name}")]
    ours = OTHER_NAMES.get(name, "")
    return (meant or [ours] * bool(ours))[:MOST_MEANT]


def print_in_lines(entries: Sequence[Explanation], console: Console) -> None:
    """Print each entry on one line, with the beginning of its meaning."""
    width = max(len(entry.name) for entry in entries)
    for entry in entries:
        default = entry.facts[-1]
        short = default.rpartition(".")[2] if default[:1].isalpha() else default  # a class by its own name
        line = Text.assemble(
            "  ", (f"{entry.name:{width}}", "cyan"), (f"  {short:10}  ", "dim"), entry.meaning
        )
        line.truncate(console.width - 1, overflow="ellipsis")
        console.print(line, no_wrap=True)
