"""Temporary folders: private, and removed by the next start only when their owner has ended."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from slipstream.rollout.system.temporary import PREFIX, OwnedFolder, sweep
from tests.environment import environment, killed_at_end

OWNER = """
import sys, time
from pathlib import Path
from slipstream.rollout.system.temporary import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]), "engine-0")
(folder.path / "socket").write_text("")
print(folder.path, flush=True)
time.sleep(300)
"""


@contextmanager
def owner(parent: Path):
    """A process that owns a folder, and the folder."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    with killed_at_end(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        yield process, Path(process.stdout.readline().strip())


def test_a_folder_is_named_and_only_for_its_user_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        folder = OwnedFolder(tmp_path, "engine-3-run")
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.name.startswith("slipstream.engine-3-run.")
    folder.remove()
    assert not folder.path.exists()
    folder.remove()


def test_the_folder_of_a_killed_owner_goes_at_the_next_start_and_that_of_a_living_one_stays(tmp_path: Path):
    with owner(tmp_path) as (killed, left), owner(tmp_path) as (_, used):
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert left.exists(), "the case to test"
        mine = OwnedFolder(tmp_path, "engine-0")
        assert not left.exists()
        assert (used / "socket").exists()
        sweep(tmp_path)
        assert mine.path.exists()
        mine.remove()


def test_the_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / f"{PREFIX}engine-0.abcdefgh").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    sweep(tmp_path)
    assert (tmp_path / f"{PREFIX}engine-0.abcdefgh").exists()


def test_other_names_and_links_stay(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("")
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").write_text("")
    (tmp_path / "slipstream-other").mkdir()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "elsewhere",
        f"{PREFIX}link",
        f"{PREFIX}file",
        "slipstream-other",
    }
    assert (elsewhere / "file").exists()


def test_the_parent_is_made(tmp_path: Path):
    folder = OwnedFolder(tmp_path / "a/b", "copy")
    assert folder.path.parent == tmp_path / "a/b"
    folder.remove()


def test_a_folder_that_a_sweep_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make = tempfile.mkdtemp
    made = []

    def make_and_sweep(**arguments):
        made.append(make(**arguments))
        if len(made) == 1:
            sweep(tmp_path)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_sweep)
    folder = OwnedFolder(tmp_path, "x")
    assert [str(folder.path)] == made[1:]
    assert folder.path.is_dir()
    folder.remove()
