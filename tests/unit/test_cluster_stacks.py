"""A process that hangs shows where, and one that is stopped is named."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.backend.cluster import rank_group, stacks
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.stacks import ShownProcess, signal_processes
from slipstream.backend.cluster.trainer_failed import TrainerFailed

HANGS = """
import faulthandler, signal, sys, threading
faulthandler.register(signal.SIGUSR1, open(sys.argv[1], "a"), all_threads=True)
def in_a_collective():
    lock = threading.Lock()
    lock.acquire()
    print("hangs", flush=True)
    lock.acquire()  # in C: no code of Python runs any more
in_a_collective()
"""


@contextmanager
def hanging(path: Path) -> Iterator[ShownProcess]:
    process = subprocess.Popen([sys.executable, "-c", HANGS, str(path)], stdout=subprocess.PIPE, text=True)
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
        gone = running._replace(path=str(tmp_path / "2.txt"))
        missing = signal_processes({0: running, 1: stopped, 2: gone})
        assert missing == {1: "is stopped by a signal", 2: "has ended"}
        assert "in in_a_collective" in (tmp_path / "0.txt").read_text()
        assert not (tmp_path / "1.txt").read_text()


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
