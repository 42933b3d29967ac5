"""What a killed process leaves in /dev/shm is removed; what belongs to another one stays."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from slipstream.backend.cluster import rank_group
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.rollout.engine.leftovers import ProcessIdentity, segments_of_torch, this_process
from tests.environment import environment


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file as torch makes one in this process."""
    path = Path(f"/dev/shm/torch_{os.getpid()}_{uuid4().int % 10**9}_0")
    path.write_bytes(b"1")
    yield path
    path.unlink(missing_ok=True)


ELSEWHERE = "another boot, or another node's process ids"


def test_the_segments_of_a_process_are_found_by_its_identity(segment: Path):
    # Other tests of this process may have shared tensors.
    assert segment in segments_of_torch(this_process())
    assert all(f"_{os.getpid()}_" in each.name for each in segments_of_torch(this_process()))


def test_a_process_of_another_node_with_the_same_id_has_none_here(segment: Path):
    assert segments_of_torch(replace(this_process(), machine=ELSEWHERE)) == set()


def test_a_process_that_ended_has_none_when_another_one_has_its_id_now(segment: Path):
    assert segments_of_torch(replace(this_process(), started=1)) == set()


def test_a_process_that_ended_is_found_while_nobody_has_its_id():
    program = (
        "from slipstream.rollout.engine.leftovers import this_process as t; p = t(); print(p.pid, p.started)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    pid, started = map(int, done.stdout.split())
    path = Path(f"/dev/shm/torch_{pid}_{uuid4().int % 10**9}_0")
    path.write_bytes(b"1")
    try:
        assert segments_of_torch(ProcessIdentity(this_process().machine, pid, started)) == {path}
    finally:
        path.unlink()


def test_the_segments_of_another_user_are_not_ours(segment: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: segment.stat().st_uid + 1)
    assert segments_of_torch(this_process()) == set()


@pytest.mark.parametrize(("machine", "stays"), [(None, False), (ELSEWHERE, True)])
def test_the_end_of_the_trainer_removes_what_its_ranks_leave_on_this_node_only(
    segment: Path, monkeypatch: pytest.MonkeyPatch, machine: str | None, stays: bool
):
    identity = this_process() if machine is None else replace(this_process(), machine=machine)
    monkeypatch.setattr(rank_group, "kill", lambda actor: None)
    ranks = RankGroup(lambda: [object()], timeout_s=1, logs=Path("logs"))  # type: ignore[list-item]
    ranks._processes = [identity]
    ranks.kill()
    assert segment.exists() == stays
