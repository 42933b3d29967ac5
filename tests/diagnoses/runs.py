"""Makes the run of a case: the quickstart's recipe on two cores, whole or until it is killed."""

import subprocess
from itertools import islice
from pathlib import Path

from slipstream.backend.monitor.course import read_course
from slipstream.backend.quickstart import prepare
from tests.diagnoses.cases import Case
from tests.runs.conftest import RunProcess, run_command

LONGEST_S = 900.0
"""Longest wait for a run."""


def make_inputs(folder: Path) -> None:
    """Write the quickstart's policy and prompts."""
    prepare(folder / "policy", folder / "train.jsonl", folder / "heldout.jsonl", say=lambda _: None)


def folder_name(case: Case) -> str:
    """Return the name of the run of a case."""
    return case.name.replace(" ", "-").replace(",", "")


def make_run(case: Case, inputs: Path, root: Path) -> Path:
    """Make the run of a case, and return its folder. Raises TimeoutError."""
    name = folder_name(case)
    prompts = inputs / "train.jsonl"
    if case.rows is not None:
        with prompts.open() as lines:
            kept = list(islice(lines, case.rows))
        prompts = root / f"{name}.jsonl"
        prompts.write_text("".join(kept))
    command = run_command(
        "train",
        "quickstart",
        f"run.root={root}",
        f"run.name={name}",
        f"run.steps={case.steps}",
        f"model.path={inputs / 'policy'}",
        f"data.path={prompts}",
        "eval=null",
        "checkpoint.every=1000000",
        "rollout.batch_size=8",
        *case.settings,
    )
    with (root / f"{name}.out").open("w") as output:
        process = RunProcess(command, output)
        try:
            _wait(process, case, root / name)
        finally:
            process.end()
    return root / name


def _wait(process: RunProcess, case: Case, folder: Path) -> None:
    """Wait until the run has ended. A run that is to be killed is looked at twice a second."""
    for _ in range(int(2 * LONGEST_S)):
        try:
            process.wait(0.5)
            return
        except subprocess.TimeoutExpired:
            steps = read_course(folder).steps if case.kill_at is not None else ()
            if case.kill_at is not None and case.kill_at in steps:
                process.kill()
                process.wait(60)
                return
    raise TimeoutError(f"{case.name} has not ended within {LONGEST_S:.0f} s")
