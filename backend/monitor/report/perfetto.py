"""The trace of a run as events of Chrome's trace format, which Perfetto opens.

A process for the trainer, with one thread, and one for each engine, with as many threads as it ever serves
requests at once. Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence

from slipstream.backend.monitor.report.timeline import Event, last_life

TRAINER = 1
"""Number of the trainer's process; engines follow it."""


def trace_events(events: Mapping[str, Sequence[Event]]) -> list[dict[str, object]]:
    """Return the events of a run's last life, times in microseconds; empty if no step is finished."""
    steps = last_life(events["step"])
    if not steps:
        return []
    begin = steps[0]["end_s"] - steps[0]["step_s"]
    publications = events["publish"][len(events["publish"]) - len(steps) :]
    requests = [event for event in events["request"] if event["end_s"] >= begin]
    return [
        _named("process_name", TRAINER, "trainer"),
        *_trainer(steps, publications, begin),
        *_engines(requests, begin),
    ]


def _trainer(
    steps: Sequence[Event], publications: Sequence[Event], begin: float
) -> Iterator[dict[str, object]]:
    for step in steps:
        start = step["end_s"] - step["step_s"]
        of_step = {"version": step["version"]}
        yield _span(TRAINER, 0, f"step to version {step['version']}", start - begin, step["step_s"], of_step)
        yield _span(TRAINER, 0, "wait for batch", start - begin, step["wait_s"], of_step)
        yield _span(TRAINER, 0, "train", start + step["wait_s"] - begin, step["train_s"], of_step)
    for event in publications:
        start = event["end_s"] - event["total_s"] - begin
        sizes = {"bytes": event.get("bytes_sent"), "stall_s": event["stall_s"]}
        yield _span(TRAINER, 0, "publish weights", start, event["total_s"], sizes)


def _engines(requests: Sequence[Event], begin: float) -> Iterator[dict[str, object]]:
    by_engine: dict[str, list[Event]] = {}
    for event in requests:
        by_engine.setdefault(str(event["engine"]), []).append(event)
    for process, (name, events) in enumerate(sorted(by_engine.items()), start=TRAINER + 1):
        yield _named("process_name", process, name)
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        for event in sorted(events, key=lambda each: each["start_s"]):
            while busy and busy[0][0] <= event["start_s"]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            thread = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (event["end_s"], thread))
            names = ("prompt_tokens", "new_tokens", "interrupted", "retractions", "first_token_s")
            details = {key: event[key] for key in names if key in event}
            duration = event["end_s"] - event["start_s"]
            yield _span(
                process, thread, f"{event['new_tokens']} tokens", event["start_s"] - begin, duration, details
            )


def _span(
    process: int, thread: int, name: str, start_s: float, seconds: float, details: Mapping[str, object]
) -> dict[str, object]:
    times = {"ts": round(1e6 * start_s, 1), "dur": round(1e6 * max(seconds, 0.0), 1)}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, **times, "args": dict(details)}


def _named(kind: str, process: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": process, "tid": 0, "name": kind, "args": {"name": name}}
