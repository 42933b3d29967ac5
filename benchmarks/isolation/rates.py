"""The rate of each loop, computed from the events that the loop records."""

import threading
import time
import urllib.error
import urllib.request
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.isolation.watched import SAMPLES, WatchedRun
from benchmarks.live_users import Answered

RATES = {
    "answers": "serving: answers to users, their last byte included",
    "entries": "collection: entries of the gateway's journal that are on disk in the ledger",
    "verdicts": "judging: verdicts on turns",
    "groups": "collection and judging of rollouts: groups with a reward",
    "steps": "training: published versions",
}
"""What is counted, with its loop."""

FED_BY: Mapping[str, tuple[str, ...]] = {
    "trainer": ("groups",),
    "gateway": ("answers", "entries", "verdicts"),
}
"""Rates that a disturbance may lower, because what is disturbed makes what they count: without a gateway no
user is answered, so that nothing is recorded or judged, and without a trainer no slot becomes free."""

OWN: Mapping[str, tuple[str, ...]] = {
    "trainer": ("steps",),
    "judge": ("verdicts",),
    "gateway": (),
    "engine": (),
}
"""Rates of what is disturbed itself."""

POLL_S = 0.5


def others(loop: str) -> list[str]:
    """Return the rates that must not notice the disturbance of a loop."""
    return [rate for rate in RATES if rate not in (*FED_BY.get(loop, ()), *OWN.get(loop, ()))]


@dataclass
class Events:
    """Everything that was seen of a run. Times are in seconds since the epoch."""

    times: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Times of the events of each rate except ``entries``, in order."""
    journal: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """(time, entries of the journal, how many of them the driver lacks)."""
    latencies: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(end, seconds) of each answer."""

    def rate(self, name: str, begin: float, end: float) -> float:
        """Return the events per second from ``begin`` to ``end``."""
        if name == "entries":
            return (self._acknowledged(end) - self._acknowledged(begin)) / (end - begin)
        times = self.times.get(name, [])
        count = bisect_right(times, end) - bisect_right(times, begin)
        return count / (SAMPLES if name == "groups" else 1) / (end - begin)

    def longest_gap_s(self, name: str, begin: float, end: float) -> float:
        """Return the longest time without an event between ``begin`` and ``end``."""
        if name == "entries":
            times = [
                later[0]
                for before, later in pairwise(self.journal)
                if later[1] - later[2] > before[1] - before[2]
            ]
        else:
            times = self.times.get(name, [])
        inside = [begin, *(each for each in times if begin < each < end), end]
        return max(later - before for before, later in pairwise(inside))

    def latency_s(self, begin: float, end: float) -> tuple[float, float] | None:
        """Return the median and the 99th percentile of the time to the last byte, if there is any."""
        inside = sorted(seconds for at, seconds in self.latencies if begin < at <= end)
        if not inside:
            return None
        return inside[len(inside) // 2], inside[min(len(inside) - 1, int(0.99 * len(inside)))]

    def unacknowledged(self, begin: float, end: float) -> int:
        """Return the most entries that the driver lacked."""
        return max((missing for at, _, missing in self.journal if begin < at <= end), default=0)

    def _acknowledged(self, at: float) -> float:
        """Return how many entries the ledger had at a moment, between two looks in proportion."""
        place = bisect_right(self.journal, (at, 2**60, 2**60))
        if not self.journal or place == 0:
            return 0.0
        before = self.journal[place - 1]
        if place == len(self.journal):
            return before[1] - before[2]
        after = self.journal[place]
        share = (at - before[0]) / (after[0] - before[0])
        return (1 - share) * (before[1] - before[2]) + share * (after[1] - after[2])

    def since(self, begin: float) -> "Events":
        """Return the same with times from ``begin`` on."""
        return Events(
            {name: [round(at - begin, 3) for at in times] for name, times in self.times.items()},
            [(round(at - begin, 3), entries, missing) for at, entries, missing in self.journal],
            [(round(at - begin, 3), round(seconds, 3)) for at, seconds in self.latencies],
        )


class Watch:
    """Looks at a run until it is closed."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._answers: list[Answered] = []
        self._journal: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="looking at the journal", daemon=True)
        self._looking.start()

    def answered(self, answer: Answered) -> None:
        self._answers.append(answer)

    def close(self) -> None:
        self._ended.set()
        self._looking.join()

    def events(self) -> Events:
        """Return what was seen until now."""
        root = self._run.root
        answers = list(self._answers)
        return Events(
            {
                "answers": [answer.ended_s for answer in answers],
                "verdicts": _lines(root / "verdicts"),
                "groups": _lines(root / "rewards"),
                "steps": self._run.step_times(),
            },
            list(self._journal),
            [(answer.ended_s, answer.ended_s - answer.began_s) for answer in answers],
        )

    def _look(self) -> None:
        while not self._ended.wait(POLL_S):
            with suppress(OSError, urllib.error.URLError, ValueError):
                with urllib.request.urlopen(f"{self._run.admin}/metrics", timeout=1) as response:
                    figures = dict(
                        line.rsplit(" ", 1)
                        for line in response.read().decode().splitlines()
                        if not line.startswith("#")
                    )
                entries = int(float(figures["slipstream_gateway_journal_entries"]))
                missing = int(float(figures["slipstream_gateway_journal_unacknowledged"]))
                self._journal.append((time.time(), entries, missing))


def _lines(path: Path) -> list[float]:
    with suppress(FileNotFoundError):
        return sorted(float(line) for line in path.read_text().splitlines())
    return []
