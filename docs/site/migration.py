"""Pages of tables for rollout/compat/imports/*.yaml, the settings of other systems and ours.

``migration.md`` links to these files. On the site the links lead to pages that the search finds.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

MAPPINGS = Path(__file__).parents[2] / "rollout/compat/imports"
NAMES = {"areal": "AReaL", "verl": "verl", "prime-rl": "prime-rl"}


@event_priority(-50)  # after hooks.py, which reads the files of all pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each mapping."""
    for path in sorted(MAPPINGS.glob("*.yaml")):
        content = _page(NAMES[path.stem], yaml.safe_load(path.read_text(encoding="utf-8")))
        place = f"migration/{path.stem}.md"
        files.append(File.generated(config, place, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


@event_priority(50)  # before hooks.py, which looks for the targets of links
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links to mappings at their pages."""
    return re.sub(r"\]\(\.\./rollout/compat/imports/([\w-]+)\.yaml\)", r"](migration/\1.md)", markdown)


def _page(name: str, mapping: dict[str, list[dict[str, Any]]]) -> str:
    to_set = [(_code(row["keys"]), _code(row["here"], ", "), row.get("remark", "")) for row in mapping["set"]]
    nothing = [(_code(row["keys"], ", "), row["why"]) for row in mapping["nothing"]]
    without = [(_code(row["keys"]), row["why"], row.get("nearest", "—")) for row in mapping["without"]]
    return "\n\n".join(
        [
            f"# {name}'s settings",
            "Second column: a setting, or a piece of a recipe with example values. `*` stands for any name. "
            "[Migration](../migration.md) says what is different in kind.",
            _table([name, "Slipstream", "remark"], to_set),
            "## Nothing to set",
            _table([name, "why"], nothing),
            "## Without a counterpart",
            _table([name, "reason", "nearest"], without),
        ]
    )


def _code(names: list[str], between: str = "<br>") -> str:
    return between.join(f"`{name}`" for name in names)


def _table(head: list[str], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
