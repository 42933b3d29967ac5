"""A program of the user's ends with everything that it has started, and may do what it likes meanwhile."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from slipstream.rollout.system.programs.program import TAIL, ProgramEnd, run_program
from tests.environment import killed_at_end

LEAVE_BEHIND = """
import os, subprocess, sys, time
code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", code])
if os.fork() == 0:  # a daemon: nobody waits for it
    os.setsid()
    grandchild = os.fork()
    if grandchild == 0:
        time.sleep(1000)
    open(sys.argv[1], "w").write(f"{child.pid} {grandchild}")
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


def run(command: list[str], given: bytes = b"") -> ProgramEnd:
    return asyncio.run(asyncio.wait_for(run_program(command, os.environ, given), 60))


def left_behind(file: Path, timeout_s: float = 60.0) -> list[int]:
    """Return the processes whose numbers a program has written."""
    deadline = time.monotonic() + timeout_s
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline, "the program has started nothing"
        time.sleep(0.01)
    return list(map(int, file.read_text().split()))


def gone(pids: list[int], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_program_has_input_output_and_an_exit_code():
    code = "import sys; print(sys.stdin.read()[::-1]); print('no', file=sys.stderr); sys.exit(3)"
    assert run(python(code), b"abc") == ProgramEnd(3, "cba\n", "no\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_is_told_as_shells_tell_it(number):
    assert run(python(f"import os; os.kill(os.getpid(), {int(number)})")).code == 128 + number


def test_a_program_that_cannot_be_started_says_why():
    end = run(["/nowhere/program"])
    assert end.code == 127 and "/nowhere/program cannot be started" in end.errors


def test_much_input_that_nobody_reads_and_much_output_do_no_harm():
    code = "import sys; sys.stdin.close(); [print('x' * 1023) for _ in range(20_000)]; print('the end')"
    end = run(python(code), b"y" * 10_000_000)
    assert end.code == 0 and end.output.endswith("x\nthe end\n") and len(end.output) == TAIL


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_left_of_a_program_that_has_ended(tmp_path, factory):
    with asyncio.Runner(loop_factory=factory) as runner:
        file = tmp_path / "pids"
        program = run_program(python(LEAVE_BEHIND, str(file)), os.environ, b"")
        end = runner.run(asyncio.wait_for(program, 60))
    assert end.code == 0, end.errors
    assert gone(left_behind(file), 0.0)


def test_nothing_is_left_of_a_program_that_is_cancelled(tmp_path):
    async def main() -> list[int]:
        file = tmp_path / "pids"
        command = python(f"{LEAVE_BEHIND}\ntime.sleep(1000)", str(file))
        task = asyncio.create_task(run_program(command, os.environ, b""))
        pids = await asyncio.to_thread(left_behind, file)
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()
        return pids

    assert gone(asyncio.run(main()), 0.0)


def test_nothing_is_left_when_the_process_that_runs_it_is_killed(tmp_path):
    file = tmp_path / "pids"
    owner = f"""
import asyncio, os, sys
from slipstream.rollout.system.programs.program import run_program
command = [sys.executable, "-c", {LEAVE_BEHIND + "time.sleep(1000)"!r}, {str(file)!r}]
asyncio.run(run_program(command, os.environ, b""))
"""
    with killed_at_end(python(owner)) as process:
        pids = left_behind(file)
        process.kill()
    assert gone(pids)
