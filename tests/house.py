"""The house: which rooms each package has, and on which floor each of them lies.

A room is a folder of a package, or a file that lies directly in it. The ground floor comes first; a room
imports rooms of lower floors only. ``tests/unit/test_import_graph.py`` holds the code against this drawing,
and ``python -m tests.house`` writes it into ``docs/architecture.md``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms, by tests/house.py -->\n", "<!-- end of rooms -->\n"


@dataclass(frozen=True)
class Bounds:
    """The largest house that a reader can hold: more rooms, floors or arrows fail a test."""

    rooms: int
    floors: int
    arrows: int
    """Pairs of rooms of which the first imports the second."""


FLOORS: dict[str, tuple[set[str], ...]] = {
    "backend": (
        {"batch", "checkpoint", "memory", "objective"},
        {"megatron", "monitor"},
        {"trainer"},
        {"cluster"},
        {"driver", "quickstart"},
        {"simulate"},
        {"commands"},
        {"api", "cli"},
    ),
    "backend/driver": (
        {"ports", "start"},
        {"processes"},
        {"weights"},
        {"loops"},
        {"assemble"},
        {"modes", "run"},
    ),
    "bridge": ({"hf"}, {"model"}, {"families", "shards"}, {"publish", "group"}, {"engine"}, {"transport"}),
    "rollout": (
        {"system"},
        {"sandbox", "tokens"},
        {"control"},
        {"engine", "ledger", "prompts"},
        {"reward"},
        {"live", "workflow"},
        {"compat", "gateway"},
        {"collection"},
    ),
    "rollout/ledger": (
        {"episode_log", "lineage", "storage"},
        {"lease", "rows"},
        {"reading"},
        {"audit", "writing"},
        {"recovery"},
    ),
}
"""By package, or folder of a package: its rooms."""

BOUNDS = {
    "backend": Bounds(rooms=14, floors=8, arrows=40),
    "backend/driver": Bounds(rooms=9, floors=6, arrows=25),
    "rollout": Bounds(rooms=13, floors=8, arrows=50),
    "rollout/ledger": Bounds(rooms=10, floors=6, arrows=30),
}


def drawing() -> str:
    """Return the floors as text, the top floor of each package first."""
    lines = []
    for package, floors in FLOORS.items():
        way = " ► ".join(", ".join(sorted(rooms)) for rooms in reversed(floors))
        lines += [f"{package}", f"    {way}"]
    lines += ["packages", "    backend ► rollout ► configs, backend ► bridge ► configs"]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def drawn(page: str) -> str:
    """Return a page with the drawing between its two marks. Raises ValueError where it has none."""
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:start] + drawing() + page[end:]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(drawing())
