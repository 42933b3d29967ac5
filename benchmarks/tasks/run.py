"""A run: `slipstream train` with the recipe of a task, and what came out of it."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.commands.audit import audit_run
from slipstream.backend.monitor.course import Record, read_course
from slipstream.backend.monitor.summary import read_summary

ROOT = Path(__file__).parents[2]
RUNS = Path("runs/tasks")

TASKS = {
    "sums": "configs/recipes/quickstart.yaml",
    **{
        name: f"examples/tasks/{name}/recipe.yaml"
        for name in ("sorting", "extraction", "countdown", "hangman", "search")
    },
}
"""Recipes, by the names of their tasks."""

TIMEOUT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """What a policy has learned."""

    task: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    """Training steps, and the mean reward of the held-out prompts after them."""
    cpu_s: float
    minutes: float
    max_lag: int
    discrepancies: int
    """Number of discrepancies that the audit has found."""

    @property
    def before(self) -> float:
        return self.curve[0][1]

    @property
    def after(self) -> float:
        return self.curve[-1][1]


def learned(task: str, seed: int) -> Path:
    """Return the folder of a run that has ended well, which is done unless it is there.

    Raises RuntimeError, with its output, if the run does not end well.
    """
    folder = ROOT / RUNS / f"{task}-{seed}"
    summary = read_summary(folder)
    if summary is not None and summary.exit == "done":
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_suffix(".out")
    command = [sys.executable, "-m", "slipstream.backend.cli", "train", TASKS[task], *overrides(task, seed)]
    with output.open("w") as out:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, timeout=TIMEOUT_S)
    if ended.returncode:
        raise RuntimeError(
            f"slipstream train has ended with {ended.returncode}:\n{output.read_text()[-4000:]}"
        )
    return folder


def overrides(task: str, seed: int) -> list[str]:
    """Return what a run changes in its recipe: its name, its seed and the places of its inputs."""
    inputs = RUNS / f".inputs-{task}-{seed}"
    return [
        *(f"run.name={task}-{seed}", f"run.root={RUNS}", f"run.seed={seed}"),
        *(f"model.path={inputs}/policy", f"data.path={inputs}/train.jsonl"),
        f"eval.path={inputs}/heldout.jsonl",
    ]


def outcome(task: str, seed: int, folder: Path) -> Outcome:
    """Read what a run has learned, and audit it."""
    course, summary = read_course(folder), read_summary(folder)
    assert summary is not None
    return Outcome(
        task,
        seed,
        tuple(course.series("eval/reward")),
        sum(map(cpu_seconds, course.steps.values())),
        summary.wall_s / 60,
        summary.head_lag_max or 0,
        len(audit_run(folder, print).discrepancies),
    )


def cpu_seconds(step: Record) -> float:
    """Return the CPU time of all processes of a run during a training step."""
    cores = [
        value for tag, value in step.items() if tag.startswith("process/") and tag.endswith("_cpu_cores")
    ]
    return step["perf/step_s"] * sum(cores)
