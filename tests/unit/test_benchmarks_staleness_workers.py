"""Worker processes of the staleness study: no job is lost, and no worker outlives its user."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from benchmarks.staleness_study.workers import ATTEMPTS, WorkerFailed, completed

ROOT = Path(__file__).parents[2]
LONGEST_S = 120.0


# ---- work, which worker processes import


def doubled(job: int) -> int:
    return 2 * job


def killed_at_first(folder: Path, job: int) -> int:
    """Job 1 kills its worker once."""
    first = folder / f"first-{job}"
    if job == 1 and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * job


def always_killed(job: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return job


def raises(job: int) -> int:
    raise ValueError(f"no such job: {job}")


def endless(folder: Path, job: int) -> None:
    (folder / f"pid-{os.getpid()}").touch()
    time.sleep(10 * LONGEST_S)


# ---- tests


def test_every_job_is_done_once_by_several_workers():
    assert sorted(completed(doubled, range(5), workers=2)) == [(job, 2 * job) for job in range(5)]


def test_a_job_whose_worker_is_killed_is_done_again(tmp_path: Path):
    done = completed(partial(killed_at_first, tmp_path), range(3), workers=1)
    assert list(done) == [(0, 0), (1, 2), (2, 4)]
    assert (tmp_path / "first-1").exists()


def test_a_job_that_gets_every_worker_killed_is_given_up():
    with pytest.raises(WorkerFailed, match=f"7: {ATTEMPTS} workers were killed .* SIGKILL"):
        list(completed(always_killed, [7], workers=1))


def test_an_error_in_a_job_is_raised_and_no_worker_stays(tmp_path: Path):
    with pytest.raises(WorkerFailed, match="3: the worker ended with code 1"):
        list(completed(raises, [3], workers=1))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_process_that_uses_them(tmp_path: Path, ending: signal.Signals):
    code = (  # a process that a shell has put into the background ignores SIGINT
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from functools import partial; from pathlib import Path\n"
        "from tests.unit.test_benchmarks_staleness_workers import endless\n"
        "from benchmarks.staleness_study.workers import completed\n"
        f"list(completed(partial(endless, Path({str(tmp_path)!r})), range(2), workers=2))\n"
    )
    user = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        workers = [int(path.name.removeprefix("pid-")) for path in tmp_path.iterdir()]
        user.send_signal(ending)
        user.wait(LONGEST_S)
        wait_until(lambda: not any(map(is_alive, workers)))
    finally:
        user.kill()
        user.wait()


def wait_until(condition) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
