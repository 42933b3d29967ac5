"""The run that is watched: a quickstart that serves users and learns from them, on two engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from slipstream.rollout.system.network import hold_port, port_of

NAME = "isolation"
START_TIMEOUT_S = 300
END_TIMEOUT_S = 120
LOOPS = ("trainer", "judge", "gateway", "engine")
"""What is disturbed. ``engine`` is one of two."""

ENGINES, ENGINE = 2, 1
"""Number of engines, and which one is disturbed."""
LATELY_S = 5.0
ANSWER_S = 3.0
"""Time in which an engine must say that it is well."""

BATCH, SAMPLES, BOUND = 4, 4, 8
SLOTS = (BOUND + 1) * BATCH // 2
"""Groups at one time: half of a batch are groups."""
CHECKPOINTS = 3
"""Steps between two checkpoints. Two such times are within the bound: what is sampled while a killed trainer
is restored can be trained. Turns for which it is too late are not judged."""
EPISODE_S = 8.0
"""Time that an episode takes before it asks: nearly all of its life, so that ``SLOTS / EPISODE_S`` groups are
ready in a second."""


def recipe(root: Path, inputs: Path, port: int, admin_port: int) -> dict[str, object]:
    """Return the recipe: the quickstart's policy, with all rates bounded by latency."""
    return {
        "run": {"name": NAME, "root": str(root), "steps": 1_000_000},
        "prepare": "slipstream.backend.quickstart.prepare",
        "model": {"path": str(inputs / "policy"), "dtype": "float32"},
        "data": {"path": str(inputs / "train.jsonl")},
        "eval": {"path": str(inputs / "heldout.jsonl"), "max_prompts": 8},
        "actor": {
            "use_decoupled_loss": True,
            "recompute_logprobs": True,
            "microbatch_tokens": 4096,
            "optimizer": {"lr": 1e-5},
        },
        "rollout": {
            "max_head_offpolicyness": BOUND,
            "batch_size": BATCH,
            "n_samples_per_prompt": SAMPLES,
            "max_concurrent": 128,
            "sampling": {"temperature": 1.0, "max_new_tokens": 72},
            "workflow": {"path": "benchmarks.isolation.plugins.Slow", "args": {"seconds": EPISODE_S}},
            "reward": {
                "path": "benchmarks.isolation.plugins.Reward",
                "args": {"events": str(root / "rewards")},
            },
            "engine": {
                "count": ENGINES,
                "restarts": 100,
                "answer_timeout_s": ANSWER_S,
                "stream_interval": 8,
                "args": {"max_running_requests": 128, "max_total_tokens": 16384},
            },
        },
        "gateway": {"port": port, "admin_port": admin_port},
        "live": {
            "judge": {
                "path": "benchmarks.isolation.plugins.Judge",
                "args": {"events": str(root / "verdicts")},
            },
            "share": 0.5,
            "max_wait_s": 1.0,
        },
        "checkpoint": {"every": CHECKPOINTS, "keep_last": 2},
    }


class WatchedRun:
    """The run as a process, with everything that it starts."""

    def __init__(self, root: Path, inputs: Path) -> None:
        self.root = root
        self.folder = root / NAME
        self._holders = [hold_port("127.0.0.1") for _ in range(2)]
        ports = [port_of(holder) for holder in self._holders]
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in ports)
        self.key = "isolation-" + os.urandom(16).hex()
        path = root / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(root, inputs, *ports)))
        command = [sys.executable, "-m", "slipstream.backend.cli", "train", str(path)]
        with (root / "output").open("a") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"SGLANG_API_KEY": self.key, "PYTHONPATH": _path()},
            )
        self._driver = psutil.Process(self._process.pid)
        self._last_asked: dict[int, tuple[int, float]] = {}
        """Of each engine: its completions so far, and when the last one was asked for."""

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def output(self) -> str:
        return (self.root / "output").read_text()

    def phase(self) -> str:
        """Return what the run has last told its user."""
        return (self.output().splitlines() or [""])[-1].strip().partition("  ")[2]

    def step_times(self) -> list[float]:
        """Return when each training step was published, in seconds since the epoch."""
        return [record["time"] for record in self.records()]

    def records(self) -> list[dict[str, float]]:
        """Return the metrics of each training step."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if '"reward/mean"' in line and line.endswith("\n")]
        return []

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for a condition; end the benchmark if the run ends before, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.is_running:
                sys.exit(f"the run has ended before {what}:\n{self.output()[-4000:]}")
            if time.monotonic() > deadline:
                sys.exit(f"{what} has not come in {timeout_s} s:\n{self.output()[-4000:]}")
            time.sleep(0.2)

    def engines_serve(self) -> bool:
        """Return whether every engine was lately asked for completions, by what the servers have logged."""
        now = time.monotonic()
        for number in range(ENGINES):
            asked = self._asked(number)
            if asked != self._last_asked.get(number, (0, 0.0))[0]:
                self._last_asked[number] = asked, now
        lately = [asked_s for _, asked_s in self._last_asked.values() if now - asked_s < LATELY_S]
        return len(lately) == ENGINES

    def _asked(self, number: int) -> int:
        with suppress(FileNotFoundError):
            return (self.folder / "logs" / f"engine-{number}.log").read_bytes().count(b"POST /generate")
        return 0

    def processes(self, loop: str) -> list[psutil.Process]:
        """Return the processes that a loop runs in."""
        belongs = {
            "trainer": lambda process: "ray::TrainerActor" in " ".join(process.cmdline()),
            "judge": _is_live_judge,
            "gateway": lambda process: "slipstream.rollout.gateway.gateway_process" in process.cmdline(),
            "engine": lambda process: os.readlink(f"/proc/{process.pid}/fd/1").endswith(
                f"/logs/engine-{ENGINE}.log"
            ),
        }
        found: list[psutil.Process] = []
        for process in self.descendants():
            with suppress(psutil.Error, OSError):
                if belongs[loop](process):
                    found.append(process)
        return found

    def descendants(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return self._driver.children(recursive=True)
        return []

    def cpu_s(self) -> dict[int, float]:
        """Return the CPU time of each process of the run so far."""
        seconds: dict[int, float] = {}
        for process in (self._driver, *self.descendants()):
            with suppress(psutil.Error):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
        return seconds

    def end(self) -> None:
        """End the run in an orderly way, and kill what is left after END_TIMEOUT_S."""
        left = self.descendants()
        if self.is_running:
            self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        for holder in self._holders:
            holder.close()
        if self.is_running:
            self._process.kill()
            self._process.wait()
            for process in left:
                with suppress(psutil.Error):
                    process.kill()


def _is_live_judge(process: psutil.Process) -> bool:
    """Tell a judge of turns from one of episodes: its keeper belongs to the driver and not to a collector."""
    if process.name() != "judge":
        return False
    return not any("ray::" in " ".join(parent.cmdline()) for parent in process.parents())


def _path() -> str:
    """Return a PYTHONPATH on which the run finds the plugins."""
    repository = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")]))
