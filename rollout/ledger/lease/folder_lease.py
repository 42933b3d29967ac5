"""The lease of a run folder: one driver at a time, also where the file system has no working locks.

    driver.json      names the driver, with a counter that the living driver raises; replaced by rename
    driver.term.7    the token. Its name has the number of the present term. A process that takes the run
                     over renames it to the next number; of several processes, only one succeeds

A term lasts from one take-over to the next. The driver of an earlier term is *fenced*: it writes nothing
more.

- Whether a driver on the same machine lives is known at once, from its process.
- The driver on another machine counts as dead when its counter has not moved for ``lease_s``. A process that
  starts watches for so long; clocks are never compared.
- A driver writes without looking only while its last renewal is younger than ``VALID`` of ``lease_s``, so
  that it stops before anybody has watched long enough. A driver that comes back later, because it was stopped
  or the file system hung, must begin a new term first. That fails if the token has been renamed meanwhile.

The folder needs a file system on which a rename is atomic and seen by every machine: ``docs/recovery.md``.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import msgspec

from slipstream.rollout.ledger.lease.driver_file import (
    DRIVER,
    Driver,
    Machine,
    Sighting,
    begin_term,
    look,
    make_token,
    owners_here,
    start_of,
    token,
)
from slipstream.rollout.ledger.storage.database import LedgerBusy, LedgerError
from slipstream.rollout.ledger.storage.locks import LockCall, flock
from slipstream.rollout.system.disk import describe, telling_of_stalls, waits_for_disk
from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.log_thread import to_stderr

LEASE_S = 30.0
"""Length of a lease whose file does not say it: the default of ``run.lease_s``."""
RENEWALS = 6
"""Renewals, and looks of a process that watches, for each ``lease_s``."""
FRESH = 1 / 4
"""Age of a renewal, as a share of ``lease_s``, from which ``check`` reads the file. The thread that renews
keeps renewals younger, so that ``check`` rarely touches the disk."""
HANG_S = 600.0
"""Longest wait of a write for a renewal that the file system does not answer. Nothing is written meanwhile,
and the renewal finds out whether another driver has come."""
STALLED = "What is to be written waits for it; engines and running episodes go on"
"""What becomes of a run whose file system stalls."""
VALID = 2 / 3
"""Age of a renewal, as a share of ``lease_s``, from which a new term is needed."""

Clock = Callable[[], float]


class Fenced(LedgerError):
    """Another driver has taken the run folder over, or may have: this one must write nothing more."""


def boot_clock() -> float:
    """Return the seconds since the machine was started, those for which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _busy(folder: Path, driver: Driver | None) -> LedgerBusy:
    who = f" ({driver})" if driver else ""
    return LedgerBusy(f"{folder}: another process is running this run{who}: wait for its end, or end it")


# ---- taking


async def wait_until_free(
    folder: Path, *, say: Callable[[str], None], lease_s: float = LEASE_S, machine: Machine | None = None
) -> Sighting:
    """Return the lease of ``folder`` once it is known that no driver holds it.

    ``lease_s``: how long to watch where the file does not say it. ``say`` tells the user of the wait. Raises
    LedgerBusy when a driver holds the folder, and OSError.
    """
    seen = look(folder)
    driver = seen.driver
    if seen == Sighting(None, None):
        return seen
    if driver is not None and seen.term in (driver.term, None):
        lives = driver.lives(machine or Machine.this())
        if lives:
            raise _busy(folder, driver)
        if lives is False:
            return seen
    watch_s = driver.lease_s if driver else lease_s
    say(f"watching for {watch_s:.0f} s whether the driver of {folder} lives ({driver or 'unknown'})")
    for _ in range(RENEWALS):
        await asyncio.sleep(watch_s / RENEWALS)
        now = look(folder)
        if now.driver is not None and now.driver.ended and now.term == now.driver.term:
            return now
        if now != seen:
            raise _busy(folder, now.driver)
    return seen


async def take_lease(
    folder: Path,
    *,
    lease_s: float,
    say: Callable[[str], None],
    note: Callable[[str], None] = to_stderr,
    machine: Machine | None = None,
    lock: LockCall = flock,
    clock: Clock = boot_clock,
) -> "FolderLease":
    """Make this process the driver of the run in ``folder``, as soon as no other one is.

    ``note`` hears later, from any thread, of a lock that is lost and of a file system that stalls. Raises
    LedgerBusy when there is another driver, and OSError when the folder cannot be used.
    """
    machine = machine or Machine.this()
    term = look(folder).term
    descriptor = None if term is None else _locked(folder, term, lock)
    try:
        seen = await wait_until_free(folder, lease_s=lease_s, say=say, machine=machine)
        if seen.term != term:
            raise _busy(folder, seen.driver)
        began = clock()
        taken = _claim(folder, seen)
        if descriptor is None:
            descriptor = _locked(folder, taken, lock)
        driver = Driver(
            folder=seen.driver.folder if seen.driver else uuid4().hex,
            term=taken,
            counter=0,
            owner=uuid4().hex,
            host=machine.host,
            boot=machine.boot,
            namespace=machine.namespace,
            pid=os.getpid(),
            started=start_of(os.getpid()) or 0,
            lease_s=lease_s,
            ended=False,
        )
        lease = FolderLease(folder, driver, descriptor, clock, began, lock, note)
        lease.write()
        lease.check()  # for a process that was stopped since it began the term
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    return lease


def _locked(folder: Path, term: int, lock: LockCall) -> int | None:
    """Open the token and lock it; None: there are no locks here. Raises LedgerBusy while another process
    has it.
    """
    try:
        descriptor = os.open(token(folder, term), os.O_RDWR)
    except FileNotFoundError:
        raise _busy(folder, None) from None  # it has just been renamed
    try:
        lock(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise _busy(folder, look(folder).driver) from None
    except OSError:  # the lease alone decides
        os.close(descriptor)
        return None
    return descriptor


def _claim(folder: Path, seen: Sighting) -> int:
    """Begin the term after the one that was seen, and return its number. Raises LedgerBusy."""
    if seen.term is not None:
        term = seen.term + 1
        begun = begin_term(folder, term)
    else:
        term = seen.driver.term + 1 if seen.driver else 1
        begun = make_token(folder, term)
    if not begun:
        raise _busy(folder, look(folder).driver)
    return term


# ---- holding


@dataclass(eq=False)
class FolderLease:
    """The right of this process to drive a run. ``take_lease`` gives it.

        lease.keep()            # it is renewed from now on
        with lease.held(on_loss):
            lease.check()       # before every write that another driver must not meet

    ``check`` may be called from any thread.
    """

    folder: Path
    _driver: Driver
    _descriptor: int | None
    """The open token, whose lock is held; None where the file system has no locks."""
    _clock: Clock
    _renewed: float
    """When the last successful renewal began."""
    _lock_file: LockCall
    _note: Callable[[str], None]
    _lost_lock: bool = field(default=False, init=False)
    _loss: Fenced | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held during a renewal."""
    _ending: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _on_loss: Callable[[Fenced], None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        owners_here.add(self._driver.owner)

    @property
    def term(self) -> int:
        return self._driver.term

    def check(self) -> None:
        """Return if this process may write. Raises Fenced, and again on every later call.

        Reads and renews the file when the last renewal is not fresh.
        """
        if self._loss is not None:
            raise self._loss
        if self._age() <= FRESH * self._driver.lease_s:
            return
        if not self._lock.acquire(timeout=max(HANG_S, self._driver.lease_s)):
            raise self._lose(self._unrenewed("the file system has not answered"))
        try:
            if self._age() > FRESH * self._driver.lease_s:
                self._renew()
        except OSError as error:
            if self._age() > VALID * self._driver.lease_s:
                raise self._lose(self._unrenewed(str(error))) from error
        finally:
            self._lock.release()

    def keep(self) -> None:
        """Renew the lease in a thread of its own, until it is released or lost."""
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self, on_loss: Callable[[Fenced], None]) -> Generator[None]:
        """Release the lease after the block, and tell inside it of a file system that stalls. ``on_loss`` is
        called when the lease is lost, from any thread.
        """
        self._on_loss = on_loss
        if self._loss is not None:
            on_loss(self._loss)
        try:
            with telling_of_stalls(self._note, STALLED):
                yield
        finally:
            self.release()

    @contextmanager
    def released_on_error(self) -> Generator[None]:
        """Release the lease when the block raises."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self, folder: Path | None = None) -> None:
        """Allow others to take the run over at once. A lease that was lost is left alone.

        ``folder``: where the run folder is now, if it was renamed.
        """
        self._ending.set()
        if self._thread is not None:
            self._thread.join(self._driver.lease_s)
        self.folder = folder or self.folder
        if self._lock.acquire(timeout=self._driver.lease_s):
            try:
                self._driver = msgspec.structs.replace(self._driver, ended=True)
                self._renew()
            except (Fenced, OSError):
                """Others wait until the lease runs out."""
            finally:
                self._lock.release()
        owners_here.discard(self._driver.owner)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self) -> None:
        """Write ``driver.json``. Raises OSError."""
        content = msgspec.json.format(msgspec.json.encode(self._driver)).decode()
        # A fenced driver may be in the middle of a write: its draft has another name.
        write_durably(self.folder / DRIVER, content + "\n", draft=self._driver.owner)

    def _keep(self) -> None:
        lease_s = self._driver.lease_s
        while not self._ending.wait(lease_s / RENEWALS):
            try:
                with self._lock:
                    self._renew()
            except Fenced as loss:
                return self._report(loss)
            except OSError as error:
                if self._age() > lease_s:
                    return self._report(self._lose(self._unrenewed(str(error))))

    def _report(self, loss: Fenced) -> None:
        if self._on_loss is not None:  # otherwise ``held`` reports it
            self._on_loss(loss)

    def _renew(self) -> None:
        """Raise the counter, in a new term if the old one may have run out. Raises Fenced and OSError."""
        valid_s = VALID * self._driver.lease_s
        while True:
            if self._loss is not None:
                raise self._loss
            began = self._clock()
            with waits_for_disk(DRIVER):
                self._compare(look(self.folder))
                if began - self._renewed > valid_s:
                    self._next_term()
                self._driver = msgspec.structs.replace(self._driver, counter=self._driver.counter + 1)
                self.write()
                self._keep_lock()
            self._renewed = began
            if self._clock() - began <= valid_s:
                return

    def _keep_lock(self) -> None:
        """Lock the token again: a file system may lose locks, as a server does that is started again."""
        if self._descriptor is None:
            return
        try:
            self._lock_file(self._descriptor)  # nothing happens to a lock that this process still has
        except OSError as error:
            is_taken = isinstance(error, BlockingIOError)
            why = "another process has it now" if is_taken else describe(error)
            if not self._lost_lock:
                self._note(
                    f"the lock of {self.folder} is lost: {why}. {DRIVER} alone keeps other drivers away"
                )
            self._lost_lock = True
        else:
            if self._lost_lock:
                self._note(f"the lock of {self.folder} is held again")
            self._lost_lock = False

    def _compare(self, seen: Sighting) -> None:
        """Raise Fenced if ``driver.json`` shows that this process no longer drives the run."""
        if seen.content is None:
            raise self._lose(f"{self.folder / DRIVER} is gone: the run folder was moved or deleted")
        driver = seen.driver
        if driver is None:
            raise OSError(f"{self.folder / DRIVER} cannot be understood")
        if driver.folder != self._driver.folder:
            raise self._lose(f"{self.folder}: another run has been started in its place ({driver})")
        if driver.term > self.term or (driver.term == self.term and driver.owner != self._driver.owner):
            raise self._lose(self._taken(driver))
        # A lower term is the late write of a driver that was fenced: this one writes over it.

    def _next_term(self) -> None:
        if not begin_term(self.folder, self.term + 1):
            raise self._lose(self._taken(look(self.folder).driver))
        self._driver = msgspec.structs.replace(self._driver, term=self.term + 1, counter=0)

    def _age(self) -> float:
        return self._clock() - self._renewed

    def _lose(self, reason: str) -> Fenced:
        self._loss = Fenced(f"fenced: {reason}. This driver has stopped and writes nothing more")
        return self._loss

    def _taken(self, driver: Driver | None) -> str:
        who = f"{driver}" if driver and driver.owner != self._driver.owner else "another process"
        return (
            f"{self.folder}: {who} has taken the run over, because this driver gave no sign of life for "
            f"{self._driver.lease_s:.0f} s"
        )

    def _unrenewed(self, why: str) -> str:
        return (
            f"{self.folder / DRIVER} was not renewed for {self._age():.0f} s ({why}): another process may "
            "take the run over"
        )
