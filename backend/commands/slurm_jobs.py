"""What Slurm says of a job, and how a job is ended: its commands, on any machine that has them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.backend.commands.outcome import Failed

CONTAINER, IMAGE, MOUNTS = "SLIPSTREAM_CONTAINER", "SLIPSTREAM_CONTAINER_IMAGE", "SLIPSTREAM_CONTAINER_MOUNTS"
"""Variables by which slurm/train.sbatch knows the container of a job."""

GPUS = "SLIPSTREAM_GPUS_PER_NODE"
"""Variable by which slurm/ray_node.sh knows the GPUs of a node where Slurm does not count them."""

ANSWER_TIMEOUT_S = 30.0
"""Longest time for a command of Slurm, which answers in milliseconds unless its controller is down."""

_TUNED = ("SCANCEL_", "SCONTROL_", "SQUEUE_", "SLURM_TIME_FORMAT")
"""Beginnings of variables by which these commands ask back, leave jobs out, or write times in other words."""

_FIELD = re.compile(r"([\w:/]+)=(.*?)(?=\s+[\w:/]+=|\s*$)")
_UNKNOWN = re.compile(r"invalid job id", re.IGNORECASE)
_NOTHING = ("", "None", "(null)", "Unknown", "N/A")

WAITS = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
    | {"CONFIGURING", "POWER_UP_NODE"}
)
RUNS = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"})
ENDING = frozenset({"COMPLETING", "STAGE_OUT"})


@dataclass(frozen=True)
class JobFacts:
    """A job as ``scontrol show job`` shows it. Fields that it does not show are empty."""

    state: str
    reason: str
    """Why it waits."""
    nodes: str
    start: str
    """When it began, or is expected to."""
    end: str
    exit_code: str
    restarts: str
    output: str

    @property
    def waits(self) -> bool:
        return self.state in WAITS

    @property
    def runs(self) -> bool:
        return self.state in RUNS

    @property
    def is_over(self) -> bool:
        return self.state not in WAITS | RUNS | ENDING


def container_mounts(folders: Iterable[str]) -> str:
    """Return what apptainer and pyxis show of ``SOURCE`` and ``SOURCE:TARGET``."""
    return ",".join(dict.fromkeys(path if ":" in path else f"{path}:{path}" for path in folders))


def is_here() -> bool:
    """True if this machine has the commands of Slurm."""
    return shutil.which("scontrol") is not None and shutil.which("scancel") is not None


def is_asked(cluster: str) -> bool:
    """True if Slurm's commands ask the cluster of this name, or may do so. Raises Failed.

    ``cluster``: empty if it is not known.
    """
    asked = os.environ.get("SLURM_CLUSTERS")
    if not asked:
        match = re.search(
            r"^ClusterName\s*=\s*(\S+)", called("scontrol", "show", "config").stdout, re.MULTILINE
        )
        asked = match[1] if match else cluster
    return not cluster or asked.casefold() == cluster.casefold()


def job_facts(job: str) -> JobFacts | None:
    """Return what Slurm says of a job; None if it does not know the job, or not any more. Raises Failed."""
    ended = called("scontrol", "--oneliner", "show", "job", job)
    if ended.returncode:
        if _UNKNOWN.search(ended.stderr):
            return None
        raise Failed(f"scontrol show job {job}: {ended.stderr.strip() or f'exit code {ended.returncode}'}")
    return parsed(ended.stdout)


def parsed(record: str) -> JobFacts | None:
    """Return the job of ``scontrol --oneliner show job``; None if there is none in it.

    An array has a line for each task: one that runs stands for all, or else one that is not over.
    """
    tasks = filter(None, (_task(line) for line in record.splitlines()))
    return min(tasks, key=lambda task: (not task.runs, task.is_over), default=None)


def _task(line: str) -> JobFacts | None:
    fields = {name: value.strip() for name, value in _FIELD.findall(line)}
    if "JobState" not in fields:
        return None

    def field(name: str) -> str:
        value = fields.get(name, "")
        return "" if value in _NOTHING else value

    return JobFacts(
        state=field("JobState"),
        reason=field("Reason"),
        nodes=field("NodeList"),
        start=field("StartTime"),
        end=field("EndTime"),
        exit_code=field("ExitCode"),
        restarts=field("Restarts"),
        output=field("StdOut"),
    )


def cancel(job: str, *options: str) -> None:
    """Run ``scancel OPTIONS JOB``. Raises Failed."""
    ended = called("scancel", *options, job)
    if ended.returncode:
        raise Failed(f"scancel {job}: {ended.stderr.strip() or f'exit code {ended.returncode}'}")


def called(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's. Raises Failed if it is missing, or does not answer."""
    try:
        return subprocess.run(
            command,
            env={name: value for name, value in os.environ.items() if not name.startswith(_TUNED)},
            capture_output=True,
            text=True,
            errors="replace",  # comments and names of jobs are in any encoding
            timeout=ANSWER_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise Failed(
            f"{command[0]} has not answered in {ANSWER_TIMEOUT_S:.0f} s: is Slurm's controller up?"
        ) from None
    except FileNotFoundError:
        raise Failed(f"no {command[0]} on the PATH: run this on a login node of the cluster") from None
