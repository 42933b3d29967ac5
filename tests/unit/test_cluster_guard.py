"""The guard of a run: at the end of the run it ends what is left, and removes its temporary folders."""

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from slipstream.backend.cluster.guard import VARIABLE
from slipstream.rollout.temporary import PREFIX, OwnedFolder
from tests.environment import environment


def test_what_carries_the_mark_is_killed_and_its_temporary_folders_are_removed(tmp_path: Path):
    mark, folder = uuid4().hex, tmp_path / "run"
    folder.mkdir()
    owned = OwnedFolder(tmp_path, "judge")
    orphaned = tmp_path / f"{PREFIX}judge.orphaned"
    orphaned.mkdir()
    (orphaned / "left_behind").write_text("")
    program = subprocess.Popen(["sleep", "300"], env=os.environ | {VARIABLE: mark})
    try:
        subprocess.run(
            [sys.executable, "-m", "slipstream.backend.cluster.guard", mark, str(folder)],
            stdin=subprocess.DEVNULL,
            env=environment(TMPDIR=str(tmp_path)),
            timeout=60,
            check=True,
        )
        assert program.wait(10) < 0
    finally:
        program.kill()
    assert list(tmp_path.iterdir()) == [owned.path]
    owned.remove()
