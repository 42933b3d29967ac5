"""The page: what is read of run folders as one JSON document, in a template with its script and style."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from slipstream.backend.monitor.course import Course, read_course
from slipstream.backend.monitor.report.timeline import read_events, timeline
from slipstream.backend.monitor.summary import read_end, read_summary, summary_rows, untested_row
from slipstream.backend.monitor.tags import TAGS
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


PARTS = Path(__file__).parent

EPISODE_BYTES = 3_000_000
"""Bytes of episodes on a page, of all its runs together."""

MOST_POINTS = 1000
"""Points of a curve; of longer ones every n-th is shown, and the last."""

MOST_LAGS_STEPS = 400
"""Columns of the heat map; neighbouring steps are added up."""

MOST_RUNS = 8
"""Runs whose colours can be told apart."""

Chart = tuple[str, Sequence[tuple[str, str]]]
"""Title of a chart, and the tags on it with the names that a single run's curves have."""

CHARTS: tuple[Chart, ...] = (
    ("Reward", (("reward/mean", "training"), ("eval/reward", "held out"))),
    ("Head lag", (("staleness/head_max", "largest"), ("staleness/head_mean", "mean"))),
    ("Token lag", (("staleness/token_mean", "mean"),)),
    ("Policy loss", (("train/loss", "loss"),)),
    ("Entropy", (("train/entropy", "entropy"),)),
    ("Response length", (("rollout/response_length", "mean"),)),
    (
        "Tokens per second",
        (("perf/generate_tokens_per_s", "generated"), ("perf/train_tokens_per_s", "trained")),
    ),
    ("Trainer waits", (("perf/trainer_wait_fraction", "share of step"),)),
    ("Trainer and engine differ", (("mismatch/logprob_abs_mean", "lag 0"),)),
    ("Effective sample size", (("train/ess", "ESS"),)),
    ("Clipped tokens", (("train/clip_fraction", "fraction"),)),
    ("Gradient norm", (("train/grad_norm", "norm"),)),
    ("KL from the start of the step", (("train/approx_kl", "KL"),)),
    ("Live users' score", (("live/score_mean", "mean"),)),
    ("Critic's explained variance", (("critic/explained_variance", "fraction"),)),
    ("Seconds per step", (("perf/step_s", "step"), ("perf/train_s", "training"))),
)

NAMED = (("reward/", "reward: "), ("episode/", "episode: "))
"""Beginnings of the tags whose names users choose, and of the titles of their charts."""

MOST_NAMED_CHARTS = 24
"""Number of charts of what users name themselves; TensorBoard shows all."""


@dataclass(frozen=True)
class AuditResult:
    """The result of the audit of a run, as the page shows it."""

    state: str
    """`clean`, `wrong` or `none`."""
    lines: Sequence[str]
    """Discrepancies, or why there was no audit."""


RUNNING = ("running",)
"""Why a running run has no audit."""


def run_data(folder: Path, audit: AuditResult, *, episode_bytes: int) -> dict[str, Any]:
    """Return what a page shows of the run in a folder, as JSON has it. Raises OSError."""
    course, summary = read_course(folder), read_summary(folder)
    chosen = choose_episodes(folder, episode_bytes)
    steps = list(course.steps)
    return {
        "name": folder.resolve().name,
        "state": _state(folder, audit),
        "steps": steps[-1] if steps else 0,
        "total": course.total_steps,
        "starts": course.starts,
        "bound": course.bound,
        "summary": _untested(course.recipe) if summary is None else summary_rows(summary),
        "series": {
            tag: _thinned(points)
            for _, tags in (*CHARTS, *named_charts(course))
            for tag, _ in tags
            if (points := course.series(tag))
        },
        "named": [_chart(title, tags) for title, tags in named_charts(course)],
        "lags": _lag_columns(course.lags()),
        "timeline": timeline(read_events(folder)),
        "audit": vars(audit),
        "recipe": yaml.safe_dump(dict(course.recipe), sort_keys=False, allow_unicode=True),
        "log": _last_lines(folder / "driver.log") if read_end(folder) in (None, "failed") else [],
        "episodes": chosen.rows,
        "recorded": chosen.recorded,
        **_end(course),
    }


def _untested(recipe: Mapping[str, object]) -> dict[str, str]:
    """Return the row of a run without a summary about untested fields that its recipe sets."""
    listed = [(key, value) for key, value in _flat(recipe) if key.endswith(".untested") and value]
    return untested_row([f"{key}: {_shown(value)}" for key, value in listed])


def _state(folder: Path, audit: AuditResult) -> str:
    """Return how a run has ended, or what is known of one without a summary."""
    if (end := read_end(folder)) is not None:
        return end
    if audit.state == "none":
        return "running" if audit.lines == RUNNING else "running or killed"
    return "killed"


def render(runs: Sequence[Mapping[str, object]], differences: Sequence[Mapping[str, object]]) -> str:
    """Return the page of runs, which ``run_data`` has given."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PARTS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    names = ", ".join(str(run["name"]) for run in runs)
    return environment.get_template("page.html").render(
        title=names,
        style=_part("page.css"),
        script=_part("page.js"),
        plots=_part("uplot/uPlot.iife.min.js"),
        plots_style=_part("uplot/uPlot.min.css"),
        plots_licence=_part("uplot/LICENSE"),
        island=_island({"runs": runs, "charts": _charts(runs), "differences": differences}),
        made=time.strftime("%Y-%m-%d %H:%M"),
    )


def _part(name: str) -> Markup:
    return Markup((PARTS / name).read_text(encoding="utf-8"))


def differences(recipes: Mapping[str, Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the settings in which recipes differ, with the value of each run, by the runs' names."""
    flat = {name: dict(_flat(recipe)) for name, recipe in recipes.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    rows: list[dict[str, object]] = []
    for key in keys:
        values = [_shown(settings[key]) if key in settings else "-" for settings in flat.values()]
        if len(set(values)) > 1 and key != "run.name":
            rows.append({"key": key, "values": values})
    return rows


def _island(data: object) -> Markup:
    """Return JSON that cannot end the element in which it stands, whatever text is in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A half of a surrogate pair cannot be encoded.
    return Markup(text.encode("utf-8", errors="replace").decode("utf-8"))


def named_charts(course: Course) -> list[Chart]:
    """Return a chart of each number that rewards and workflows name: its mean and its extremes."""
    tags = dict.fromkeys(tag for record in course.steps.values() for tag in record)
    charts: list[Chart] = []
    for prefix, title in NAMED:
        for tag in tags:
            if tag.startswith(prefix) and f"{tag}/min" in tags:
                lines = ((tag, "mean"), (f"{tag}/min", "smallest"), (f"{tag}/max", "largest"))
                charts.append((title + tag.removeprefix(prefix), lines))
    return charts[:MOST_NAMED_CHARTS]


def _charts(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    named = {chart["title"]: chart for run in runs for chart in run["named"]}
    known = [_chart(title, tags) for title, tags in CHARTS]
    shown = [*known, *named.values()]
    drawn = [
        (chart, [each for each in chart["tags"] if any(each["tag"] in run["series"] for run in runs)])
        for chart in shown
    ]
    return [{**chart, "dashed": _dashed(runs, chart, tags)} for chart, tags in drawn if tags]


def _dashed(runs: Sequence[object], chart: Mapping[str, Any], tags: Sequence[Mapping[str, str]]) -> str:
    """Return which curves are dashed: all but the first of each run, where colours tell the runs apart."""
    names = [each["name"] for each in tags if each != chart["tags"][0]]
    return f"dashed: {', '.join(names)}" if len(runs) > 1 and names else ""


def _chart(title: str, tags: Sequence[tuple[str, str]]) -> dict[str, Any]:
    tag = TAGS.get(tags[0][0])
    return {
        "title": title,
        "unit": "" if tag is None else tag.unit,
        "meaning": f"`{tags[0][0]}`" if tag is None else tag.description,
        "tags": [{"tag": tag, "name": name} for tag, name in tags],
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    every = -(-len(points) // MOST_POINTS)
    kept = [*points[:-1:every], points[-1]]
    return [[step, float(f"{value:.5g}")] for step, value in kept]


def _lag_columns(lags: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> list[list[object]]:
    """Return [first step, last step, {lag: tokens}] of each column of the heat map."""
    every = max(1, -(-len(lags) // MOST_LAGS_STEPS))
    columns: list[list[object]] = []
    for start in range(0, len(lags), every):
        part = lags[start : start + every]
        tokens: dict[int, int] = {}
        for _, buckets in part:
            for lag, n in buckets:
                tokens[lag] = tokens.get(lag, 0) + n
        columns.append([part[0][0], part[-1][0], tokens])
    return columns


def _end(course: Course) -> dict[str, object]:
    """Return the latest reward of training and of the held-out prompts."""
    rewards, held_out = course.series("reward/mean"), course.series("eval/reward")
    return {
        "reward": rewards[-1][1] if rewards else None,
        "held_out": [held_out[0][1], held_out[-1][1]] if len(held_out) > 1 else None,
    }


def _flat(value: object, path: str = "") -> list[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        return [
            pair
            for key, inner in value.items()
            for pair in _flat(inner, f"{path}.{key}" if path else str(key))
        ]
    return [(path, value)]


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _last_lines(path: Path, lines: int = 20) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []
