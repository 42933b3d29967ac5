"""The course of a watched run: one loop is disturbed in every way, one after the other.

steady ──► calm, CALM_S ──► disturbed, DISTURBED_S ──► recovers ──► calm ...
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.isolation.disturb import disturbed
from benchmarks.isolation.rates import RATES, Events, Watch, others
from benchmarks.isolation.watched import LOOPS, WatchedRun
from benchmarks.live_users import Crowd, Habits
from slipstream.backend.quickstart.task import sample_problem

CALM_S = DISTURBED_S = 30.0
STEADY_S = 10.0
"""A run is steady when it has gone at SHARE of its rates for so long."""
SHARE = 0.85
RECOVERY_TIMEOUT_S = 180.0
CPU_EVERY_S = 5.0

USERS = 12
EVERY_S = 3.0
HABITS = Habits(
    every_s=EVERY_S, turns=4, max_tokens=48, says=lambda rng: sample_problem(rng, max_operands=8).prompt
)
EXPECTED = {"answers": USERS / EVERY_S}
"""Rates that are known before they are measured, per second."""


@dataclass
class Cell:
    """One disturbance of one loop. Times are in seconds since the run's first request."""

    loop: str
    kind: str
    calm: tuple[float, float]
    harmed: tuple[float, float]
    rates: dict[str, tuple[float, float]]
    """Of each rate: events per second, undisturbed and disturbed."""
    gaps_s: dict[str, float]
    """Of each rate: the longest time without an event while the loop was disturbed."""
    latency_s: tuple[float, float] | None
    """Median and 99th percentile of the time to the last byte, undisturbed."""
    latency_harmed_s: tuple[float, float] | None
    """The same, disturbed."""
    cores: tuple[float, float]
    """CPU time of the whole run per second, undisturbed and disturbed."""
    publication_s: tuple[float, float]
    """Mean time of a publication, undisturbed and disturbed."""
    stall_s: tuple[float, float]
    """Mean time for which engines stand still in a publication, undisturbed and disturbed."""
    depths: dict[str, float]
    """Largest depth of each queue from the beginning of the disturbance until the run was steady again."""

    @property
    def shares(self) -> dict[str, float]:
        """Disturbed rate over undisturbed rate of everything that must not notice."""
        return {name: self.rates[name][1] / self.rates[name][0] for name in others(self.loop)}


@dataclass
class LoopRun:
    """One run, whose one loop was disturbed."""

    loop: str
    cells: list[Cell]
    events: Events
    discrepancies: list[str]
    """What the audit has found."""
    notes: list[str] = field(default_factory=list[str])
    """What the run has told its user since the first disturbance."""


def disturb(loop: str, kinds: Sequence[str], root: Path, inputs: Path, say: Callable[[str], None]) -> LoopRun:
    """Run the recipe, disturb one of its loops in all of these ways, and return what was seen."""
    run = WatchedRun(root, inputs)
    watch = Watch(run)
    try:
        run.wait_for("training", lambda: run.phase() == "training")
        with _talking(run, watch):
            began = time.time()
            course = Course(run, watch, began, say)
            course.steady(None)
            printed = len(run.output())
            cells = [course.cell(loop, kind) for kind in kinds]
    finally:
        watch.close()
        run.end()
    notes = run.output()[printed:].splitlines()
    return LoopRun(loop, cells, watch.events().since(began), audit(run.folder), notes)


class Course:
    """Measures a run that is on its way."""

    def __init__(self, run: WatchedRun, watch: Watch, began: float, say: Callable[[str], None]) -> None:
        self._run = run
        self._watch = watch
        self._began = began
        self._say = say

    def cell(self, loop: str, kind: str) -> Cell:
        """Measure the rates of a steady run, then those beside one disturbance."""
        calm = self._measured(CALM_S)
        find = partial(self._run.processes, loop)
        if not find():
            sys.exit(f"no process of the {loop} was found:\n{self._run.output()[-2000:]}")
        if (loop, kind) == ("trainer", "stopped"):
            self._await_publication()
        with disturbed(kind, find):
            harmed = self._measured(DISTURBED_S)
        events = self._watch.events()
        rates = {name: (events.rate(name, *calm.span), events.rate(name, *harmed.span)) for name in RATES}
        shares = ", ".join(f"{name} {rates[name][1] / max(rates[name][0], 1e-9):.0%}" for name in RATES)
        self._say(f"{loop} {kind}: {shares}")
        recovered_s = self.steady({name: calm for name, (calm, _) in rates.items()})
        self._say(f"{loop} {kind}: steady again after {recovered_s:.0f} s")
        begin, end = harmed.span
        return Cell(
            loop,
            kind,
            self._since(calm.span),
            self._since(harmed.span),
            rates,
            {name: round(events.longest_gap_s(name, begin, end), 2) for name in RATES},
            events.latency_s(*calm.span),
            events.latency_s(*harmed.span),
            (calm.cores, harmed.cores),
            self._means("perf/weight_update_s", calm, harmed),
            self._means("perf/weight_update_stall_s", calm, harmed),
            self._depths(begin, time.time()),
        )

    def _await_publication(self) -> None:
        """Return just after a publication. During one, the engines stand still as well as the trainer."""
        steps = len(self._run.step_times())
        deadline = time.monotonic() + STEADY_S
        while len(self._run.step_times()) == steps and time.monotonic() < deadline:
            time.sleep(0.02)

    def steady(self, expected: dict[str, float] | None) -> float:
        """Wait until the run goes at its expected rates; return how long that took."""
        began = time.monotonic()
        rates = EXPECTED if expected is None else expected
        deadline = began + RECOVERY_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(1)
            if not self._run.is_running:
                sys.exit(f"the run has ended by itself:\n{self._run.output()[-4000:]}")
            now, events = time.time(), self._watch.events()
            at = {name: events.rate(name, now - STEADY_S, now) for name in RATES}
            is_complete = all(self._run.processes(loop) for loop in LOOPS) and self._run.engines_serve()
            if is_complete and all(at.values()) and all(at[n] >= SHARE * rates[n] for n in rates):
                return time.monotonic() - began
        self._say(f"not steady after {RECOVERY_TIMEOUT_S:.0f} s: {at}, expected {rates}")
        return time.monotonic() - began

    def _measured(self, seconds: float) -> "_Measured":
        begin = time.time()
        before = self._run.cpu_s()
        last = dict(before)
        while (left := begin + seconds - time.time()) > 0:
            time.sleep(min(left, CPU_EVERY_S))
            last |= self._run.cpu_s()  # those of processes that have ended stay as they were
        used_s = sum(total_s - before.get(pid, 0.0) for pid, total_s in last.items())
        end = time.time()
        return _Measured((begin, end), round(used_s / (end - begin), 2))

    def _since(self, span: tuple[float, float]) -> tuple[float, float]:
        return round(span[0] - self._began, 1), round(span[1] - self._began, 1)

    def _means(self, tag: str, calm: "_Measured", harmed: "_Measured") -> tuple[float, float]:
        """Return the mean of a metric over the training steps of both times."""
        records = self._run.records()

        def mean(span: tuple[float, float]) -> float:
            values = [record[tag] for record in records if span[0] < record["time"] <= span[1]]
            return round(sum(values) / len(values), 3) if values else 0.0

        return mean(calm.span), mean(harmed.span)

    def _depths(self, begin: float, end: float) -> dict[str, float]:
        """Return the largest depth, and age in seconds, of each queue of the run in a time."""
        records = [record for record in self._run.records() if begin < record["time"] <= end]

        def most(tag: str) -> float:
            return max((record.get(tag, 0.0) for record in records), default=0.0)

        return {
            "entries that the driver lacks": self._watch.events().unacknowledged(begin, end),
            "turns without a verdict": most("live/turns_unjudged"),
            "oldest turn without a verdict, s": round(most("live/oldest_unjudged_s"), 1),
            "turns ready": most("live/turns_ready"),
            "oldest turn ready, s": round(most("live/oldest_ready_s"), 1),
            "groups ready": most("rollout/groups_ready"),
        }


@dataclass(frozen=True)
class _Measured:
    span: tuple[float, float]
    cores: float


@contextmanager
def _talking(run: WatchedRun, watch: Watch) -> Iterator[None]:
    """Let users talk to the run inside the block."""
    crowd = Crowd(run.url, run.key, USERS, HABITS, watch.answered, time.time)
    loop = asyncio.new_event_loop()
    talk = loop.create_task(crowd.talk())

    def go() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(talk)

    thread = threading.Thread(target=go, name="users")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(talk.cancel)
        thread.join()
        loop.close()


def audit(folder: Path) -> list[str]:
    """Return the discrepancies that ``slipstream audit`` finds in a run that has ended."""
    command = [sys.executable, "-m", "slipstream.backend.cli", "audit", str(folder), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if not result.stdout:
        return [result.stderr.strip()]
    return json.loads(result.stdout)["discrepancies"]
