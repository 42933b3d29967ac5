"""The files of a run folder's lease, and what they say about its driver: see ``folder_lease.py``."""

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.rollout.system.durable import sync_folder

DRIVER = "driver.json"
_TOKEN = re.compile(r"driver\.term\.(\d+)")


@dataclass(frozen=True)
class Machine:
    """The processes among which a process id is unique: those of one boot in one PID namespace."""

    host: str
    boot: str
    """Random id of the kernel's start; empty if it is unknown."""
    namespace: str

    @classmethod
    def this(cls) -> "Machine":
        """Return the machine of this process."""
        host, boot, namespace = socket.gethostname(), "", ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(host, boot, namespace)


class Driver(msgspec.Struct, frozen=True):
    """Content of ``driver.json``."""

    folder: str
    """Random id of the run folder: another run may have been started in its place."""
    term: int
    counter: int
    """Number of renewals in this term."""
    owner: str
    """Random id of the driver."""
    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    """Start of the process, in clock ticks since the boot."""
    lease_s: float
    ended: bool
    """True if the driver has ended in an orderly way."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def machine(self) -> Machine:
        return Machine(self.host, self.boot, self.namespace)

    def lives(self, machine: Machine) -> bool | None:
        """True if the driver lives; None if this cannot be known on ``machine``."""
        if self.ended:
            return False
        if self.machine != machine or not machine.boot:
            return None
        if self.pid == os.getpid():
            return self.owner in owners_here
        started = start_of(self.pid)
        if started is not None:
            return started == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return None  # /proc hides the processes of other users
        return start_of(self.pid) == self.started  # a process that has ended and was not waited for


owners_here: set[str] = set()
"""Ids of the drivers in this process."""


def start_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since the boot; None if there is none that runs."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = content.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Sighting:
    """The lease of a run folder as it was seen at one moment."""

    content: bytes | None
    """Bytes of ``driver.json``; None if there is no such file."""
    term: int | None
    """Number in the token's name; None if there is no token."""

    @property
    def driver(self) -> Driver | None:
        """The driver that the file names; None if it cannot be understood."""
        try:
            return None if self.content is None else msgspec.json.decode(self.content, type=Driver)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None


def look(folder: Path) -> Sighting:
    """Read the lease of ``folder``. Raises OSError."""
    terms = [int(match[1]) for name in os.listdir(folder) if (match := _TOKEN.fullmatch(name))]
    try:
        content = (folder / DRIVER).read_bytes()
    except FileNotFoundError:
        content = None
    return Sighting(content, max(terms, default=None))


def is_lease_file(name: str) -> bool:
    """True for the name of a lease's file, or of the draft of one that a killed driver has left."""
    return name == DRIVER or name.startswith(f".{DRIVER}.") or _TOKEN.fullmatch(name) is not None


def token(folder: Path, term: int) -> Path:
    """Return the path of the token in a term."""
    return folder / f"driver.term.{term}"


def make_token(folder: Path, term: int) -> bool:
    """Make the token of a folder without one. Return False if another process does the same."""
    try:
        os.close(os.open(token(folder, term), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))
    except FileExistsError:
        return False
    if look(folder).term != term:  # a token was made, and renamed, before
        token(folder, term).unlink()
        return False
    sync_folder(folder)
    return True


def begin_term(folder: Path, term: int) -> bool:
    """Rename the token to that of ``term``. Return False if it did not have the number before."""
    try:
        os.rename(token(folder, term - 1), token(folder, term))
    except FileNotFoundError:
        return False
    sync_folder(folder)
    return True
