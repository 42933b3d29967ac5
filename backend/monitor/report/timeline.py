"""The trace of a run's last start as lanes of time: the trainer, publications and engines, and their bubbles.

All times are seconds since the first step began to wait for its batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from slipstream.backend.monitor.trace_log import TRACES
from slipstream.rollout.system.lines import read_lines

Event = Mapping[str, Any]

NEEDED = {
    "request": ("engine", "start_s", "end_s", "new_tokens"),
    "step": ("version", "end_s", "wait_s", "train_s", "step_s"),
    "publish": ("end_s", "stall_s", "total_s"),
}
"""Fields without which a line of the trace is skipped, by its kind."""

LONGEST_PAUSE_S = 15.0
"""Longest time between two steps of one life of a run. A restart takes longer."""

COLUMNS = 480
"""Columns of a lane of requests."""

MOST_STEPS = 1500
"""Latest steps that are shown."""

MOST_LANES = 16
"""Engines with a lane of their own; of more, all share one."""


def read_events(run: Path) -> dict[str, list[Event]]:
    """Return the events of a run by kind, in the order of their ends. Raises OSError."""
    events: dict[str, list[Event]] = {kind: [] for kind in NEEDED}
    for path in sorted(run.glob(TRACES)):
        for line in read_lines(path):
            kind = line.get("kind")
            if kind in NEEDED and all(line.get(name) is not None for name in NEEDED[kind]):
                events[kind].append(line)
    events["request"].sort(key=lambda event: event["end_s"])
    return events


def last_life(steps: Sequence[Event]) -> Sequence[Event]:
    """Return the steps since the run was last started."""
    first = 0
    for number, (before, step) in enumerate(pairwise(steps), start=1):
        if abs(step["end_s"] - step["step_s"] - before["end_s"]) > LONGEST_PAUSE_S:
            first = number
    return steps[first:]


@dataclass(frozen=True)
class Bubble:
    """Time in which one part of the run stood still, by its cause."""

    name: str
    seconds: float
    share: float
    """Of the time shown."""
    meaning: str


def timeline(events: Mapping[str, Sequence[Event]]) -> dict[str, object] | None:
    """Return lanes and bubbles of the last life as JSON has them; None: no step is finished."""
    steps = last_life(events["step"])[-MOST_STEPS:]
    if not steps:
        return None
    publications = events["publish"][len(events["publish"]) - len(steps) :]
    begin = steps[0]["end_s"] - steps[0]["step_s"]
    end = steps[-1]["end_s"]
    requests = [event for event in events["request"] if event["end_s"] > begin and event["start_s"] < end]
    names = sorted({str(event["engine"]) for event in requests})
    shown = names if len(names) <= MOST_LANES else [f"{len(names)} engines"]
    lanes = [
        [event for event in requests if len(names) > MOST_LANES or str(event["engine"]) == name]
        for name in shown
    ]
    return {
        "seconds": _short(end - begin),
        "steps": [_step(event, begin) for event in steps],
        "publications": [
            [
                _short(event["end_s"] - event["total_s"] - begin),
                _short(event["total_s"]),
                _short(event["stall_s"]),
            ]
            for event in publications
        ],
        "engines": shown,
        "windows": {
            str(window): _window(lanes, steps[-window:] if window else steps, begin)
            for window in (0, 50, 10)
            if window < len(steps)
        },
        "bubbles": [vars(bubble) for bubble in bubbles(steps, publications, requests, len(names))],
    }


def _step(event: Event, begin: float) -> list[float]:
    """Return [version, beginning, seconds of waiting, of training, of the whole step]."""
    start = event["end_s"] - event["step_s"] - begin
    return [event["version"], *map(_short, (start, event["wait_s"], event["train_s"], event["step_s"]))]


def _window(lanes: Sequence[Sequence[Event]], steps: Sequence[Event], begin: float) -> dict[str, object]:
    """Return how many requests each engine serves on average in each column from the first step on."""
    first, last = steps[0]["end_s"] - steps[0]["step_s"], steps[-1]["end_s"]
    return {
        "from": _short(first - begin),
        "to": _short(last - begin),
        "running": [[round(value, 2) for value in running(lane, first, last).tolist()] for lane in lanes],
    }


def running(requests: Sequence[Event], begin: float, end: float, columns: int = COLUMNS) -> np.ndarray:
    """Return the mean number of requests under way in each of equal parts of a time, float64 [columns]."""
    width = max(end - begin, 1e-9) / columns
    edges = begin + width * np.arange(columns + 1)
    times = [np.array([event[name] for event in requests], np.float64) for name in ("start_s", "end_s")]
    covered = np.zeros(columns + 1)
    for sign, time in zip((1, -1), times, strict=True):
        # Seconds up to each edge that have passed since every start, less those since every end.
        ordered = np.sort(time)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        before = np.searchsorted(ordered, edges)
        covered += sign * (edges * before - sums[before])
    return np.maximum(np.diff(covered), 0) / width


def bubbles(
    steps: Sequence[Event], publications: Sequence[Event], requests: Sequence[Event], engines: int
) -> list[Bubble]:
    """Return where time was lost, the largest first."""
    begin, end = steps[0]["end_s"] - steps[0]["step_s"], steps[-1]["end_s"]
    total = max(end - begin, 1e-9)
    wait = sum(step["wait_s"] for step in steps)
    publish = sum(event["total_s"] for event in publications)
    between = total - sum(step["step_s"] for step in steps)
    stall = sum(event["stall_s"] for event in publications)
    found = [
        ("Trainer waits for a batch", wait, "Generation is slower than training: more engines help."),
        ("Trainer publishes weights", publish, "Nothing is trained while a version is sent to the engines."),
        ("Engines pause for weights", stall, "Generation stands still while new weights are loaded."),
        ("Trainer between steps", max(between, 0.0), "Checkpoints' copies, evaluations and hooks."),
    ]
    if engines:
        idle = _idle(requests, begin, end, engines)
        found.append(("Engine without a request", idle, "Mean over engines: more groups in flight help."))
    return sorted(
        (
            Bubble(name, _short(seconds), round(seconds / total, 4), meaning)
            for name, seconds, meaning in found
        ),
        key=lambda bubble: -bubble.seconds,
    )


def _idle(requests: Sequence[Event], begin: float, end: float, engines: int) -> float:
    """Return the seconds for which an engine served no request, in the mean over engines."""
    busy = 0.0
    by_engine: dict[str, list[tuple[float, float]]] = {}
    for event in requests:
        span = max(event["start_s"], begin), min(event["end_s"], end)
        by_engine.setdefault(str(event["engine"]), []).append(span)
    for spans in by_engine.values():
        reached = begin
        for start, stop in sorted(spans):
            busy += max(0.0, stop - max(start, reached))
            reached = max(reached, stop)
    return max(0.0, end - begin - busy / engines)


def _short(value: object) -> float:
    return round(float(cast(float, value)), 3)
