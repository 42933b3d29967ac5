"""Evidence of what a run does, read from its metrics, ledger and episode log. Changes nothing.

The ledger of a running run cannot be opened; its last metrics and its episode log say nearly the same.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from slipstream.backend.monitor.course import Course, read_course
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.slots import State
from slipstream.rollout.ledger.episode_log.files import episode_files, read_rows
from slipstream.rollout.ledger.episode_log.rows import TRAINED
from slipstream.rollout.ledger.storage.database import FAILURES, LEDGER, LedgerError, open_for_reading

MOST_ROWS = 20_000
"""Newest rows of the episode log that are read."""

ENDS = tuple(state.value for state in (State.TRAINED, State.FILTERED, State.EXPIRED, State.FAILED))
"""Ends of groups, as metrics and the ledger count them."""


@dataclass(frozen=True)
class Evidence:
    """The course of a run in numbers: its metrics, its groups and their ends."""

    steps: int
    """Number of training steps that have metrics."""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Values of each tag in the order of steps, where it has one. NaN: the value was not finite."""
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of groups of the whole run, by their end (``ENDS``)."""
    failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of failed groups, by reason; of a running run, those of its episode log."""
    logged_groups: int = 0
    """Number of trained groups in the episode log, and of different prompts among them."""
    prompts: int = 0

    def setting(self, path: str) -> Any:
        """Return a setting of the recipe, such as ``actor.optimizer.lr``; None: it has none."""
        value: object = self.recipe
        for name in path.split("."):
            value = cast("Mapping[str, object]", value).get(name) if isinstance(value, Mapping) else None
        return value


def read_evidence(run: Path) -> Evidence:
    """Return the evidence of a run that is running, has ended or was killed. Raises OSError."""
    course = read_course(run)
    rows = list(_newest_rows(run))
    groups, failures = _from_ledger(run / LEDGER)
    prompts = {row["group"]: row.get("prompt") for row in rows if row.get("end") == TRAINED}
    return Evidence(
        steps=len(course.steps),
        series=_series(course),
        recipe=course.recipe,
        groups=groups or _last_counts(course),
        failures=failures or _failures_of(rows),
        logged_groups=len(prompts),
        prompts=len(set(prompts.values())),
    )


def _series(course: Course) -> dict[str, Sequence[float]]:
    series: dict[str, list[float]] = {}
    for record in (*course.steps.values(), *course.evaluations.values()):
        for tag, value in record.items():
            if value is None or isinstance(value, int | float):
                series.setdefault(tag, []).append(math.nan if value is None else float(value))
    return dict(series)


def _last_counts(course: Course) -> dict[str, int]:
    last = next(reversed(course.steps.values()), {})
    counts = {end: last.get(f"rollout/groups_{end}") for end in ENDS}
    return {end: count for end, count in counts.items() if isinstance(count, int)}


def _newest_rows(run: Path) -> Iterator[Mapping[str, Any]]:
    left = MOST_ROWS
    for path in sorted(episode_files(run), key=lambda path: path.stat().st_mtime, reverse=True):
        for row in read_rows(path):
            yield row
            left -= 1
        if left <= 0:
            return


def _failures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the reasons of failed groups, each group once."""
    reasons = {
        row["group"]: row["reason"]
        for row in rows
        if row.get("end") == Loss.FAILED.value and row.get("reason")
    }
    return dict(Counter(map(str, reasons.values())))


def _from_ledger(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return groups by their end, and failed groups by reason; nothing if the ledger cannot be read now."""
    try:
        ledger = open_for_reading(path)
    except LedgerError:
        return {}, {}
    try:
        ends = ledger.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
        notes = ledger.execute(
            "SELECT note, count(*) FROM groups WHERE state = ? AND note IS NOT NULL GROUP BY note",
            (State.FAILED.value,),
        ).fetchall()
    except FAILURES:
        return {}, {}
    finally:
        ledger.close()
    return {end: count for end, count in ends if end in ENDS}, dict(notes)
