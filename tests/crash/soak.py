"""Hours of a simulated run and ten minutes of a real one: no process may hold more and more memory.

    python -m tests.crash.soak                              twelve minutes
    python -m tests.crash.soak --minutes 60 --users 50      with users, and hostile ones beside them

The real run is that of the quickstart, with so low a learning rate that its answers keep their lengths. The
memory of a kind is what would be free if all processes of the kind ended: what a process shares with the one
that it was forked from counts once, until it writes there.
Growth is that of what a process holds at rest, the least of each two minutes: how much it needs at work
depends on the batch and on the request, and how often it works on everything else that the machine does. A
line is put through it behind the first third, in which buffers reach their sizes. The simulated run lasts
three hours, of which two are watched. It is one process, in which the driver's and the collector's own code
works on models of everything else.

With users the real run has a gateway, and a quarter of what it trains is theirs. Every other minute, hostile
users with a key of their own send what they can: long texts, large tools, hostile values, and connections
over which nothing comes. How long the others wait for their answers is compared between the minutes. Sessions
end after four minutes of rest, so that there are as many of them behind the first third as at the end.

Prints a table and, as the last line, one JSON object: `mb`, `growth_mb_per_hour` and `growth_percent` (over
the time that was watched) by kind of process and, with users, `answers`, `p99_s` and `p99_s_beside_hostile`.
Exit code 1 if a kind has grown by more than 3 % and 2 MB.
"""

import argparse
import gc
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.live_users import Answered, Crowd, Habits
from slipstream.backend.monitor.tables import Columns, rows_table
from slipstream.backend.quickstart import prepare
from slipstream.backend.simulate.compare import Work
from slipstream.backend.simulate.gpu_split import layout_of
from slipstream.backend.simulate.inputs import recipe
from slipstream.backend.simulate.schedules import recipe_schedule
from slipstream.backend.simulate.world import World
from slipstream.rollout.gateway.keys import add_key
from tests.clients.hostile_values import VALUES
from tests.crash.live import talking
from tests.crash.sweep import Sweep, processes
from tests.ports import held_port
from tests.runs.conftest import LaunchedRun, start_run

SETTINGS = (
    "run.steps=1000000",
    "rollout.batch_size=16",
    "rollout.n_samples_per_prompt=8",
    "actor.optimizer.lr=1e-9",
    "checkpoint.every=20",
    "checkpoint.keep_last=2",
    "rollout.engine.args.max_total_tokens=3072",  # else its pages fill up for hours
)
KINDS = ("driver", "collector", "judge", "trainer", "engine actor", "engine scheduler")
LIVE_SETTINGS = (
    "live.share=0.25",
    "live.max_wait_s=5",
    "judge.type=code",
    "judge.code=slipstream.rollout.reward.live.RuleJudge",
    "gateway.idle_timeout_s=240",
)
HOSTILE = 5
"""Users who mean harm."""
WINDOW_S = 60.0
"""How long they are there, and then are not."""

SAMPLE_S = 5.0
REST_S = 2 * WINDOW_S
"""Time in which every process rests once."""

SIMULATED_S = 3 * 3600.0
ALLOWED_PERCENT, ALLOWED_MB = 3.0, 2.0


@dataclass(frozen=True)
class Growth:
    """The memory of one kind of process over a run."""

    kind: str
    mb: float
    """At rest at the end, by the line."""
    mb_per_hour: float
    percent: float
    """Growth over the time that was watched."""
    has_grown: bool


class Memory:
    """Samples of the memory of several kinds of processes."""

    def __init__(self) -> None:
        self._samples: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def note(self, kind: str, seconds: float, mb: float) -> None:
        self._samples[kind].append((seconds, mb))

    def growths(self) -> list[Growth]:
        """Return the growth of each kind behind the first third of its samples."""
        return [self._growth(kind, samples[len(samples) // 3 :]) for kind, samples in self._samples.items()]

    @staticmethod
    def _growth(kind: str, samples: list[tuple[float, float]]) -> Growth:
        rests = defaultdict[int, list[tuple[float, float]]](list)
        for sample in samples:
            rests[int((sample[0] - samples[0][0]) // REST_S)].append(sample)
        seconds_S, mb_S = np.array([min(rest, key=itemgetter(1)) for rest in rests.values()]).T
        slope, start = np.polynomial.Polynomial.fit(seconds_S, mb_S, 1).convert().coef[::-1]
        first, last = start + slope * seconds_S[0], start + slope * seconds_S[-1]
        percent = 100 * (last - first) / first
        has_grown = bool(percent > ALLOWED_PERCENT and last - first > ALLOWED_MB)
        return Growth(kind, float(last), float(slope * 3600), float(percent), has_grown)


def unique_mb(pids: Sequence[int]) -> float:
    """Return the memory that would be free if the processes ended, without files and shared memory."""
    total_kb = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total_kb += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon"))
    return total_kb / 1024


@dataclass
class Waits:
    """How long users have waited for their answers, in minutes without and with hostile users."""

    began_s: float = 0.0
    quiet_s: list[float] = field(default_factory=list[float])
    beside_hostile_s: list[float] = field(default_factory=list[float])

    def is_hostile(self, time_s: float) -> bool:
        return int((time_s - self.began_s) // WINDOW_S) % 2 == 1

    def note(self, answered: Answered) -> None:
        beside = self.is_hostile(answered.began_s) or self.is_hostile(answered.ended_s)
        (self.beside_hostile_s if beside else self.quiet_s).append(answered.ended_s - answered.began_s)

    def results(self) -> dict[str, float]:
        return {
            "answers": len(self.quiet_s) + len(self.beside_hostile_s),
            "p99_s": round(float(np.quantile(self.quiet_s, 0.99)), 3),
            "p99_s_beside_hostile": round(float(np.quantile(self.beside_hostile_s, 0.99)), 3),
        }


class _Trouble:
    """Hostile users in threads of their own. They stop at once in the minutes without them."""

    def __init__(self, url: str, key: str, waits: Waits) -> None:
        self._url, self._key, self._waits = url, key, waits
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._harm, args=(number,), name=f"hostile-{number}")
            for number in range(HOSTILE)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _harm(self, number: int) -> None:
        rng = random.Random(number)
        headers = {"authorization": f"Bearer {self._key}"}
        with httpx.Client(base_url=self._url, headers=headers, timeout=WINDOW_S) as http:
            while not self._ended.wait(0.1):
                if self._waits.is_hostile(time.time()):
                    with suppress(httpx.HTTPError, OSError):
                        self._once(http, rng)

    def _once(self, http: httpx.Client, rng: random.Random) -> None:
        if rng.random() < 0.1:
            address = ("127.0.0.1", http.base_url.port)
            with socket.create_connection(address, 5.0) as silent:
                silent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
                self._ended.wait(2.0)
            return
        http.post("/v1/chat/completions", json=rng.choice([large, long, valued_badly])(rng)).read()


def large(rng: random.Random) -> dict[str, Any]:
    """Return a request of half a megabyte of tools."""
    properties = {f"{rng.random()}": {"type": "string"} for _ in range(12_000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return {"messages": [_said("1")], "tools": [{"type": "function", "function": function}], "max_tokens": 4}


def long(rng: random.Random) -> dict[str, Any]:
    """Return a request with up to four megabytes of text."""
    return {"messages": [_said("1+2 " * rng.randrange(1_000_000))], "max_tokens": 4}


def valued_badly(rng: random.Random) -> dict[str, Any]:
    """Return a request with three hostile values."""
    names = rng.sample(sorted(VALUES), 3)
    return {"messages": [_said("1+2")], **{name: rng.choice(VALUES[name]) for name in names}}


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _sum(rng: random.Random) -> str:
    return rng.choice(["thanks", "wrong", f"{rng.randrange(100)}+{rng.randrange(100)}="])


@contextmanager
def users(size: int, root: Path, port: int) -> Iterator[Waits]:
    """Let users talk to the run below ``root``, every other minute beside hostile ones."""
    file = root / "soak.keys.json"
    url, waits = f"http://127.0.0.1:{port}", Waits(time.time())
    habits = Habits(every_s=10.0, turns=2, max_tokens=24, says=_sum, ends=0.5)
    crowd = Crowd(url, add_key(file, "users"), size, habits, waits.note, time.time)
    with _Trouble(url, add_key(file, "hostile"), waits), talking(crowd):
        yield waits


def real(minutes: float, size: int) -> tuple[list[Growth], dict[str, float]]:
    """Watch a real run, with so many users, from its third step on."""
    memory, waited = Memory(), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="slipstream-soak-") as scratch:
        inputs = Path(scratch) / "inputs"
        prepare(
            inputs / "policy", inputs / "train.jsonl", inputs / "heldout.jsonl",
            say=lambda _: None, warm_start_steps=40,
        )  # fmt: skip
        port = held_port()
        live = (f"gateway.port={port}", f"gateway.admin_port={held_port()}", *LIVE_SETTINGS)
        life = start_run(inputs, Path(scratch), "soak", *SETTINGS, *(live if size else ()))
        try:
            Sweep(inputs, Path(scratch), print).wait(life, 3, 300)
            with users(size, Path(scratch), port) if size else nullcontext() as waits:
                watch(life, minutes, (*KINDS, "gateway") if size else KINDS, memory)
            if waits:
                waited = waits.results()
        finally:
            life.end()
    return memory.growths(), waited


def watch(life: LaunchedRun, minutes: float, kinds: Sequence[str], memory: Memory) -> None:
    """Note the memory of a run's processes."""
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < minutes * 60:
        for kind in kinds:
            memory.note(kind, seconds, unique_mb(processes(life, kind)))
        if life.process.poll() is not None:
            sys.exit(f"the run has ended by itself:\n{life.output()[-2000:]}")
        time.sleep(SAMPLE_S)


def simulated() -> list[Growth]:
    """Watch the process of a simulation."""
    trial = simulation(20).run()
    steps = int(20 * SIMULATED_S / trial.makespan_s) + 1
    memory, next_s = Memory(), 0.0

    def advanced(seconds: float) -> None:
        nonlocal next_s
        if seconds >= next_s:
            gc.collect()  # a simulation does not look for garbage itself
            memory.note("simulation", seconds, unique_mb([os.getpid()]))
            next_s = seconds + SIMULATED_S / 200

    simulation(steps).run(advanced)
    return memory.growths()


def simulation(steps: int) -> World:
    """Return a run of the quickstart with so many steps, on the simulator's models."""
    config = recipe("quickstart", [f"run.steps={steps}", "eval.every=0"])
    work = Work(config, seed=1)
    return World(config, recipe_schedule(config), layout_of(config), work.workload())


TABLE: Columns[Growth] = {
    "process": lambda growth: growth.kind,
    "MB": lambda growth: f"{growth.mb:.1f}",
    "MB per hour": lambda growth: f"{growth.mb_per_hour:+.1f}",
    "growth": lambda growth: f"{growth.percent:+.2f} %" + (" (too much)" if growth.has_grown else ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=partial(argparse.RawTextHelpFormatter, width=110)
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the real run")
    parser.add_argument("--users", type=int, default=0, help="users of the real run's gateway")
    arguments = parser.parse_args()
    growths, waited = real(arguments.minutes, arguments.users)
    growths = [*simulated(), *growths]
    Console(width=100).print(rows_table("memory", growths, TABLE))
    print(
        json.dumps(
            {
                "mb": {growth.kind: round(growth.mb, 1) for growth in growths},
                "growth_mb_per_hour": {growth.kind: round(growth.mb_per_hour, 1) for growth in growths},
                "growth_percent": {growth.kind: round(growth.percent, 2) for growth in growths},
                **waited,
            }
        )
    )
    sys.exit(any(growth.has_grown for growth in growths))


if __name__ == "__main__":
    main()
