"""``job.json``: the Slurm job that has made a run folder.

Slurm starts a job again under its id after a lost node, a preemption or ``scontrol requeue``. Such a restart
goes on with the run that the job has made, and with no other one.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from slipstream.rollout.system.durable import write_durably

JOB = "job.json"
JOB_ID, CLUSTER, RESTARTS = "SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT"
"""Variables of a job. Each task of an array has a job id of its own, which stays when it is requeued."""


class Job(BaseModel):
    """Content of ``job.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: str
    """Slurm's name for the cluster: two clusters that share a file system use the same job ids."""
    id: str

    def __str__(self) -> str:
        return f"job {self.id} on {self.cluster}" if self.cluster else f"job {self.id}"

    def write(self, folder: Path) -> None:
        """Write ``job.json`` into the run folder. Raises OSError."""
        write_durably(folder / JOB, self.model_dump_json(indent=2) + "\n")


def job_of(variables: Mapping[str, str]) -> Job | None:
    """Return the job of a process with the environment ``variables``; None outside of a job."""
    number = variables.get(JOB_ID, "")
    return Job(cluster=variables.get(CLUSTER, ""), id=number) if number else None


def maker_of(folder: Path) -> Job | None:
    """Return the job that has made a run folder; None if it is not known. Raises OSError."""
    try:
        return Job.model_validate_json((folder / JOB).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def is_restart(folder: Path, variables: Mapping[str, str]) -> bool:
    """True if a process with ``variables`` is a restart of the job that has made the run folder.

    Slurm counts the restarts. Without a count, a job id may come from an interactive allocation, in which a
    user starts one run after the other. Raises OSError.
    """
    count = variables.get(RESTARTS, "")
    if not count.isdigit() or int(count) == 0:
        return False
    job = job_of(variables)
    return job is not None and job == maker_of(folder)
