"""Runs one command in a box, and ends it at its limits.

    box ──clone──► init ──spawn─► command ──► whatever it starts
     ▲              │                │
     └── status ────┘   output ──────┘

init is process 1 of the command's namespace of process ids: when the box kills it, the kernel kills the rest.
It reports the command's wait status and then waits for that. Where there are no namespaces it is a subreaper.
"""

import errno
import fcntl
import os
import resource
import select
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import ceil
from typing import NoReturn

from slipstream.rollout.sandbox import filter as system_calls
from slipstream.rollout.sandbox import kernel, root, usage
from slipstream.rollout.sandbox.enclosure import Enclosure
from slipstream.rollout.sandbox.interface import ExecResult, LimitName, SandboxFailed
from slipstream.rollout.sandbox.wire import Exec, Limits
from slipstream.rollout.system.linux import (
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NAME,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECUREBITS,
    adopt_orphans,
    prctl,
)


class Disk:
    """Compares the files of a sandbox with their limits."""

    def __init__(self, enclosure: Enclosure, size: int, file_size: int) -> None:
        """``size``: bytes of all files together; ``file_size``: bytes of the largest."""
        self._enclosure = enclosure
        self._size = size
        self._file_size = file_size
        self._most_files = root.most_files(size)
        # A command that finds a full sandbox may make room.
        self._was_full = enclosure.has_namespaces and self._is_full()

    def exceeded(self, thorough: bool = False) -> LimitName | None:
        """Return the limit that files have reached. ``thorough``: look at each file."""
        if self._enclosure.has_namespaces:
            if self._is_full() and not self._was_full:
                return "disk"
            if not thorough:
                return None
        count, used, largest = 0, 0, 0
        for status in self._entries():
            count += 1
            used += status.st_blocks * 512
            largest = max(largest, status.st_size if stat.S_ISREG(status.st_mode) else 0)
        if count > self._most_files or used > self._size:
            return "disk"
        return "file_size" if thorough and largest >= self._file_size else None

    def _is_full(self) -> bool:
        status = os.statvfs(self._enclosure.folder)
        return status.f_bavail == 0 or status.f_favail == 0

    def _entries(self) -> Iterator[os.stat_result]:
        """Yield all files and folders of the sandbox; readable ones of the machine, shown there, are none."""
        todo = [self._enclosure.folder, self._enclosure.temporary]
        todo += [root.SHARED] if self._enclosure.has_namespaces else []
        devices = {os.stat(folder).st_dev for folder in todo}
        count = 0
        while todo and count <= self._most_files:
            with suppress(OSError):  # files come and go
                for entry in os.scandir(todo.pop()):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev not in devices:
                        continue
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    yield status


_PART = 1 << 16
_MOST_READS = 64
"""Largest number of reads from a pipe after the end of a command: a process may still write into it."""


class Output:
    """The pipe of a stream, and what has come through it."""

    def __init__(self, longest: int) -> None:
        """``longest``: bytes that are kept."""
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._longest = longest
        self._text = bytearray()
        self.is_full = False
        """True if more has come than is kept."""

    def read(self) -> bool:
        """Take what has come. Return True if the stream goes on."""
        try:
            data = os.read(self.reader, _PART)
        except BlockingIOError:
            return True
        self.is_full = self.is_full or len(self._text) + len(data) > self._longest
        self._text += data[: self._longest - len(self._text)]
        return bool(data)

    def finish(self) -> bool:
        """Take the rest, and close the pipe. Return True if anything was cut."""
        for _ in range(_MOST_READS):
            before = len(self._text)
            if self.is_full or not self.read() or len(self._text) == before:
                break
        os.close(self.reader)
        return self.is_full

    def text(self) -> str:
        """Return the text. What is no UTF-8 is replaced, and a cut is said."""
        text = self._text.decode(errors="replace")
        return f"{text}\n[cut after {self._longest} bytes]" if self.is_full else text


_ENDED, _NOT_STARTED = b"E", b"F"
"""Begin of a report: of the wait status of a command, and of why it could not be started."""
_STATUS = struct.Struct("<ciq")
"""A report of an end: its begin, the wait status, and the bytes that a process of the command held at most,
which are 0 if that is not known."""

_FIRST_LOOK_S, _LONGEST_BETWEEN_S = 0.01, 0.05
"""Seconds until the use of memory, time and processes is looked at, which double up to the second. A process
that fills memory as fast as a core can has some 100 MB more by then."""

_REST = 4
"""Times that a look must take before the next one, which makes looking cost at most a fifth of a core."""

_SPARE_TASKS = 16
"""Processes beyond the limit before the kernel refuses more, so that it shows that a command wanted them."""

_SPARE_MEMORY = 2
"""Multiple of the memory limit at which the kernel fails allocations of one process, should it fill memory
faster than it is looked at."""

_KERNEL_COUNTS_BY_NAMESPACE = (5, 14)
"""Version of Linux from which RLIMIT_NPROC counts the processes of a user namespace and not of a user."""

_NO_PROGRAM = 127
"""Exit code of a shell for a command that cannot be run."""

_NO_RESOURCES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors that are the machine's and not the command's."""

_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
"""Signals that Python does not leave as they are."""

_NO_ROOT = 3
"""SECBIT_NOROOT of linux/securebits.h, locked."""

_BY_SIGNAL: dict[int, LimitName] = {
    signal.SIGXCPU: "cpu",
    signal.SIGXFSZ: "file_size",
    signal.SIGSYS: "memory",
}
"""Limits that the kernel itself enforces by a signal."""


class OwnerGone(Exception):
    """The process that waits for the command has ended. The command is killed."""


class Run:
    """One execution of a command."""

    def __init__(self, request: Exec, limits: Limits, enclosure: Enclosure, owners: tuple[int, ...]) -> None:
        """``owners``: descriptors that become readable when nobody waits for the result any more."""
        self._request = request
        self._limits = limits
        self._enclosure = enclosure
        self._owners = owners
        self._disk = Disk(enclosure, limits.disk, limits.file_size)
        self._poll = select.poll()
        self._report = b""
        self._limit: LimitName | None = None

    def result(self) -> ExecResult:
        """Run the command to its end. Raises SandboxFailed, and OwnerGone; nothing is left then either."""
        status_reader, status_writer = os.pipe()
        stdout, stderr = Output(self._limits.output), Output(self._limits.output)
        stdin = _sealed(self._request.stdin)
        start = time.monotonic()
        init = kernel.clone(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS if self._enclosure.has_namespaces else 0)
        if init == 0:
            os.close(status_reader)
            _act(lambda: self._init(status_writer, (stdin, stdout.writer, stderr.writer)), status_writer)
        for fd in (stdin, status_writer, stdout.writer, stderr.writer):
            os.close(fd)
        try:
            self._watch(init, status_reader, {output.reader: output for output in (stdout, stderr)}, start)
            seconds = time.monotonic() - start
            self._take_stock(init)
        finally:
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)
            self._enclosure.end_all()
            os.close(status_reader)
            was_cut = [output.finish() for output in (stdout, stderr)]
        if any(was_cut) and self._limit is None:
            self._limit = "output"
        code, peak = self._end()
        return ExecResult(code, stdout.text(), stderr.text(), self._reason(code, peak), round(seconds, 6))

    # -- In the box

    def _watch(self, init: int, status: int, outputs: dict[int, Output], start: float) -> None:
        """Wait until the command has ended, or a limit is reached."""
        for fd in (status, *outputs, *self._owners):
            self._poll.register(fd, select.POLLIN)
        deadline = start + min(self._limits.wall_s, self._request.wall_s)
        interval = _FIRST_LOOK_S
        next_look = start + interval
        while self._limit is None:
            events = self._poll.poll(max(0.0, min(deadline, next_look) - time.monotonic()) * 1000)
            for fd, _ in events:
                if fd in outputs:
                    self._read(fd, outputs[fd])
                elif fd == status:
                    self._report = os.read(status, 4096)
                    return
                else:
                    raise OwnerGone
            now = time.monotonic()
            if now >= deadline:
                self._limit = "wall"
            elif now >= next_look:
                self._limit = self._limit or self._exceeded(usage.below(init)) or self._disk.exceeded()
                interval = min(2 * interval, _LONGEST_BETWEEN_S)
                looked = time.monotonic()
                next_look = looked + max(interval, _REST * (looked - now))

    def _read(self, fd: int, output: Output) -> None:
        if not output.read():
            self._poll.unregister(fd)
        if output.is_full:
            self._limit = "output"

    def _exceeded(self, used: usage.Usage) -> LimitName | None:
        if used.tasks > self._limits.processes:
            return "processes"
        if used.cpu_s > self._limits.cpu_s:
            return "cpu"
        if used.resident > self._limits.memory and usage.memory_of(used.pids) > self._limits.memory:
            return "memory"
        return None

    def _take_stock(self, init: int) -> None:
        """Look at what an ended command has left, before it is killed: it may be beyond a limit."""
        if self._limit is None:
            self._limit = self._exceeded(usage.below(init))

    def _end(self) -> tuple[int, int]:
        """Return the exit code of the command, and the bytes that one of its processes held at most."""
        if self._report.startswith(_NOT_STARTED):
            raise SandboxFailed(f"the command cannot be started: {self._report[1:].decode(errors='replace')}")
        if (
            len(self._report) < _STATUS.size
        ):  # it was killed, or has killed init where nothing keeps it from that
            return -signal.SIGKILL, 0
        _, status, peak = _STATUS.unpack_from(self._report)
        return os.waitstatus_to_exitcode(status), peak

    def _reason(self, code: int, peak: int) -> LimitName | None:
        """Return the limit that has ended the command. A shell reports a signal N of its child as 128 + N."""
        if self._limit is None and code != 0:
            if peak > self._limits.memory:  # the kernel failed an allocation between two looks
                return "memory"
            return _BY_SIGNAL.get(-code if code < 0 else code - 128) or self._disk.exceeded(thorough=True)
        return self._limit

    # -- In init

    def _init(self, status: int, streams: tuple[int, int, int]) -> None:
        """Start the command, report its end, and wait to be killed."""
        prctl(PR_SET_NAME, b"sandbox-init")
        if self._enclosure.has_namespaces:
            root.mount_processes()
        else:
            adopt_orphans()
        self._confine()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of users resets it
        box = select.poll()
        box.register(status, 0)
        if box.poll(0):  # nobody reads the status: the box has ended before the call above
            os._exit(1)
        command = self._start_command(streams)
        for fd in streams:
            os.close(fd)
        while True:
            try:
                pid, wait_status, used = os.wait4(-1, 0)
            except ChildProcessError:
                break
            if pid == command:
                # A process that is spawned counts the memory of init, until it runs its program.
                own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                peak = used.ru_maxrss << 10 if used.ru_maxrss > own else 0
                os.write(status, _STATUS.pack(_ENDED, wait_status, peak))
        while True:
            signal.pause()

    def _confine(self) -> None:
        """Give up everything that the box has and commands may not have. They inherit it from init.

        It has their user from here on, but it is process 1, which they cannot kill, and shows them nothing.
        """
        os.umask(0o022)
        os.chdir(self._enclosure.folder)
        self._limit_resources()
        if self._enclosure.switches:
            os.setgroups([])
            os.setresgid(*[self._enclosure.user] * 3)
            os.setresuid(*[self._enclosure.user] * 3)
        elif os.geteuid() == 0:
            _drop_capabilities()
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if self._enclosure.filter_program is not None:
            system_calls.install(self._enclosure.filter_program)

    def _start_command(self, streams: tuple[int, int, int]) -> int:
        """Start the command and return its process id. Raises OSError if resources are lacking.

        A program that cannot be run is no error of the sandbox: a shell's exit code says so.

        A spawned process does not copy the memory of init, as a fork would.
        """
        command = self._request.command
        environment = self._environment()
        try:
            return os.posix_spawn(
                _program(command[0], environment["PATH"]),
                command,
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)],
                setsid=True,
                setsigmask=(),
                setsigdef=_DEFAULT_SIGNALS,
            )
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) in _NO_RESOURCES:
                raise
            os.write(streams[2], f"{command[0]}: {getattr(error, 'strerror', error)}\n".encode())
            return _exited(_NO_PROGRAM)

    def _limit_resources(self) -> None:
        limits = self._limits
        seconds = ceil(limits.cpu_s)
        _limit(resource.RLIMIT_CPU, seconds, seconds + 1)
        _limit(resource.RLIMIT_DATA, _SPARE_MEMORY * limits.memory)
        _limit(resource.RLIMIT_FSIZE, limits.file_size)
        _limit(resource.RLIMIT_NOFILE, limits.open_files)
        _limit(resource.RLIMIT_NPROC, limits.processes + _SPARE_TASKS + self._tasks_that_count())
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_MEMLOCK, 1 << 16)

    def _tasks_that_count(self) -> int:
        """Return the number of processes that the kernel counts to those of the command."""
        if self._enclosure.switches or (self._enclosure.has_namespaces and _counts_by_namespace()):
            return 0
        return usage.tasks_of(os.geteuid())

    def _environment(self) -> dict[str, str]:
        enclosure = self._enclosure
        return {
            "PATH": enclosure.path,
            "HOME": enclosure.folder,
            "TMPDIR": enclosure.temporary,
            "USER": "sandbox",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",  # else numpy starts a thread for each core of the machine
        } | self._request.env


def _program(name: str, path: str) -> str:
    """Return the file of a program: a path, or a name that is looked for as a shell does."""
    if "/" in name:
        return name
    files = [f"{folder}/{name}" for folder in path.split(":") if folder]
    existing = [file for file in files if os.path.exists(file)] or [name]
    return next((file for file in existing if os.access(file, os.X_OK)), existing[0])


def _exited(code: int) -> int:
    """Return the id of a process that exits with a code."""
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    return pid


def _drop_capabilities() -> None:
    """Withhold capabilities from a program that runs as root, in a container whose only user is root."""
    with suppress(OSError):
        prctl(PR_SET_SECUREBITS, _NO_ROOT)
        for capability in range(64):
            prctl(PR_CAPBSET_DROP, capability)


def _act(play: Callable[[], None], status: int) -> NoReturn:
    """Run what a new process is for, and end it. What goes wrong is the box's to report."""
    try:
        play()
    except BaseException as error:
        with suppress(OSError):
            os.write(status, _NOT_STARTED + f"{type(error).__name__}: {error}".encode()[:2000])
    finally:
        os._exit(1)


def _sealed(data: bytes) -> int:
    """Return a descriptor for reading ``data``, whose memory nobody can make grow."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    _, largest = resource.getrlimit(kind)
    hard = soft if hard is None else hard
    if largest != resource.RLIM_INFINITY:
        soft, hard = min(soft, largest), min(hard, largest)
    resource.setrlimit(kind, (soft, hard))


def _counts_by_namespace() -> bool:
    version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return version >= _KERNEL_COUNTS_BY_NAMESPACE
