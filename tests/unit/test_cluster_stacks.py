"""A process that hangs shows where, and one that is stopped is named."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slipstream.backend.cluster import rank_group, stacks
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.stacks import ShownProcess, signal_processes
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.rollout.system import stacks as system_stacks

HANGS = """
import signal, sys, threading
from slipstream.rollout.system.stacks import shows_stacks
shows_stacks()
if "deaf" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
def in_a_collective():
    lock = threading.Lock()
    lock.acquire()
    print("hangs", flush=True)
    lock.acquire()  # in C: no code of Python runs any more
in_a_collective()
"""


@contextmanager
def hanging(path: Path, *how: str) -> Iterator[ShownProcess]:
    process = subprocess.Popen([sys.executable, "-c", HANGS, *how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        yield ShownProcess("node", process.pid, str(path))
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_hangs_in_c_writes_its_stacks_and_a_stopped_one_is_named(tmp_path: Path):
    with hanging(tmp_path / "0.txt") as running, hanging(tmp_path / "1.txt") as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        with hanging(tmp_path / "2.txt") as gone:
            pass
        missing = signal_processes({0: running, 1: stopped, 2: gone})
        assert missing == {1: "is stopped by a signal", 2: "has ended"}
        assert "in in_a_collective" in (tmp_path / "0.txt").read_text()
        assert not (tmp_path / "1.txt").exists()


def test_processes_that_do_not_react_share_one_time_limit_and_keep_no_other_one_from_showing(
    tmp_path: Path, monkeypatch
):
    slept: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(system_stacks.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(system_stacks, "WRITE_S", 0.5)
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(10 * seconds)))
    with ExitStack() as started:
        deaf = [started.enter_context(hanging(tmp_path / f"{n}.txt", "deaf")) for n in range(3)]
        running = started.enter_context(hanging(tmp_path / "3.txt"))
        missing = signal_processes(dict(enumerate([*deaf, running])))
    assert missing == dict.fromkeys(range(3), "does not react to a signal")
    assert sum(slept) < 0.5 + 2 * system_stacks.POLL_S, "one limit for all of them"
    assert "in in_a_collective" in (tmp_path / "3.txt").read_text()


def test_stacks_that_no_disk_takes_end_nothing(tmp_path: Path):
    with hanging(tmp_path / "0.txt") as running:
        (tmp_path / "0.txt").mkdir()
        missing = signal_processes({0: running})
        assert missing[0].startswith("has stacks that cannot be written: Is a directory")


def test_a_call_that_takes_too_long_says_which_rank_keeps_whom_since_when(tmp_path: Path, monkeypatch):
    async def asked(node: str, processes: dict[int, ShownProcess]) -> dict[int, str]:
        assert (node, list(processes)) == ("node", [1])
        return {1: "is stopped by a signal"}

    monkeypatch.setattr(stacks, "_asked", asked)

    class Rank:
        def __init__(self, hangs: bool) -> None:
            async def answer() -> None:
                if hangs:
                    await asyncio.Event().wait()

            self.call = type(
                "Method", (), {"remote": staticmethod(lambda *_: asyncio.ensure_future(answer()))}
            )

    async def main() -> None:
        ranks = [Rank(False), Rank(True)]
        group = RankGroup(lambda: ranks, timeout_s=0.1, logs=tmp_path)  # type: ignore[arg-type, return-value]
        group._shown = {1: ShownProcess("node", 7, "1.txt")}
        await group.call("the training step from version 3", "train")

    try:
        asyncio.run(main())
    except TrainerFailed as error:
        found = str(error)
    assert found.startswith(
        "the training step from version 3 took more than 0 s: rank 1 has not answered since "
    )
    assert found.endswith(
        f"; rank 1 is stopped by a signal (stacks of all ranks: {tmp_path / rank_group.FOLDER})"
    )
    assert "in main" in (tmp_path / "stacks/driver.txt").read_text()
