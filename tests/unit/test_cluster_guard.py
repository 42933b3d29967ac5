"""The guard of a run: at the end of the run it ends what is left, and removes its temporary folders."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from slipstream.backend.cluster.guard import VARIABLE
from slipstream.rollout.system.temporary import PREFIX, OwnedFolder
from tests.environment import environment

SLOW_TO_END = """
import sys, time
from pathlib import Path
from slipstream.rollout.system.temporary import OwnedFolder

folder = OwnedFolder(Path(sys.argv[1]), "judge")
memory = bytearray(1) * (1 << 29)  # the kernel takes its time to free it, and drops locks afterwards
print(folder.path, flush=True)
time.sleep(300)
"""


def end(mark: str, folder: Path, temporary: Path, last_words: str = "") -> str:
    """Run a guard whose run has ended. Return what it says. ``last_words``: of an orderly end, a byte."""
    ended = subprocess.run(
        [sys.executable, "-m", "slipstream.backend.cluster.guard", mark, str(folder)],
        input=last_words,
        env=environment(TMPDIR=str(temporary)),
        timeout=240,
        check=True,
        text=True,
        stderr=subprocess.PIPE,
    )
    return ended.stderr


def test_what_carries_the_mark_is_killed_and_its_temporary_folders_are_removed(tmp_path: Path):
    mark, folder = uuid4().hex, tmp_path / "run"
    folder.mkdir()
    owned = OwnedFolder(tmp_path, "judge")
    orphaned = tmp_path / f"{PREFIX}judge.orphaned"
    orphaned.mkdir()
    (orphaned / "left_behind").write_text("")
    program = subprocess.Popen(["sleep", "300"], env=os.environ | {VARIABLE: mark})
    try:
        end(mark, folder, tmp_path)
        assert program.wait(60) < 0
    finally:
        program.kill()
    assert list(tmp_path.iterdir()) == [owned.path]
    owned.remove()


def test_the_folder_of_a_process_that_takes_its_time_to_end_is_removed(tmp_path: Path):
    mark, folder = uuid4().hex, tmp_path / "run"
    folder.mkdir()
    program = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_END, str(tmp_path)],
        env=environment(**{VARIABLE: mark}),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert Path(program.stdout.readline().strip()).is_dir()
        end(mark, folder, tmp_path)
        assert program.wait(60) < 0
    finally:
        program.kill()
        program.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_user_is_told_of_an_end_of_which_the_run_could_not_tell(tmp_path: Path):
    def said(words: str, last_words: str = "") -> str:
        logs = tmp_path / "run/r/session_2026-11-27_18-00-00_1/logs"
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(words)
        return end(uuid4().hex, tmp_path / "run", tmp_path, last_words)

    by_bus = "*** SIGBUS received at time=1795805240 on cpu 1 ***"
    assert said(by_bus, ".") == ""
    assert "/dev/shm" in said(by_bus) and "--shm-size" in said(by_bus)
    killed = said("")
    assert killed.startswith("failed: the run's process has ended without a message: it was killed (kill -9")
    assert "--resume" in killed
