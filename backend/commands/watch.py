"""``slipstream watch RUN``: where a run stands, from its files alone. The run does not know of it."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.backend.commands.outcome import WrongInput, no_run
from slipstream.backend.monitor.course import Course, Record, read_course
from slipstream.backend.monitor.metrics import METRICS_FILE
from slipstream.backend.monitor.progress import ETA_STEPS
from slipstream.backend.monitor.summary import read_end
from slipstream.backend.monitor.units import clock_face, count, reward

EVERY_S = 2.0
"""Seconds between two looks at the files."""

ROWS = 12
"""Latest steps in the table."""

LATE = 3
"""A step is late when it takes more than this many times its usual time."""

BARS = " ▁▂▃▄▅▆▇█"

BAR, SPARKS = 28, 40
"""Characters of the bar and of the curve, which stand beside each other on 80."""


def watch(run: Path, *, once: bool) -> None:
    """Show the run until Ctrl-C, or until it has ended. Raises WrongInput."""
    if not (run / METRICS_FILE).exists():
        raise WrongInput(no_run(run, METRICS_FILE))
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(view(run.resolve().name, read_course(run), read_end(run), time.time()))
        return
    read, changed = read_course(run), _stamp(run)
    try:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                if (now := _stamp(run)) != changed:
                    read, changed = read_course(run), now
                end = read_end(run)
                live.update(view(run.resolve().name, read, end, time.time()), refresh=True)
                if end is not None:
                    return
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        sys.stdout.flush()


def view(name: str, course: Course, end: str | None, now: float) -> RenderableType:
    """Return the view of a run. ``end``: how it has ended; None: it has not, or was killed. ``now``: in
    Unix seconds.
    """
    if not course.steps:
        return Text(f"{name}: {end or 'no step is finished yet'}", style="bold")
    steps = list(course.steps)
    last = course.steps[steps[-1]]
    total = course.total_steps
    title = Text.assemble((name, "bold"), f"  step {steps[-1]}" + (f"/{total}" if total else ""), "  ")
    title.append(
        end or _pace(course, now),
        style={"done": "green", "failed": "red", "stopped": "yellow", None: "cyan"}.get(end, ""),
    )
    line = Table.grid(padding=(0, 2, 0, 0))
    shown = "reward" if course.series("reward/mean") else "loss"
    points = course.series("reward/mean") or course.series("train/loss")
    curve = Text(f"{shown} {sparkline([value for _, value in points], SPARKS)}", style="green")
    line.add_row(*([ProgressBar(total, steps[-1], width=BAR)] if total else []), curve)
    return Group(title, line, _history(course), _queues(last))


def _history(course: Course) -> Table:
    rows: list[dict[str, str]] = []
    for step in list(course.steps)[-ROWS:]:
        record, evaluation = course.steps[step], course.evaluations.get(step, {})
        head, bound = record.get("staleness/head_max"), course.bound
        lag = "-" if head is None else f"{head}" if bound is None else f"{head}/{bound}"
        wait = record.get("perf/trainer_wait_fraction")
        rate, took = record.get("perf/generate_tokens_per_s"), record.get("perf/step_s")
        rows.append(
            {
                "step": str(step),
                "loss": _number(record, "train/loss") if "reward/mean" not in record else "-",
                "reward": _number(record, "reward/mean"),
                "held out": _number(evaluation, "eval/reward"),
                "lag": lag,
                "tok/s": "-" if rate is None else count(rate),
                "trainer waits": "-" if wait is None else f"{wait:.0%}",
                "s/step": "-" if took is None else f"{took:.1f}",
            }
        )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    headings = [heading for heading in rows[0] if any(row[heading] != "-" for row in rows)]
    for heading in headings:
        table.add_column(heading, justify="right", style="magenta" if heading == "lag" else None)
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    return table


def _queues(record: Record) -> Text:
    """Return how much waits where: a group goes from left to right."""
    names = {
        "generating": "rollout/groups_generating",
        "judging": "rollout/groups_judging",
        "ready": "rollout/groups_ready",
    }
    depths = [f"{name} {record[tag]}" for name, tag in names.items() if record.get(tag) is not None]
    text = f"groups: {' > '.join(depths)}" if depths else ""
    running, limit = record.get("rollout/requests_running"), record.get("rollout/requests_limit")
    if running is not None:
        text += f"   requests: {running}/{limit}"
    live = record.get("live/turns_ready")
    if live is not None:
        text += f"   live turns ready: {live}"
    sides = {"by helpers": "live/side_helpers", "by sampling": "live/side_sampling"}
    if any(record.get(tag) for tag in sides.values()):
        counts = ", ".join(f"{record[tag]} {name}" for name, tag in sides.items() if record.get(tag))
        text += f"\nside turns: {counts}"
    return Text(text, style="dim")


def _pace(course: Course, now: float) -> str:
    """Return the time left, and how long ago the last step was if it is late."""
    steps = list(course.steps)[-ETA_STEPS - 1 :]
    first, last = course.steps[steps[0]], course.steps[steps[-1]]
    since = max(0.0, now - last["time"])
    if len(steps) < 2:
        return f"last step {clock_face(since)} ago"
    each = (last["time"] - first["time"]) / (steps[-1] - steps[0])
    late = f"; last step {clock_face(since)} ago" if since > max(LATE * each, 30) else ""
    if course.total_steps is None:
        return f"{each:.1f} s per step{late}"
    left = each * (course.total_steps - steps[-1])
    return f"{clock_face(max(0.0, left - min(since, each)))} left{late}"


def _number(record: Record, tag: str) -> str:
    value = record.get(tag)
    return "-" if value is None else reward(value)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return a curve of ``values`` in a line of characters, at most ``width`` of them."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[k : k + size] for k in range(0, len(values), size))]
    low, high = min(means), max(means)
    return "".join(BARS[1 + round((len(BARS) - 2) * (mean - low) / ((high - low) or 1))] for mean in means)


def _stamp(run: Path) -> tuple[int, int]:
    stat = (run / METRICS_FILE).stat()
    return stat.st_size, stat.st_mtime_ns
