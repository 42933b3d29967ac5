"""A share of the episode log that a page can hold: whole groups, spread over all steps."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from slipstream.rollout.ledger.episode_log.files import Row, episode_files, read_rows
from slipstream.rollout.ledger.episode_log.rows import TRAINED

LARGEST_TEXT = 20_000
"""Characters of a prompt or a response, and tokens of a response, that the page shows."""

_PLACE = re.compile(rb'\{"step":\s*(\d+),\s*"end":\s*"(\w+)",\s*"group":\s*(-?\d+)')

Group = tuple[int, str, int]
"""(step, end, group)"""


@dataclass(frozen=True)
class ChosenEpisodes:
    """Rows for a page, in the order of steps and groups."""

    rows: Sequence[Row]
    recorded: int
    """Number of rows in the log."""


def choose_episodes(run: Path, max_bytes: int) -> ChosenEpisodes:
    """Return whole groups of a run's episode log of ``max_bytes`` or less. Raises OSError.

    Every step gives one group before any gives a second one, and of its groups one of each end.
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
        if (row["step"], row["end"], row["group"]) in chosen
    ]
    rows.sort(key=lambda row: (row["step"], row["end"] != TRAINED, row["end"], row["group"], row["episode"]))
    return ChosenEpisodes(rows, recorded)


def _places(path: Path) -> Iterator[tuple[Group, int]]:
    """Yield the place and the bytes of each row."""
    if path.suffix == ".parquet":
        for row in read_rows(path):
            yield (row["step"], row["end"], row["group"]), len(str(row))
        return
    with path.open("rb") as file:
        for line in file:
            found = _PLACE.match(line)
            if found is not None and line.endswith(b"\n"):
                yield (int(found[1]), found[2].decode(), int(found[3])), len(line)


def _spread(sizes: dict[Group, int], max_bytes: int) -> set[Group]:
    """Return groups that fit: the first of each step, the newest step first, then the second of each."""
    by_end: dict[int, dict[str, list[Group]]] = {}
    for group in sizes:
        by_end.setdefault(group[0], {}).setdefault(group[1], []).append(group)
    by_step = {
        step: [group for turn in zip_longest(*ends.values()) for group in turn if group is not None]
        for step, ends in by_end.items()
    }
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


def _shortened(row: Row) -> Row:
    texts = {name: str(row.get(name, ""))[:LARGEST_TEXT] for name in ("prompt", "response")}
    tokens = row.get("tokens") or {}
    return {**row, **texts, "tokens": {name: column[:LARGEST_TEXT] for name, column in tokens.items()}}
