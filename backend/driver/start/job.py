"""``job.json``: the Slurm job that drives a run, or drove it last. Who takes the folder over writes it.

Slurm starts a job again under its id after a lost node, a preemption or ``scontrol requeue``. Such a restart
goes on with the run of the job, and with no other one.
"""

import time
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.log_thread import LogThread

JOB = "job.json"

SUBMITTED = "submitted"
"""Folder with the recipe and the environment of each submission of the run: ``commands/frozen.py``."""

JOB_ID, CLUSTER, RESTARTS = "SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"
ARRAY, TASK = "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"
"""Variables of a job, and those of a task of an array."""

STARTS = "SLIPSTREAM_STARTS"
"""Variable with the file in which slurm/train.sbatch notes each start of a job since the newest checkpoint of
the run, and what has ended it. Too many restarts end the job."""

LONGEST_CAUSE = 500
"""Largest number of characters of a cause in that file."""

MOST_NOTES = 1000
"""Largest number of notes that wait for the disk of that file."""

NOTES_S = 10.0
"""Longest wait at the end of a run for the disk to take the notes."""


class Job(BaseModel):
    """Content of ``job.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: str
    """Slurm's name for the cluster: two clusters that share a file system use the same job ids."""
    id: str
    """Number of the job; for a task of an array ARRAY_TASK, since the number of one task is the array's."""

    def __str__(self) -> str:
        return f"job {self.id} on {self.cluster}" if self.cluster else f"job {self.id}"


def job_of(variables: Mapping[str, str]) -> Job | None:
    """Return the job of a process with the environment ``variables``; None outside of a job."""
    number, array, task = (variables.get(name, "") for name in (JOB_ID, ARRAY, TASK))
    number = f"{array}_{task}" if array and task else number
    return Job(cluster=variables.get(CLUSTER, ""), id=number) if number else None


def job_in(folder: Path) -> Job | None:
    """Return the job that a run folder belongs to; None if there is none. Raises OSError."""
    try:
        return Job.model_validate_json((folder / JOB).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def record_job(folder: Path, variables: Mapping[str, str]) -> None:
    """Let a run folder belong to the job of a process with ``variables``, or to none. Raises OSError."""
    job = job_of(variables)
    if job is None:
        (folder / JOB).unlink(missing_ok=True)
    elif job != job_in(folder):
        write_durably(folder / JOB, job.model_dump_json(indent=2) + "\n")


def is_restart(folder: Path, variables: Mapping[str, str]) -> bool:
    """True if a process with ``variables`` is a restart of the job that the run folder belongs to.

    Slurm counts the restarts. Without a count, a job id may come from an interactive allocation, in which a
    user starts one run after the other. Raises OSError.
    """
    count = variables.get(RESTARTS, "")
    if not count.isdigit() or int(count) == 0:
        return False
    job = job_of(variables)
    return job is not None and job == job_in(folder)


def note_progress(variables: Mapping[str, str], step: int) -> None:
    """Forget the earlier starts of the job: a further one goes on after ``step``. Waits for no disk."""
    _note_start(variables, f"checkpoint of step {step}", "w")


def note_end(variables: Mapping[str, str], cause: str) -> None:
    """Note what has ended this start of the job, on one line. Waits ``NOTES_S`` for the disk at most."""
    _note_start(variables, f"end: {' '.join(cause.split())[:LONGEST_CAUSE]}", "a")
    notes_written(NOTES_S)


def notes_written(timeout_s: float) -> bool:
    """Wait until every note is written. Return False if that takes longer than ``timeout_s``."""
    return _notes().flush(timeout_s)


def _note_start(variables: Mapping[str, str], text: str, mode: str) -> None:
    if file := variables.get(STARTS):
        _notes().offer(partial(_write_note, file, f"{time.strftime('%FT%T')} {text}\n", mode))


def _write_note(file: str, line: str, mode: str) -> None:
    with open(file, mode, encoding="utf-8") as starts:
        starts.write(line)


@cache
def _notes() -> LogThread:
    """Return the one writer of notes: a note that a stalled disk holds up must not replace a later one."""
    return LogThread("the starts of the job", MOST_NOTES, "notes")
