"""slurm/contain.py: nothing that a command starts outlives it. Needs neither Slurm nor root."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONTAIN = [sys.executable, str(Path(__file__).parents[2] / "slurm" / "contain.py")]
TIMEOUT_S = 30.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*CONTAIN, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137)])
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    done = subprocess.run([*CONTAIN, "--", "bash", "-c", script], timeout=TIMEOUT_S, check=False)
    assert done.returncode == code


def test_a_command_that_cannot_be_run_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([*CONTAIN, "--", "/no/such/command"], timeout=TIMEOUT_S, check=False)
    assert done.returncode == 127
    assert "/no/such/command" in capfd.readouterr().err


def test_a_daemon_in_its_own_session_dies_with_the_command() -> None:
    process = start("--", "bash", "-c", "setsid sleep 1000 >/dev/null & echo $!")
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert not is_alive(int(out))


def test_sigterm_goes_to_the_command_which_decides_what_to_do_with_it() -> None:
    process = start("--", "bash", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    assert first_line(process) == "ready"
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 5


def test_until_stdin_closes_ignores_sigterm_and_ends_with_stdin() -> None:
    process = start("--until-stdin-closes", "--", "bash", "-c", "echo $$; exec sleep 1000")
    pid = int(first_line(process))
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert is_alive(pid)
    assert process.stdin
    process.stdin.close()
    assert process.wait(TIMEOUT_S) == 0
    assert not is_alive(pid)


def test_everything_dies_when_the_parent_is_killed() -> None:
    contained = " ".join([*CONTAIN, "--", "bash", "-c", "'echo $$; exec sleep 1000'"])
    parent = subprocess.Popen(["bash", "-c", f"{contained} & wait"], stdout=subprocess.PIPE, text=True)
    pid = int(first_line(parent))
    parent.kill()
    assert parent.stdout
    assert parent.stdout.read() == ""  # the pipe ends when its last writer, the contained command, has
    parent.wait(TIMEOUT_S)
    assert not is_alive(pid)
