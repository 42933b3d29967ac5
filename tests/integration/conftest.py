"""Real parts for the integration tests: a policy, a server, a run as a process with its traces."""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.backend.quickstart import prepare
from tests.environment import environment


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's policy (hardly warmed up), train.jsonl and heldout.jsonl."""
    folder = tmp_path_factory.mktemp("inputs")
    prepare(
        folder / "policy",
        folder / "train.jsonl",
        folder / "heldout.jsonl",
        say=lambda _: None,
        warm_start_steps=40,
    )
    return folder


@dataclass
class LaunchedRun:
    """``slipstream train`` as a user starts it, findable by a mark that all of its descendants inherit."""

    process: subprocess.Popen
    folder: Path
    mark: str
    shared_memory_before: set[str]
    ray_before: set[int]

    def descendants(self) -> list[int]:
        """Every living process that carries the mark, the run itself excepted.

        And Ray's new ones, whatever they carry: some wipe their environment when they set their title.
        """
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                alive = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and self.mark.encode() in environment and int(pid) != self.process.pid:
                    found.append(int(pid))
        return [*found, *sorted(ray_processes() - self.ray_before - set(found))]

    def pids_of(self, text: str) -> list[int]:
        """Descendants whose command line holds ``text``."""
        found = []
        for pid in self.descendants():
            with suppress(OSError):
                if text in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    found.append(pid)
        return found

    def end(self) -> None:
        """Kill whatever is left of it."""
        for pid in [*self.descendants(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        return self.folder.with_suffix(".out").read_text()

    def assert_nothing_left(self) -> None:
        left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in self.descendants()]
        assert not left, left
        assert set(os.listdir("/dev/shm")) <= self.shared_memory_before


def ray_processes() -> set[int]:
    """Those that Ray has given a title."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                found.add(int(pid))
    return found


def run_command(*arguments: str) -> list[str]:
    """The command line of Slipstream, in this environment."""
    return [sys.executable, "-m", "slipstream.backend.cli", *arguments]


FAULTS = Path(__file__).parents[1] / "faults"


def start_run(
    inputs: Path, root: Path, name: str, *overrides: str, resume: bool = False, fault: str | None = None
) -> LaunchedRun:
    """Start, or resume, a small run of the quickstart recipe on ``inputs`` below ``root``.

    ``fault``: a harm done to it (``tests/faults/sitecustomize.py``).
    """
    key, value = "SLIPSTREAM_TEST", uuid.uuid4().hex
    command = run_command(
        "train",
        "quickstart",
        f"run.root={root}",
        f"run.name={name}",
        f"model.path={inputs / 'policy'}",
        f"data.path={inputs / 'train.jsonl'}",
        f"eval.path={inputs / 'heldout.jsonl'}",
        "eval.max_prompts=50",
        "eval.every=0",
        "rollout.batch_size=4",
        "rollout.n_samples_per_prompt=4",
        *overrides,
        *(["--resume"] if resume else []),
    )
    variables = {**os.environ, key: value}
    if fault is not None:
        variables = environment(FAULTS, SLIPSTREAM_FAULT=fault) | {key: value}
    before, ray_before = set(os.listdir("/dev/shm")), ray_processes()
    with (root / f"{name}.out").open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
    return LaunchedRun(process, root / name, f"{key}={value}", before, ray_before)


@pytest.fixture
def launch(inputs: Path, tmp_path: Path) -> Iterator[Callable[..., LaunchedRun]]:
    """Starts runs of the quickstart recipe on ``inputs``; kills whatever a failed test leaves."""
    runs: list[LaunchedRun] = []

    def start(*overrides: str, name: str = "run", **more) -> LaunchedRun:
        runs.append(start_run(inputs, tmp_path, name, *overrides, **more))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
    shutil.rmtree(tmp_path, ignore_errors=True)
