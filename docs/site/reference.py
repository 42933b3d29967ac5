"""The pages of the site that are in no file: every setting and every metric, as the commands explain them.

Other pages write the name of a setting or metric as code, or the command that explains it, such as
``slipstream settings judge``. The site links both to these pages; a browser of the repository shows code.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from slipstream.backend.commands.reference import Chapter, Explanation, metric_chapters, setting_chapters
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.supervised import SupervisedConfig

SETTINGS, METRICS = "settings.md", "metrics_reference.md"

_SETTINGS = """# Settings

Every setting of a recipe by its section, as `slipstream settings [NAME]` prints it.
[Recipes](recipes.md) shows how to write settings in a recipe and on the command line. A setting of the type
*import path* names code, yours or Slipstream's ([plugins](recipes.md#plugins)).

A section that has a `type` must name it wherever a recipe has the section. The meaning of a setting begins
with the types that accept it, unless all types do.
"""
_SFT = """## Settings of slipstream sft

`slipstream settings --sft` prints the settings of [supervised training](recipes.md#supervised-training).
"""
_METRICS = """# Metrics reference

Every metric by its group, as `slipstream metrics [NAME]` prints it. [Metrics](metrics.md) says where they are
written, what to look at first, and how to read the values of a record. *In the batch* means over the
trajectories that the training step trains on, and *token mean* the mean over its tokens that carry loss. The
[glossary](glossary.md) has the other terms.
"""

CODE = re.compile(r"(`[^`]*`)")
PAGE = re.compile(r"\bdocs/(\w+)\.md((?:#[\w-]+)?)")
URL = re.compile(r"https://[\w./-]+\w")


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its path in the site."""
    run = setting_chapters(RunConfig)
    settings = [_written(chapter, "setting", "type", "default", "meaning") for chapter in run]
    metrics = [_written(chapter, "tag", "unit", "meaning") for chapter in metric_chapters()]
    return {
        SETTINGS: "\n".join([_SETTINGS, *settings, _SFT, *_supervised(run)]),
        METRICS: "\n".join([_METRICS, *metrics]),
    }


@cache
def place(code: str) -> str | None:
    """Return the place in the site for ``code``: a setting, a metric, or a command that explains one."""
    command = re.fullmatch(r"slipstream (settings|metrics)(?: ([\w./]+))?", code)
    name = command[2] if command else re.split("[:=(]", code)[0]
    if command and name is None:
        return SETTINGS if command[1] == "settings" else METRICS
    if not command and not re.search(r"\w[./]\w", name):
        return None  # a word such as `data` may mean anything
    return _places().get(name)


@cache
def _places() -> dict[str, str]:
    found: dict[str, str] = {}
    for page, prefix, chapters in (
        (METRICS, "", metric_chapters()),
        (SETTINGS, "", setting_chapters(RunConfig)),
        (SETTINGS, "sft:", setting_chapters(SupervisedConfig)),
    ):
        for chapter in chapters:
            for entry in chapter.entries:
                found.setdefault(entry.name, f"{page}#{prefix}{entry.name}")
            found.setdefault(chapter.name, f"{page}#{chapter.name.replace('.', '')}")
    return found


def _supervised(run: list[Chapter]) -> Iterator[str]:
    """Yield what differs from the chapters of ``run``, and what is the same by name."""
    known = {chapter.name: chapter for chapter in run}
    same: list[str] = []
    for chapter in setting_chapters(SupervisedConfig):
        above = known.get(chapter.name, Chapter(chapter.name, "", ()))
        others = tuple(entry for entry in chapter.entries if entry not in above.entries)
        if not others and len(chapter.entries) == len(above.entries):
            same.append(chapter.name)
            continue
        same += [entry.name for entry in chapter.entries if entry in above.entries]
        if others:
            part = Chapter(f"sft: {chapter.name}", chapter.text, others)
            yield _written(part, "setting", "type", "default", "meaning", level=3, prefix="sft:")
    yield f"These sections and settings are the same as above: {', '.join(f'`{name}`' for name in same)}.\n"


def _written(chapter: Chapter, *columns: str, level: int = 0, prefix: str = "") -> str:
    level = level or 2 + ("." in chapter.name)
    parts = [f"{'#' * level} {chapter.name}", *map(_paragraph, chapter.text.split("\n\n"))]
    if chapter.entries:
        rows = [columns, ["---"] * len(columns), *(_cells(entry, prefix) for entry in chapter.entries)]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(filter(None, parts)) + "\n"


def _cells(entry: Explanation, prefix: str) -> Iterable[str]:
    first, *rest = entry.facts
    default = [each if each == "required" else f"`{each}`" for each in rest]
    anchor = f"{prefix}{entry.name}"
    name = f'<a id="{anchor}"></a>[`{entry.name}`](#{anchor})'
    return [cell.replace("|", r"\|") for cell in (name, first, *default, _paragraph(entry.meaning))]


def _paragraph(text: str) -> str:
    """Turn the names of pages and addresses into links."""
    if text.startswith("```"):
        return text
    return "".join(part if part.startswith("`") else _with_links(part) for part in CODE.split(text))


def _with_links(text: str) -> str:
    return URL.sub(r"<\g<0>>", PAGE.sub(_link, text))


def _link(page: re.Match[str]) -> str:
    return f"[{page[1].replace('_', ' ')}]({page[1]}.md{page[2]})"
