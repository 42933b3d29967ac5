"""Real parts for the integration tests: a policy, and runs as processes that can be watched and ended."""

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from slipstream.backend.quickstart import prepare
from tests.environment import environment
from tests.runs.nursery import descendants_of


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


NURSERY = Path(__file__).with_name("nursery.py")


class RunProcess:
    """The process of a run, with the methods of ``subprocess.Popen`` that tests need, inside a nursery."""

    def __init__(
        self,
        command: list[str],
        output: IO[str],
        *,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._shared_memory_before = set(os.listdir("/dev/shm"))
        self._nursery = subprocess.Popen(
            [sys.executable, "-I", "-S", str(NURSERY), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=cwd,
            env=environment,
            bufsize=0,
        )
        assert self._nursery.stdin is not None and self._nursery.stdout is not None
        self._input, self._answers = self._nursery.stdin, self._nursery.stdout
        self.pid = int(self._answers.readline())
        self._private = self._answers.readline() == b"private\n"
        self._handle = os.pidfd_open(self.pid)  # before it is reaped, so that it is of no later process
        self._input.write(b"\n")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._answers], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("slipstream train", timeout or 0.0)
            self.returncode = int(self._answers.readline())
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def descendants(self) -> list[int]:
        """Return every living process that the run started, directly or not."""
        return [pid for pid in descendants_of(self._nursery.pid) if pid != self.pid]

    def shared_memory(self) -> set[str]:
        """Return what is in the run's own /dev/shm; where it has none, what is new in the machine's."""
        names = set(os.listdir(self.shared_memory_folder))
        return names if self._private else names - self._shared_memory_before

    @property
    def shared_memory_folder(self) -> Path:
        """Its /dev/shm, as other processes find it."""
        return Path(f"/proc/{self._nursery.pid}/root/dev/shm" if self._private else "/dev/shm")

    def end(self) -> None:
        """Kill the run and everything that is left of it."""
        if self._nursery.returncode is None:
            self._input.close()
            self._nursery.wait()
            os.close(self._handle)


@dataclass
class LaunchedRun:
    """``slipstream train`` as a user starts it, and everything that it starts."""

    process: RunProcess
    folder: Path

    def descendants(self) -> list[int]:
        """Return every living process of the run, the driver excepted."""
        return self.process.descendants()

    def pids_of(self, text: str) -> list[int]:
        """Return the descendants whose command line holds ``text``."""
        pids = []
        for pid in self.descendants():
            with suppress(OSError):
                if text in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    pids.append(pid)
        return pids

    def judges(self) -> list[int]:
        """Return the judges, which are forks of their keepers and share their command lines."""
        pids = []
        for pid in self.descendants():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "judge\n":
                    pids.append(pid)
        return pids

    def end(self) -> None:
        """Kill whatever is left of the run."""
        self.process.end()

    def output(self) -> str:
        return self.folder.with_suffix(".out").read_text()

    def assert_nothing_left(self) -> None:
        processes = []
        for pid in self.descendants():
            with suppress(OSError):
                processes.append(Path(f"/proc/{pid}/cmdline").read_text())
        assert not processes, processes
        assert not self.process.shared_memory()


def run_command(*arguments: str) -> list[str]:
    """The command line of Slipstream, in this environment."""
    return [sys.executable, "-m", "slipstream.backend.cli", *arguments]


FAULTS = Path(__file__).parents[1] / "faults"


def start_run(
    inputs: Path,
    root: Path,
    name: str,
    *overrides: str,
    resume: bool = False,
    fault: str | None = None,
    by: str = "train",
    variables: dict[str, str] | None = None,
) -> LaunchedRun:
    """Start, or resume, a small run of the quickstart recipe on ``inputs`` below ``root``.

    ``fault``: a harm done to it (``tests/faults/sitecustomize.py``). ``by``: the command that runs it.
    ``variables``: further ones of its environment.
    """
    command = run_command(
        by,
        "quickstart",
        f"run.root={root}",
        f"run.name={name}",
        f"model.path={inputs / 'policy'}",
        f"data.path={inputs / 'train.jsonl'}",
        f"eval.path={inputs / 'heldout.jsonl'}",
        "eval.max_prompts=20",
        "eval.every=0",
        "rollout.batch_size=4",
        "rollout.n_samples_per_prompt=4",
        *overrides,
        *(["--resume"] if resume else []),
    )
    folders, harm = ([], {}) if fault is None else ([FAULTS], {"SLIPSTREAM_FAULT": fault})
    given = environment(*folders, **harm, **(variables or {})) if harm or variables else None
    with (root / f"{name}.out").open("a") as output:
        return LaunchedRun(RunProcess(command, output, environment=given), root / name)


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
