"""Encloses the commands of one sandbox: in namespaces where the kernel allows it, else a user of its own.

The keeper clones a box with ``NAMESPACES``; the box then calls `enclose`, which makes the enclosure in the
process that calls it.
"""

import os
import resource
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slipstream.rollout.sandbox import filter as system_calls
from slipstream.rollout.sandbox import kernel, root, usage
from slipstream.rollout.sandbox.interface import Isolation, Level, SandboxFailed
from slipstream.rollout.sandbox.wire import Setup
from slipstream.rollout.system.linux import (
    PR_SET_DUMPABLE,
    adopt_orphans,
    children_of,
    ended_children,
    kill_users_of,
    prctl,
)
from slipstream.rollout.system.temporary import OwnedFolder

NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
"""Namespaces of a box. Each command gets one of process ids as well."""

_FIRST_USER = 2_000_000_000
"""Sandboxes of root run under user ids of their own from here on, for which no machine has accounts. The
process id of the box determines the user id."""

_OOM_SCORE = "900"
"""When the machine runs out of memory, the kernel should choose a sandbox."""

_KILL_S = 20.0
"""Seconds within which the processes that outlive a command must have ended."""

_MOST_PASSES = 100
"""Passes over processes that fork while they are stopped. Each one leaves fewer that run."""

_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders of the machine that every user may write to."""


@dataclass(frozen=True)
class Enclosure:
    """The surroundings of commands."""

    isolation: Isolation
    folder: str
    """Where commands start, and what paths of files are relative to."""
    temporary: str
    path: str
    """PATH of commands."""
    user: int
    """To whom the files belong, in the user namespace of the box."""
    switches: bool
    """True if a command has to become ``user`` by itself."""
    filter_program: bytes | None
    owned: OwnedFolder | None = None
    """Folder on the machine's disk, where there is no private root."""

    @property
    def has_namespaces(self) -> bool:
        return self.isolation.level == "namespaces"

    def end_all(self) -> None:
        """Kill the processes that outlive a command. With namespaces the kernel has done so already."""
        if self.has_namespaces:
            return
        deadline = time.monotonic() + _KILL_S
        while children_of(os.getpid()):
            if time.monotonic() > deadline:
                raise SandboxFailed(
                    f"processes of the command still run {_KILL_S:g} s after they were killed"
                )
            if self.switches:
                _kill_all_of(self.user)
            _kill_below(os.getpid())
        kill_users_of(self.temporary)

    def remove(self) -> None:
        """Remove the files. With namespaces the kernel does so when the box ends."""
        if self.owned is not None:
            self.end_all()
            self.owned.remove()
            if self.switches:
                _remove_files_of(self.user)


def enclose(setup: Setup, isolation: Isolation) -> Enclosure:
    """Make the enclosure of this process's sandbox. Raises OSError.

    With the level ``namespaces``, this process was just cloned into NAMESPACES, and its users are mapped.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    path = ":".join([*(f"{prefix}/bin" for prefix in setup.prefixes), "/usr/local/bin", "/usr/bin", "/bin"])
    if isolation.level != "namespaces":
        return _enclose_by_user(setup, isolation, path)
    switches = os.geteuid() == 0
    if switches:
        os.setgroups([])
    root.build(setup.limits.disk, {*setup.readable, *setup.prefixes}, root.USER)
    kernel.set_host_name(b"sandbox")
    # A command that could make a user namespace would have all capabilities in it.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    prctl(PR_SET_DUMPABLE, 0)  # nobody in the sandbox looks into the box
    program = system_calls.program(setup.limits.memory, has_namespaces=True)
    return Enclosure(isolation, root.FOLDER, root.TEMPORARY, path, root.USER, switches, program)


def _enclose_by_user(setup: Setup, isolation: Isolation, path: str) -> Enclosure:
    adopt_orphans()
    owned = OwnedFolder(Path(tempfile.gettempdir()), "sandbox")
    switches = isolation.level == "user"
    user = _FIRST_USER + os.getpid() if switches else os.geteuid()
    os.chmod(owned.path, 0o711)
    folder, temporary = owned.path / "files", owned.path / "tmp"
    for path_of_user in (folder, temporary):
        path_of_user.mkdir(0o700)
        os.chown(path_of_user, user, user if switches else -1)
    try:
        program = system_calls.program(setup.limits.memory, has_namespaces=False)
    except system_calls.NoFilter:
        if switches:
            raise
        program = None
    return Enclosure(isolation, str(folder), str(temporary), path, user, switches, program, owned)


def map_users(box: int) -> None:
    """Say who the users of a new user namespace are on the machine. Its parent does so, before it goes on.

    Root's sandboxes get a user without an account, because the kernel does not count root's processes and
    lets root's files be written. Everybody else can only be themselves. Raises OSError.
    """
    if os.geteuid() == 0:
        users = f"0 0 1\n{root.USER} {_FIRST_USER + box} 1\n"
        groups = users
    else:
        users, groups = f"{root.USER} {os.geteuid()} 1\n", f"{root.USER} {os.getegid()} 1\n"
        Path(f"/proc/{box}/setgroups").write_text("deny")
    Path(f"/proc/{box}/uid_map").write_text(users)
    Path(f"/proc/{box}/gid_map").write_text(groups)


def limits_processes(level: Level) -> bool:
    """True if the kernel limits the number of processes of a command without namespaces.

    It does not for root. A command that forks without an end would then take all processes of the machine.
    """
    pid = os.fork()
    if pid == 0:
        is_limited = False
        with suppress(OSError):
            if level == "user":
                os.setresuid(*[_FIRST_USER] * 3)
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            try:
                if os.fork() == 0:
                    os._exit(0)
            except BlockingIOError:
                is_limited = True
        os._exit(0 if is_limited else 1)
    return os.waitpid(pid, 0)[1] == 0


def _kill_all_of(user: int) -> None:
    """Kill every process of a user at once, as that user: none of them gets time to fork."""
    with suppress(OSError):  # the machine has no process left for it
        pid = os.fork()
        if pid == 0:
            with suppress(OSError):
                os.setresuid(user, user, user)
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(pid, 0)


def _kill_below(pid: int) -> None:
    """Kill the descendants of a process. They are stopped first, because a stopped process cannot fork."""
    seen: set[int] = set()
    for _ in range(_MOST_PASSES):
        new = set(usage.below(pid).pids) - seen
        if not new:
            break
        seen |= new
        _send(new, signal.SIGSTOP)
    _send(seen, signal.SIGKILL)
    for _ in ended_children():
        """Each is reaped."""


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _remove_files_of(user: int) -> None:
    """Remove what a user without an account has left in the folders that are everybody's."""
    for folder in _SHARED_FOLDERS:
        with suppress(OSError):
            for entry in os.scandir(folder):
                if entry.stat(follow_symlinks=False).st_uid == user:
                    _remove(Path(entry.path))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
