"""Writes the metrics of a run twice: ``metrics.jsonl`` for programs, TensorBoard events for people.

A record is one JSON line::

    {"step": 12, "time": 1767225600.5, "reward/mean": 0.61, "staleness/token_lag": [[0, 0, 812], [1, 1, 301]]}

- `step` is the policy version, `time` is in Unix seconds. A step may have more than one record.
- A scalar that is not finite is `null` in JSON, which has no such number. TensorBoard shows it as it is.
- A histogram is a list of buckets [first, last, count] of integers, without gaps.
- A tag without a value in a step is left out.
"""

import difflib
import json
import logging
import math
import operator
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, SupportsFloat, SupportsIndex, TypeVar, cast

from slipstream.backend.monitor.tags import TAGS
from slipstream.backend.monitor.tensorboard import EventWriter, HistogramBucket, integer_buckets
from slipstream.rollout.system.lines import LineFile
from slipstream.rollout.system.log_thread import LogThread

warn = logging.getLogger(__name__).warning

METRICS_FILE = "metrics.jsonl"

MOST_RECORDS = 1000
"""Records that may wait for the thread."""

ValueT = TypeVar("ValueT")

Value = SupportsFloat | SupportsIndex | str | Iterable[int] | Mapping[int, int] | Mapping[str, float]
"""A number, a markdown text, the integers of a histogram, one by one or with their counts, or numbers by
name."""


@dataclass(frozen=True)
class MetricsRecord:
    """One record, as others get it who show it."""

    step: int
    """Policy version."""
    time: float
    """Unix seconds."""
    scalars: Mapping[str, float]
    """They may be infinite or NaN."""
    histograms: Mapping[str, Sequence[HistogramBucket]]


class MetricsSink(Protocol):
    """Gets the records of a run."""

    def put(self, record: MetricsRecord) -> None:
        """Take a record. Returns at once, and raises nothing."""
        ...

    def close(self) -> None:
        """Pass on what is left, for a bounded time."""
        ...


OVERVIEW = {
    "reward/mean": "Overview/1 reward",
    "eval/reward": "Overview/2 held-out reward",
    "eval/accuracy": "Overview/2 accuracy",
    "staleness/head_max": "Overview/3 largest lag",
    "staleness/token_lag": "Overview/4 lag of tokens",
    "perf/trainer_wait_fraction": "Overview/5 trainer waits",
    "perf/generate_tokens_per_s": "Overview/6 tokens generated per second",
}
"""Tags that TensorBoard gets twice, and the second name of each: the first cards of its first page, which is
in the order of names, capital letters first. Programs find each number once."""


class MetricsLog:
    """Appends the records of a run to ``metrics.jsonl`` and to an event file, both directly in `folder`.

    A thread writes them: whoever logs waits for no disk. While the disk is full or fails the lines wait in
    memory, and the event files lack them. Use the log from one thread only. `clock` gives Unix seconds.
    """

    def __init__(
        self,
        folder: Path,
        sinks: Sequence[MetricsSink] = (),
        *,
        note: Callable[[str], None] = warn,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``sinks`` get every record as well. They are closed with the log. ``note``: as of ``LineFile``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        self._sinks = sinks
        self._lines = LineFile(folder / METRICS_FILE, note)
        self._thread = LogThread(METRICS_FILE, MOST_RECORDS, "records", note)
        self._now = 0.0
        """When the record was made that the thread writes."""
        self._events: EventWriter | None = self._event_file()

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write one record.

        Numbers may be of any type that converts to float, such as a NumPy scalar or a tensor of one element.

        Raises:
            ValueError: a tag is not declared in `TAGS`, or its value is of another kind. Nothing is written.
        """
        scalars: dict[str, float | int] = {}
        histograms: dict[str, list[HistogramBucket]] = {}
        texts: dict[str, str] = {}
        for name, value in values.items():
            kind = _declared_kind(name)
            try:
                if kind == "scalar":
                    scalars[name] = _number(value)
                elif kind == "parts":
                    scalars |= _parts(name, value)
                elif kind == "histogram":
                    histograms[name] = _histogram(value)
                else:
                    texts[name] = _text(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} takes a {kind}, not {reprlib.repr(value)}: {error}") from error

        now = self._clock()
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        parts = {**finite, **histograms, **texts}
        line = json.dumps({"step": step, "time": round(now, 3)} | parts, allow_nan=False).encode()
        shown = MetricsRecord(step, now, scalars, histograms)
        self._thread.offer(lambda: self._write(line, shown, texts))
        for sink in self._sinks:
            sink.put(shown)

    def flush(self) -> bool:
        """Wait until every record is written, or waits for a disk that fails. As of ``LogThread``."""
        return self._thread.flush()

    def _write(self, line: bytes, record: MetricsRecord, texts: Mapping[str, str]) -> None:
        self._lines.add(line)
        if self._lines.flush():
            self._now = record.time
            self._show(record.step, record.scalars, record.histograms, texts)

    def _show(
        self,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[HistogramBucket]],
        texts: Mapping[str, str],
    ) -> None:
        """Write a record for TensorBoard. After an error the next one begins a file: the rest of a file after
        half an event is never read.
        """
        try:
            if self._events is None:
                self._events = self._event_file()
            if scalars:
                self._events.scalars(step, {**scalars, **_overview(scalars)})
            for name, buckets in {**histograms, **_overview(histograms)}.items():
                if buckets:
                    self._events.histogram(step, name, buckets)
            for name, text in texts.items():
                self._events.text(step, name, text)
            self._events.flush()
        except OSError:  # the lines are what a run goes by
            self._close_events()

    def _event_file(self) -> EventWriter:
        descriptions = {name: tag.description for name, tag in TAGS.items()}
        descriptions |= {shown: descriptions[name] for name, shown in OVERVIEW.items()}
        return EventWriter(self._folder, clock=lambda: self._now, descriptions=descriptions)

    def _close_events(self) -> None:
        if self._events is not None:
            with suppress(OSError):
                self._events.close()
            self._events = None

    def close(self) -> None:
        """Close both files, and the sinks. A disk that stalls is waited for as by ``flush``."""
        if self.flush():
            self._lines.close()
            self._close_events()
        for sink in self._sinks:
            sink.close()


def _overview(values: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Return what TensorBoard shows first. An accuracy takes the place of the held-out reward that it is."""
    hidden = {"eval/reward"} if "eval/accuracy" in values else set[str]()
    return {OVERVIEW[name]: value for name, value in values.items() if name in OVERVIEW.keys() - hidden}


def _declared_kind(name: str) -> str:
    if name in TAGS:
        return TAGS[name].kind
    nearest = difflib.get_close_matches(name, TAGS, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"metric tag {name!r} is not declared; the nearest one is {nearest!r}. "
        "Declare new tags in backend/monitor/tags.py."
    )


def _number(value: Value) -> float | int:
    if isinstance(value, SupportsIndex):
        try:
            return int(operator.index(value))
        except TypeError:  # an array has the method, whatever its numbers are
            pass
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"{type(value).__name__} is not a number")


def _parts(name: str, value: Value) -> dict[str, float | int]:
    """Return the numbers by their own tags: `reward/length` for `length` of `reward/parts`."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} holds no numbers by name")
    tags = {f"{name.removesuffix('parts')}{part}": number for part, number in value.items()}
    if clash := sorted(tags.keys() & TAGS.keys()):
        raise ValueError(f"{', '.join(clash)} is a metric of its own")
    return {tag: _number(number) for tag, number in tags.items()}


def _histogram(value: Value) -> list[HistogramBucket]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{type(value).__name__} holds no integers")
    return integer_buckets(cast("Iterable[int] | Mapping[int, int]", value))


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is not text")
    return value
