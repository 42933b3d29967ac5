"""Local ranks: the first failure ends all of them, says whose it was, and none outlives its parent."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.backend.cluster.local_ranks import RankFailed, run_ranks
from tests.environment import environment, killed_at_end

ROOT = Path(__file__).parents[2]


def product(rank, factor: int) -> tuple[int, int, int]:
    return rank.rank * factor, rank.world_size, os.getpid()


def fails(rank, wrong: int, folder: Path) -> None:
    (folder / str(rank.rank)).write_text(str(os.getpid()))
    if rank.rank == wrong:
        raise ValueError("no good")
    time.sleep(60)


def is_killed(rank, wrong: int) -> None:
    if rank.rank == wrong:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    raise ConnectionError("my peer is gone")


def waits(rank, folder: Path) -> None:
    (folder / f"{rank.rank}.tmp").write_text(str(os.getpid()))
    (folder / f"{rank.rank}.tmp").rename(folder / str(rank.rank))
    time.sleep(60)


def serves_and_returns_or_watches(rank, folder: Path) -> bool:
    """Return on rank 1 whether rank 0, which has returned, ends within half a second."""
    if rank.rank == 0:
        (folder / "0.tmp").write_text(str(os.getpid()))
        (folder / "0.tmp").rename(folder / "0")
        return False
    until((folder / "0").exists)
    process = os.pidfd_open(int((folder / "0").read_text()))
    return bool(select.select([process], [], [], 0.5)[0])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(true, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_results_come_in_the_order_of_ranks_each_from_a_process_of_its_own():
    found = run_ranks(2, product, 7, timeout_s=240)
    assert [values[:2] for values in found] == [(0, 2), (7, 2)]
    pids = {pid for *_, pid in found} | {os.getpid()}
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids - {os.getpid()})


def test_no_rank_ends_before_all_have_answered(tmp_path):
    """The first rank hosts the store of all, and each holds one end of the others' connections."""
    assert run_ranks(2, serves_and_returns_or_watches, tmp_path, timeout_s=240) == [False, False]


def test_a_rank_that_raises_ends_the_others_and_its_traceback_is_kept(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 1: ValueError: no good") as raised:
        run_ranks(2, fails, 1, tmp_path, timeout_s=240)
    assert "in fails" in raised.value.__notes__[0]
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.iterdir())


def test_a_rank_that_is_killed_is_named_and_not_the_one_that_lost_its_peer():
    with pytest.raises(RankFailed, match=r"rank 1 was killed by SIGKILL: perhaps the memory"):
        run_ranks(2, is_killed, 1, timeout_s=240)


def test_ranks_that_give_no_answer_in_time_are_named_and_ended(tmp_path):
    with pytest.raises(RankFailed, match=r"no answer of ranks \[0\] within 1 s"):
        run_ranks(1, waits, tmp_path, timeout_s=1)


@pytest.mark.parametrize(
    ("number", "fresh"),
    [pytest.param(signal.SIGINT, True, marks=pytest.mark.slow), (signal.SIGKILL, False)],
)
def test_ranks_end_with_the_process_that_started_them(number, fresh: bool, tmp_path):
    script = (
        "import signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it\n"
        "from tests.unit.test_cluster_local_ranks import run_ranks, waits\n"
        f"if __name__ == '__main__': run_ranks(2, waits, Path(sys.argv[1]), timeout_s=240, fresh={fresh})"
    )
    (tmp_path / "main.py").write_text(script)
    pids = [tmp_path / "0", tmp_path / "1"]
    with killed_at_end(
        [sys.executable, tmp_path / "main.py", tmp_path],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        until(lambda: all(pid.exists() for pid in pids))
        started = [int(pid.read_text()) for pid in pids]
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.kill()
        _, said = parent.communicate(timeout=240)
    until(lambda: not any(is_alive(pid) for pid in started), 60)
    assert said.count("Traceback") == (number == signal.SIGINT)  # the parent's, and no rank's
