"""One driver for each run folder: who may take it over, who is fenced, what a fenced driver still writes."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from slipstream.backend.simulate import clock as virtual_clock
from slipstream.rollout.ledger.lease import folder_lease as leases
from slipstream.rollout.ledger.lease.driver_file import (
    Driver,
    Machine,
    begin_term,
    look,
    make_token,
    start_of,
)
from slipstream.rollout.ledger.lease.folder_lease import (
    LEASE_S,
    Fenced,
    FolderLease,
    take_lease,
    wait_until_free,
)
from slipstream.rollout.ledger.storage import locks
from slipstream.rollout.ledger.storage.database import (
    LedgerBusy,
    create_database,
    open_for_reading,
    open_for_writing,
)
from slipstream.rollout.ledger.storage.locks import flock, lock_problem
from tests.environment import environment

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

HERE, THERE = Machine("here", "boot 1", "pids"), Machine("there", "boot 2", "pids")
SHORT_S = 0.12
"""A lease that is watched in no time. Where it is used, the clock of the driver stands still."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def no_locks(descriptor: int) -> None:
    """A file system that grants every lock to everybody."""


def take(folder: Path, machine: Machine = HERE, clock=None, **more) -> FolderLease:
    arguments = {"lease_s": SHORT_S, "lock": no_locks, "say": lambda text: None} | more
    return asyncio.run(take_lease(folder, machine=machine, clock=clock or Clock(), **arguments))


def edit(folder: Path, **changes) -> None:
    """Change fields of driver.json, as another process would have written them."""
    driver = look(folder).driver
    assert driver is not None
    (folder / "driver.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(driver, **changes)))


def driver_of(folder: Path) -> Driver:
    driver = look(folder).driver
    assert driver is not None
    return driver


# ---- who may take a folder over


def test_a_folder_is_held_by_one_process_and_free_when_it_is_given_back(tmp_path):
    lease = take(tmp_path)
    assert driver_of(tmp_path).pid == os.getpid()
    with pytest.raises(
        LedgerBusy, match=rf"another process is running this run \(process {os.getpid()} on here"
    ):
        take(tmp_path)
    lease.release()
    later = take(tmp_path)
    assert later.term == lease.term + 1
    later.release()


def test_a_process_that_has_died_on_this_machine_is_known_at_once(tmp_path, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        take(tmp_path)
        edit(tmp_path, pid=child.pid, started=start_of(child.pid), lease_s=3600.0)
        with pytest.raises(LedgerBusy, match=f"process {child.pid} on here"):
            take(tmp_path)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie has ended, too
        take(tmp_path, lease_s=3600.0).release()
    finally:
        child.kill()
        child.communicate()


def test_another_process_with_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path):
    take(tmp_path)
    edit(tmp_path, pid=os.getppid(), started=1, lease_s=3600.0)
    take(tmp_path).release()


@pytest.mark.parametrize(
    "machine", [THERE, Machine("here", "boot 1", "pids of a container"), Machine("here", "", "pids")]
)
def test_a_silent_driver_of_another_machine_is_watched_for_its_lease_and_taken_over(tmp_path, machine):
    take(tmp_path)
    said = []
    watching = asyncio.run(wait_until_free(tmp_path, say=said.append, machine=machine, lease_s=3600.0))
    assert watching.term == 1
    assert said == [
        f"watching for 0 s whether the driver of {tmp_path} lives (process {os.getpid()} on here)"
    ]
    assert take(tmp_path, machine).term == 2


def test_a_driver_of_another_machine_that_renews_is_not_taken_over(tmp_path):
    lease = take(tmp_path, clock=leases.boot_clock, lease_s=6.0)
    lease.keep()
    with lease.held(lambda loss: None):
        with pytest.raises(LedgerBusy, match="another process is running this run"):
            take(tmp_path, THERE)
        lease.check()
    take(tmp_path, THERE, lease_s=3600.0).release()


def test_the_lease_is_renewed_while_the_event_loop_is_busy(tmp_path):
    async def busy() -> None:
        lease.keep()
        with lease.held(lambda loss: None):
            deadline = time.monotonic() + 60
            while driver_of(tmp_path).counter < 3:  # no await: the loop is blocked
                assert time.monotonic() < deadline

    lease = take(tmp_path, clock=leases.boot_clock, lease_s=0.3)
    asyncio.run(busy())


def test_a_driver_that_ends_while_it_is_watched_makes_room(tmp_path):
    lease = take(tmp_path, lease_s=3.0)

    async def meet() -> FolderLease:
        watching = asyncio.create_task(
            take_lease(tmp_path, lease_s=3.0, say=lambda _: None, machine=THERE, lock=no_locks)
        )
        await asyncio.sleep(0)
        lease.release()
        return await watching

    assert asyncio.run(meet()).term == 2


def test_of_two_that_take_over_at_once_one_wins(tmp_path):
    take(tmp_path)

    async def race() -> list[FolderLease | BaseException]:
        takers = (
            take_lease(tmp_path, lease_s=1.0, say=lambda _: None, machine=machine, lock=no_locks)
            for machine in (THERE, Machine("elsewhere", "boot 3", "pids"))
        )
        return await asyncio.gather(*takers, return_exceptions=True)

    won, lost = sorted(asyncio.run(race()), key=lambda result: isinstance(result, BaseException))
    assert isinstance(won, FolderLease) and isinstance(lost, LedgerBusy)
    # Nobody holds the lease that has been taken: on a slow machine the second may take it from the first.
    assert driver_of(tmp_path).term == won.term >= 2


def test_of_two_that_take_a_new_folder_at_once_one_wins(tmp_path, monkeypatch):
    claim = leases._claim

    def late(folder, seen):
        monkeypatch.setattr(leases, "_claim", claim)
        with ThreadPoolExecutor() as pool:  # an event loop of its own
            winner.append(pool.submit(take, folder, THERE).result())
        return claim(folder, seen)

    winner: list[FolderLease] = []
    monkeypatch.setattr(leases, "_claim", late)
    with pytest.raises(LedgerBusy):
        take(tmp_path)
    assert driver_of(tmp_path).host == "there"
    winner[0].release()


def test_a_token_that_was_made_and_renamed_is_not_made_again(tmp_path):
    assert make_token(tmp_path, 1)
    assert not make_token(tmp_path, 1)
    assert begin_term(tmp_path, 2)
    assert not make_token(tmp_path, 1)
    assert not begin_term(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["driver.term.2"]


def test_a_folder_whose_next_term_was_begun_is_watched_though_the_driver_has_ended(tmp_path):
    """Whoever has begun the term is about to write its name."""
    take(tmp_path, lease_s=1.0).release()
    assert begin_term(tmp_path, 2)

    async def meet() -> None:
        watching = asyncio.create_task(
            take_lease(tmp_path, lease_s=1.0, say=lambda _: None, machine=THERE, lock=no_locks)
        )
        await asyncio.sleep(0.25)  # it has looked once more by now
        edit(tmp_path, term=2, ended=False)
        await watching

    with pytest.raises(LedgerBusy):
        virtual_clock.run(meet())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"term": "x"}', b"\xff"])
def test_a_damaged_file_is_watched_and_then_replaced(tmp_path, content):
    take(tmp_path)
    (tmp_path / "driver.json").write_bytes(content)
    said = []
    assert take(tmp_path, say=said.append).term == 2
    assert "(unknown)" in said[0]


def test_where_locks_work_a_stopped_driver_of_another_machine_keeps_its_run(tmp_path):
    lease = take(tmp_path, lock=flock)
    with pytest.raises(LedgerBusy, match=rf"\(process {os.getpid()} on here\)"):
        take(tmp_path, THERE, lock=flock, lease_s=3600.0)
    lease.release()
    take(tmp_path, THERE, lock=flock).release()


# ---- who is fenced


def test_a_driver_that_was_stopped_is_fenced_when_another_one_has_taken_over(tmp_path):
    clock = Clock()
    lease = take(tmp_path, clock=clock)
    lease.check()
    other = take(tmp_path, THERE)
    content = (tmp_path / "driver.json").read_bytes()
    clock.now += 40
    for _ in range(2):
        with pytest.raises(Fenced, match=rf"fenced: {tmp_path}: process \d+ on there has taken the run over"):
            lease.check()
    lease.release()
    assert (tmp_path / "driver.json").read_bytes() == content
    other.check()


@pytest.mark.parametrize("share", [0.5, 40])
def test_a_driver_that_was_stopped_goes_on_when_nobody_has_taken_over(tmp_path, share):
    clock = Clock()
    lease = take(tmp_path, clock=clock)
    clock.now += share * SHORT_S
    lease.check()
    assert (driver_of(tmp_path).term, driver_of(tmp_path).owner) == (
        2 if share > 1 else 1,
        lease._driver.owner,
    )
    lease.check()


def test_a_driver_that_was_stopped_cannot_go_on_when_another_one_has_begun_to_take_over(tmp_path):
    clock = Clock()
    lease = take(tmp_path, clock=clock)
    assert begin_term(tmp_path, 2)
    clock.now += SHORT_S
    with pytest.raises(Fenced, match="another process has taken the run over"):
        lease.check()


def test_a_driver_that_is_stopped_inside_a_renewal_is_fenced_and_its_late_write_is_undone(tmp_path):
    clock = Clock()
    lease, others = take(tmp_path, clock=clock), []
    write, other_clock = lease.write, Clock()

    def late_write() -> None:
        if not others:
            others.append(take(tmp_path, THERE, clock=other_clock))
            clock.now += SHORT_S
        write()

    lease.write = late_write
    clock.now += 0.5 * SHORT_S
    with pytest.raises(Fenced):
        lease.check()
    assert driver_of(tmp_path).host == "here"  # the late write
    other_clock.now += 0.5 * SHORT_S
    others[0].check()
    assert driver_of(tmp_path).host == "there"


def test_a_driver_whose_folder_was_set_aside_or_deleted_is_fenced(tmp_path):
    for name in ("moved", "replaced"):
        folder, clock = tmp_path / name, Clock()
        folder.mkdir()
        lease = take(folder, clock=clock)
        folder.rename(tmp_path / f"{name} aside")
        if name == "replaced":
            folder.mkdir()
            take(folder, THERE)
        else:
            folder.mkdir()
        clock.now += SHORT_S
        reason = "another run has been started in its place" if name == "replaced" else "is gone"
        with pytest.raises(Fenced, match=reason):
            lease.check()


def test_the_loss_is_reported_from_the_thread(tmp_path):
    lease = take(tmp_path, clock=leases.boot_clock, lease_s=0.3)
    lost = threading.Event()
    losses: list[Fenced] = []
    lease.keep()
    with lease.held(lambda loss: (losses.append(loss), lost.set())):
        with lease._lock:  # no renewal is under way, which would be written over the other driver's
            begin_term(tmp_path, 2)
            edit(tmp_path, term=2, owner="another", host="there")
        assert lost.wait(60)
    assert "on there has taken the run over" in str(losses[0])
    assert driver_of(tmp_path).owner == "another"


def test_a_loss_before_anybody_listens_is_reported_later(tmp_path):
    clock = Clock()
    lease = take(tmp_path, clock=clock)
    begin_term(tmp_path, 2)
    clock.now += SHORT_S
    with pytest.raises(Fenced):
        lease.check()
    losses: list[Fenced] = []
    with lease.held(losses.append):
        assert len(losses) == 1


def test_a_driver_that_cannot_renew_goes_on_for_a_while_and_then_stops(tmp_path, monkeypatch):
    def broken(*_, **__) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    clock = Clock()
    lease = take(tmp_path, clock=clock)
    monkeypatch.setattr(leases, "write_durably", broken)
    clock.now += 0.5 * SHORT_S
    lease.check()
    clock.now += 0.5 * SHORT_S
    with pytest.raises(Fenced, match=r"driver\.json was not renewed for 0 s \(\[Errno 5\]"):
        lease.check()


def test_a_driver_whose_file_system_hangs_for_too_long_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HANG_S", 0.1)
    clock = Clock()
    lease = take(tmp_path, clock=clock)
    clock.now += SHORT_S
    with lease._lock, pytest.raises(Fenced, match="the file system has not answered"):  # a renewal hangs
        lease.check()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_write_waits_for_a_renewal_that_hangs_for_longer_than_the_lease(tmp_path, is_taken):
    clock, others = Clock(), []
    lease = take(tmp_path, clock=clock)
    write, hangs, answers = lease.write, threading.Event(), threading.Event()

    def late_write() -> None:
        hangs.set()
        assert answers.wait(60)
        write()

    lease.write = late_write
    clock.now += SHORT_S
    with ThreadPoolExecutor(2) as threads:
        renewing = threads.submit(lease.check)
        assert hangs.wait(60)
        clock.now += 500 * SHORT_S  # and a write of the ledger comes meanwhile
        waiting = threads.submit(lease.check)
        if is_taken:
            others.append(take(tmp_path, THERE, clock=clock))
        assert not wait([waiting], timeout=10 * SHORT_S).done, "it neither writes nor ends the run"
        answers.set()
        found = [each.exception(60) for each in (renewing, waiting)]
    if is_taken:
        assert all(isinstance(error, Fenced) and "has taken the run over" in str(error) for error in found)
        others[0].check()
    else:
        assert found == [None, None]
        assert lease.term == 3, "a term for what another driver may have missed"
        lease.check()


def test_a_thread_that_cannot_renew_reports_it_once_the_lease_has_run_out(tmp_path, monkeypatch):
    def broken(*_, **__) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    lease = take(tmp_path, clock=leases.boot_clock, lease_s=0.3)
    monkeypatch.setattr(leases, "write_durably", broken)
    lost = threading.Event()
    losses: list[Fenced] = []
    lease.keep()
    with lease.held(lambda loss: (losses.append(loss), lost.set())):
        assert lost.wait(60)
    assert "another process may take the run over" in str(losses[0])


def test_a_lease_that_is_fresh_costs_no_look_at_the_disk(tmp_path, monkeypatch):
    lease = take(tmp_path)
    monkeypatch.setattr(leases, "look", lambda folder: pytest.fail("looked"))
    lease.check()


# ---- locks


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ESTALE, errno.EWOULDBLOCK])
def test_a_lock_that_is_lost_is_said_once_and_the_lease_goes_on_keeping_others_away(tmp_path, number):
    fails, said, clock = [], [], Clock()

    def lock(descriptor: int) -> None:
        if fails:
            raise OSError(number, os.strerror(number))

    lease = take(tmp_path, clock=clock, lock=lock, note=said.append)
    fails.append(True)
    for _ in range(3):
        clock.now += 0.5 * SHORT_S
        lease.check()
    why = "another process has it now" if number == errno.EWOULDBLOCK else os.strerror(number)
    assert len(said) == 1 and why in said[0] and "driver.json alone keeps other drivers away" in said[0]
    with pytest.raises(LedgerBusy, match="another process is running this run"):
        take(tmp_path)  # on the same machine the process itself is known
    counts = iter(range(1, 100))

    def renewed(folder: Path):
        edit(folder, counter=next(counts) + 1000)
        return look(folder)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(leases, "look", renewed)
        with pytest.raises(LedgerBusy, match="another process is running this run"):
            take(tmp_path, THERE)
    fails.clear()
    clock.now += 0.5 * SHORT_S
    lease.check()
    assert said[1:] == [f"the lock of {tmp_path} is held again"]


def test_a_lock_that_was_lost_is_taken_again(tmp_path):
    import fcntl

    clock, said = Clock(), []
    lease = take(tmp_path, clock=clock, lock=flock, note=said.append)
    assert lease._descriptor is not None
    fcntl.flock(lease._descriptor, fcntl.LOCK_UN)
    with (tmp_path / "driver.term.1").open("r+") as token, pytest.MonkeyPatch.context():
        flock(token.fileno())
        clock.now += 0.5 * SHORT_S
        lease.check()
        assert len(said) == 1 and "another process has it now" in said[0]
    clock.now += 0.5 * SHORT_S
    lease.check()
    assert "is held again" in said[1]
    with pytest.raises(BlockingIOError), (tmp_path / "driver.term.1").open("r+") as token:
        flock(token.fileno())


def test_the_locks_of_this_file_system_work(tmp_path):
    assert lock_problem(tmp_path) is None
    assert locks.fcntl_error(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_locks_that_are_refused_or_granted_twice_are_noticed(tmp_path, monkeypatch):
    def refused(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def flock(descriptor: int) -> None:
        """Granted to everybody: the second process gets the real lock."""

    assert lock_problem(tmp_path, (refused,)) == "refused: No locks available"
    assert lock_problem(tmp_path, (flock,)) == "flock: two processes got the same lock at once"
    monkeypatch.setattr(locks, "lockf", refused)
    assert locks.fcntl_error(tmp_path) == "No locks available"


def test_a_ledger_is_written_and_read_where_files_cannot_be_locked(tmp_path, monkeypatch):
    import fcntl

    def refused(*_) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refused)
    path = tmp_path / "ledger.sqlite"
    create_database(path, "run", b"stamp")
    writer = open_for_writing(path)
    writer.execute("INSERT INTO discards (group_id, epoch, tokens) VALUES (1, 2, 3)")
    # Locks that others hold mean nothing: SQLite does not ask for any.
    reader = open_for_reading(path)
    reader.close()
    writer.close()
    connection = open_for_reading(path)
    assert connection.execute("SELECT group_id, epoch, tokens FROM discards").fetchall() == [(1, 2, 3)]
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


# ---- two processes


class Process:
    """``tests/unit/driver_process.py``."""

    def __init__(self, folder: Path, host: str, lease_s: float, *more: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.driver_process", str(folder), host, str(lease_s), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.input, self.output = self._popen.stdin, self._popen.stdout

    def until(self, line: str) -> list[str]:
        """Return what the process prints before ``line``; all of it if it ends first."""
        lines: list[str] = []
        while (read := self.output.readline()) and read.rstrip("\n") != line:
            lines.append(read.rstrip("\n"))
        return lines

    def send(self, number: int) -> None:
        self._popen.send_signal(number)

    def end(self) -> list[str]:
        """Ask the process to end, and return the rest of what it prints."""
        with suppress(BrokenPipeError):
            self.input.write("end\n")
            self.input.flush()
        return self.until("")

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self.output.close()
        with suppress(BrokenPipeError):
            self.input.close()


@pytest.fixture
def start(tmp_path) -> Iterator:
    processes: list[Process] = []

    def launch(host: str, lease_s: float, *more: str) -> Process:
        processes.append(Process(tmp_path, host, lease_s, *more))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()


def test_without_locks_a_stopped_driver_wakes_up_fenced_and_the_ledger_is_its_successors(tmp_path, start):
    first = start("here", 1.5, "nolocks")
    first.until("20")
    first.send(signal.SIGSTOP)
    second = start("there", 1.5, "nolocks")
    second.until("holding")
    taken_at = int(second.output.readline())
    second.until(str(taken_at + 20))
    first.send(signal.SIGCONT)
    printed = first.until("")
    # Stopped within a renewal, it writes that one late, over the successor's, and cannot read who that is.
    assert "has taken the run over" in printed[-1]
    acknowledged = [int(line) for line in printed[:-1]]
    second.until(str(taken_at + 40))
    second.kill()  # so that the next one finds what is on disk

    connection = open_for_reading(tmp_path / "ledger.sqlite")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    rows = connection.execute("SELECT id, epoch FROM groups ORDER BY id").fetchall()
    connection.close()
    assert all(number < taken_at for number in acknowledged)
    assert rows == [(number, int(number >= taken_at)) for number in range(len(rows))]
    assert len(rows) > taken_at + 40, "groups that the second driver had recorded are lost"


def test_without_locks_a_stopped_driver_that_nobody_replaced_goes_on(tmp_path, start):
    first = start("here", 0.5, "nolocks")
    first.until("20")
    first.send(signal.SIGSTOP)
    time.sleep(1.0)
    first.send(signal.SIGCONT)
    first.until("60")
    assert driver_of(tmp_path).term > 1
    assert first.end()[-1] == "ended"


def test_with_locks_a_stopped_driver_is_not_replaced(tmp_path, start):
    first = start("here", 0.5)
    first.until("5")
    first.send(signal.SIGSTOP)
    assert "busy: " in start("there", 0.5).until("holding")[-1]
    first.send(signal.SIGCONT)
    first.until("30")
    assert first.end()[-1] == "ended"


def test_a_killed_driver_is_replaced_at_once_on_its_machine(tmp_path, start):
    first = start("here", 3600)
    first.until("5")
    assert "busy: " in start("here", 3600).until("holding")[-1]
    first.kill()
    second = start("here", 3600)
    second.until("holding")
    assert second.end()[-1] == "ended"


def test_the_default_lease_is_that_of_the_recipe():
    from slipstream.configs.schema.run import RunSection

    assert RunSection.model_fields["lease_s"].default == LEASE_S
