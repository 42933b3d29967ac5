"""A run on a Ray cluster that others have started (``cluster.type: ray``)."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.environment import environment
from tests.runs.conftest import LaunchedRun
from tests.runs.nursery import descendants_of, kill_descendants_of
from tests.runs.test_run import finish, summary

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture
def cluster() -> Iterator[tuple[int, str]]:
    """The process of a Ray head on loopback, and its address."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    options = "--head --block --node-ip-address=127.0.0.1 --port=0 --num-cpus=8 --include-dashboard=false"
    command = [str(Path(sys.executable).parent / "ray"), "start", *options.split(), f"--temp-dir={folder}"]
    command += ["--object-store-memory=100000000", "--disable-usage-stats"]
    head = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**TOKEN, RAY_kill_child_processes_on_worker_exit="false", PYTHONUNBUFFERED="1"),
    )
    try:
        assert head.stdout is not None
        said = ""
        for line in head.stdout:
            said += line
            if "--address='" in line:
                break
        assert "--address='" in said, said
        yield head.pid, said.rpartition("--address='")[2].partition("'")[0]
    finally:
        kill_descendants_of(head.pid)
        head.kill()
        head.communicate()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow  # a Ray cluster starts for it
@pytest.mark.timeout(900)
def test_a_run_joins_a_cluster_of_others_and_leaves_it_running(
    launch: Callable[..., LaunchedRun], cluster: tuple[int, str]
):
    head, address = cluster
    before = named(head)
    run = launch("run.steps=2", "cluster={type: ray}", variables={**TOKEN, "RAY_ADDRESS": address})
    assert finish(run, 700) == 0, run.output()
    assert summary(run)["exit"] == "done"
    run.assert_nothing_left()
    after = named(head)
    assert {"gcs_server", "raylet"} <= before & after, "the cluster has ended with the run"
    assert not [name for name in after if "TrainerActor" in name or "slipstream" in name]


def named(pid: int) -> set[str]:
    """Return the names of the programs below a process."""
    names = set[str]()
    for each in descendants_of(pid):
        with suppress(OSError):
            line = Path(f"/proc/{each}/cmdline").read_text()
            first = os.path.basename(line.partition("\0")[0])
            names.add(first if first in ("gcs_server", "raylet") else line.replace("\0", " ").strip())
    return names
