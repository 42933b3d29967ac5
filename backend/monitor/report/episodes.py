"""A share of the episode log that a page can hold: whole groups, spread over all steps."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slipstream.backend.monitor.episode_files import episode_files, read_rows

LARGEST_TEXT = 20_000
"""Characters of a prompt or a response, and tokens of a response, that the page shows."""

_PLACE = re.compile(rb'\{"step":\s*(\d+),\s*"group":\s*(-?\d+)')

Group = tuple[int, int]
"""(step, group)"""


@dataclass(frozen=True)
class ChosenEpisodes:
    """Rows for a page, in the order of steps and groups."""

    rows: Sequence[dict[str, Any]]
    recorded: int
    """Number of rows in the log."""


def choose_episodes(run: Path, max_bytes: int) -> ChosenEpisodes:
    """Return whole groups of a run's episode log of ``max_bytes`` or less. Raises OSError.

    Every step gives one group before any gives a second one.
    """
    sizes: dict[Group, int] = {}
    recorded = 0
    paths = episode_files(run)
    for path in paths:
        for place, size in _places(path):
            sizes[place] = sizes.get(place, 0) + size
            recorded += 1
    chosen = _spread(sizes, max_bytes)
    rows = [
        _shortened(row)
        for path in paths
        for row in read_rows(path)
        if (row.get("step"), row.get("group")) in chosen
    ]
    rows.sort(key=lambda row: (row["step"], row["group"], row.get("episode", 0)))
    return ChosenEpisodes(rows, recorded)


def _places(path: Path) -> Iterator[tuple[Group, int]]:
    """Yield the place and the bytes of each row."""
    if path.suffix == ".parquet":
        for row in read_rows(path):
            yield (row["step"], row["group"]), len(str(row))
        return
    with path.open("rb") as file:
        for line in file:
            found = _PLACE.match(line)
            if found is not None and line.endswith(b"\n"):
                yield (int(found[1]), int(found[2])), len(line)


def _spread(sizes: dict[Group, int], max_bytes: int) -> set[Group]:
    """Return groups that fit: the first of each step, the newest step first, then the second of each."""
    by_step: dict[int, list[Group]] = {}
    for group in sizes:
        by_step.setdefault(group[0], []).append(group)
    steps = _halving(sorted(by_step))
    chosen: set[Group] = set()
    left = max_bytes
    for round_ in zip_longest(*(by_step[step] for step in steps)):
        for group in round_:
            if group is not None and sizes[group] <= left:
                chosen.add(group)
                left -= sizes[group]
    return chosen


def _halving(steps: Sequence[int]) -> list[int]:
    """Return steps so that any beginning of the list is spread over all of them: last, first, middle, ..."""
    order: list[int] = [steps[-1], steps[0]] if steps else []
    parts = 2
    while len(set(order)) < len(steps):
        order += [steps[len(steps) * part // parts] for part in range(1, parts)]
        parts *= 2
    return list(dict.fromkeys(order))


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: str(row.get(name, ""))[:LARGEST_TEXT] for name in ("prompt", "response")}
    tokens = row.get("tokens") or {}
    return {**row, **texts, "tokens": {name: column[:LARGEST_TEXT] for name, column in tokens.items()}}
