"""``slipstream status``, ``logs`` and ``stop``: a run by its folder and by Slurm, without asking the run.

RUN ──► job.json ─────► Slurm: waits for what, runs where, has ended how
   └──► driver.json ──► outside of a job: the process, where it can be seen from here
   └──► driver.log, metrics.jsonl, summary.json, logs/
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.commands import slurm_jobs
from slipstream.backend.commands.outcome import Failed, WrongInput, not_a_folder
from slipstream.backend.commands.slurm_jobs import JobFacts
from slipstream.backend.driver.start.job import SUBMITTED, job_in
from slipstream.backend.driver.start.run_folder import LOGS, OF_A_RUN
from slipstream.backend.monitor.course import read_course
from slipstream.backend.monitor.progress import DRIVER_LOG
from slipstream.backend.monitor.summary import read_end
from slipstream.backend.monitor.units import clock_face
from slipstream.rollout.ledger.lease.driver_file import DRIVER, Driver, Machine, look

EVERY_S = 2.0
"""Seconds between two looks at a run that is to end. Neither Slurm nor a process of another session tells."""

CANCEL_S = 300.0
"""Longest wait for a job to end after scancel, and for a process after the second signal."""
APART_S = 1.0
"""Time between two signals to a process: two that are pending at once arrive as one."""

ENDS_SHOWN = 16
"""Largest number of log files whose ends are shown."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Standing:
    """A run at one moment."""

    name: str
    folder: Path | None
    """None: only its job is known."""
    job: str | None
    """Number of its job; None outside of Slurm."""
    facts: JobFacts | None
    """What Slurm says of the job; None: nothing."""
    driver: Driver | None
    lives: bool | None
    """Whether the driver's process lives; None: it cannot be seen from here."""
    forgotten: bool = False
    """Slurm does not know the job any more: it forgets jobs some minutes after their end."""

    @property
    def is_over(self) -> bool:
        """True if nothing of the run is left to be ended, as far as can be seen from here."""
        if self.facts is not None:
            return self.facts.is_over
        return self.driver is None or self.lives is False or (self.forgotten and not self.lives)


def standing(run: str) -> Standing:
    """Return where a run stands. ``run``: its folder, or the number of a job.

    Raises WrongInput and Failed.
    """
    folder = Path(run)
    if not folder.is_dir() and run.replace("_", "", 1).isdigit():
        return _standing_of_job(run)
    if not folder.is_dir() or not any((folder / name).exists() for name in (SUBMITTED, *OF_A_RUN)):
        why = "it is not the folder of a run" if folder.is_dir() else not_a_folder(folder)
        raise WrongInput(
            f"{run}: {why}; expected the folder of a run, such as runs/quickstart, or the number of a job of "
            "Slurm"
        )
    try:
        job, driver = job_in(folder), look(folder).driver
    except OSError as error:
        raise WrongInput(f"cannot read {error.filename or folder}: {error.strerror or error}") from None
    asked = job is not None and slurm_jobs.is_here() and slurm_jobs.is_asked(job.cluster)
    facts = slurm_jobs.job_facts(job.id) if job is not None and asked else None
    return Standing(
        folder.resolve().name,
        folder,
        job.id if job else None,
        facts,
        driver,
        None if driver is None else driver.lives(Machine.this()),
        forgotten=asked and facts is None,
    )


def _standing_of_job(job: str) -> Standing:
    facts = slurm_jobs.job_facts(job)
    if facts is None:
        raise WrongInput(
            f"{job}: Slurm knows no job of this number; expected another one, or the folder of a run"
        )
    return Standing(f"job {job}", None, job, facts, None, None)


# ---- status


def status(run: str, say: Say) -> None:
    """Say where a run stands and what it waits for. Raises WrongInput and Failed."""
    now = standing(run)
    say(f"{now.name}: {_place(now)}")
    if now.folder is None:
        return
    for line in _course(now.folder, time.time()):
        say(f"  {line}")
    if not now.is_over and (last := _last_line(now.folder)):
        say(f"  now: {last}")


def _place(now: Standing) -> str:
    end = read_end(now.folder) if now.folder is not None else None
    ended = f"the run has ended: {end}" if end else "the run has no summary, so it was killed"
    if now.facts is not None:
        return f"job {now.job} {_of_job(now.facts)}" + (
            f"; {ended}" if now.facts.is_over and now.folder is not None else ""
        )
    if now.forgotten and now.is_over:
        return f"job {now.job} is over, and Slurm has forgotten it; {ended}"
    if now.driver is None:
        return "it has never had a driver"
    if now.lives is None and not now.driver.ended:
        job = f" of job {now.job}" if now.job else ""
        silent_s = max(0.0, time.time() - _sign_of_life(now))
        return f"{now.driver}{job}; last sign of life {clock_face(silent_s)} ago, cannot be seen from here"
    return f"runs as {now.driver}" if now.lives else ended


def _of_job(facts: JobFacts) -> str:
    restarts = (
        f", start {int(facts.restarts) + 1}" if facts.restarts.isdigit() and facts.restarts != "0" else ""
    )
    if facts.waits:
        start = f"; expected to start at {facts.start}" if facts.start else ""
        return f"waits: {facts.reason or facts.state}{restarts}{start}"
    if facts.is_over:
        return f"has ended: {facts.state}, exit code {facts.exit_code.partition(':')[0]}{restarts}"
    until = f", until {facts.end}" if facts.end else ""
    return f"is {facts.state.lower()} on {facts.nodes}{until}{restarts}"


def _sign_of_life(now: Standing) -> float:
    assert now.folder is not None
    return (now.folder / DRIVER).stat().st_mtime


def _course(folder: Path, now: float) -> Iterator[str]:
    course = read_course(folder)
    if not course.steps:
        yield "no step is finished yet"
        return
    step = max(course.steps)
    record = course.steps[step]
    total = f"/{course.total_steps}" if course.total_steps else ""
    lag = record.get("staleness/head_max")
    bound = f"/{course.bound}" if course.bound is not None else ""
    figures = [f"step {step}{total}", *([f"lag {lag}{bound}"] if lag is not None else [])]
    yield f"{', '.join(figures)}; last step {clock_face(max(0.0, now - record['time']))} ago"


def _last_line(folder: Path) -> str:
    lines = _end_of(folder / DRIVER_LOG, 1)
    return lines[0].strip() if lines else ""


# ---- logs


def logs(run: str, names: list[str], lines: int, say: Say) -> None:
    """Say the paths of a run's logs and how they end, of those whose name begins with one of ``names``.

    Raises WrongInput and Failed.
    """
    now = standing(run)
    files = [file for file in _logs_of(now) if not names or file.stem.startswith(tuple(names))]
    if not files:
        wanted = f" that begins with {' or '.join(names)}" if names else ""
        raise WrongInput(f"{run}: it has no log{wanted} so far")
    for number, file in enumerate(files):
        say(f"==> {file}")
        if number < ENDS_SHOWN:
            for line in _end_of(file, lines):
                say(line)
    if len(files) > ENDS_SHOWN:
        say(
            f"the ends of {ENDS_SHOWN} of {len(files)} logs are shown; name others, such as "
            f"`slipstream logs {run} trainer-7`"
        )


def _logs_of(now: Standing) -> list[Path]:
    """Return the logs that exist: of the job, the driver, the trainer, the engines, and the others."""
    order = {kind: number for number, kind in enumerate(("trainer", "engine"))}
    output = [Path(now.facts.output)] if now.facts is not None and now.facts.output else []
    if now.folder is None:
        return [file for file in output if file.is_file()]
    parts = sorted(
        (now.folder / LOGS).glob("*.log"),
        key=lambda file: (order.get(file.stem.split("-")[0], len(order)), len(file.stem), file.stem),
    )
    return [file for file in (*output, now.folder / DRIVER_LOG, *parts) if file.is_file()]


def _end_of(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file, of its last 64 KiB at most."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2**16))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:] if lines else []


# ---- stop


def stop(run: str, wait_s: float, say: Say) -> None:
    """End a run: after its step and with a checkpoint, then at once. Returns when it has ended.

    ``wait_s``: longest wait for the orderly end. Raises WrongInput and Failed.
    """
    now = standing(run)
    if now.is_over:
        say(f"{now.name}: {_place(now)}")
        return
    if now.facts is not None and now.job is not None:
        _stop_job(run, now.job, now.facts, wait_s, say)
    elif now.driver is not None and now.lives:
        _stop_process(run, now.driver, wait_s, say)
    elif now.job is not None:
        raise WrongInput(
            f"{now.name} runs in job {now.job}, which cannot be asked from here: stop it on a login node of "
            "its cluster, or set SLURM_CLUSTERS"
        )
    else:
        raise WrongInput(f"{now.name} runs as {now.driver}, which cannot be seen from here: stop it there")
    now = standing(run)
    say(f"{now.name}: {_place(now)}")


def _stop_job(run: str, job: str, facts: JobFacts, wait_s: float, say: Say) -> None:
    if facts.runs:
        say(f"job {job} is asked to end after its training step; waiting for {wait_s:.0f} s at most")
        slurm_jobs.cancel(job, "--batch", "--signal=TERM")
        if _has_ended(run, wait_s, or_waits=True) and standing(run).is_over:
            return
        say(f"job {job} {'still runs' if _runs(run) else 'is about to start again'}: ending it")
    slurm_jobs.cancel(job)
    if not _has_ended(run, CANCEL_S):
        raise Failed(
            f"job {job} has not ended in {CANCEL_S:.0f} s after scancel: see `scontrol show job {job}`"
        )


def _stop_process(run: str, driver: Driver, wait_s: float, say: Say) -> None:
    say(f"{driver} is asked to end after its training step; waiting for {wait_s:.0f} s at most")
    first_s = max(wait_s, APART_S)
    for limit_s, then in ((first_s, "still runs: ending it at once"), (CANCEL_S, "still runs")):
        try:
            os.kill(driver.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        except PermissionError:
            raise Failed(f"{driver} is another user's: ask that user to stop the run") from None
        if _has_ended(run, limit_s):
            return
        say(f"{driver} {then}")
    raise Failed(
        f"{driver} has not ended in {CANCEL_S:.0f} s after the second SIGTERM: see {run}/{DRIVER_LOG}"
    )


def _runs(run: str) -> bool:
    facts = standing(run).facts
    return facts is not None and facts.runs


def _has_ended(run: str, limit_s: float, *, or_waits: bool = False) -> bool:
    """Wait for the end of a run. ``or_waits``: its job may as well wait to be started again."""
    deadline = time.monotonic() + limit_s
    while not (now := standing(run)).is_over and not (or_waits and now.facts is not None and now.facts.waits):
        if time.monotonic() > deadline:
            return False
        time.sleep(EVERY_S)
    return True
