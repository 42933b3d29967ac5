"""The private root of a sandbox: what commands see of the machine's files.

    /sandbox /tmp /dev/shm      theirs, on one file system in memory with a size
    /usr /bin /lib ... /etc/*   the machine's, read-only
    the Python of Slipstream    the machine's, read-only, where it lies on the machine
    /proc                       the processes of the command
    everything else             not there

The file system belongs to a mount namespace: the kernel drops it with the last process in it.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from slipstream.rollout.sandbox import kernel
from slipstream.rollout.sandbox.kernel import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
)

FOLDER, TEMPORARY, SHARED = "/sandbox", "/tmp", "/dev/shm"
"""Folders that commands may write to. FOLDER is where they start."""

USER = 1000
"""User and group that commands see themselves as."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types")
"""Names in /etc, none of which tells anything of users, keys or other machines."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}

_FILES = {
    "passwd": f"root:x:0:0::/:/bin/sh\nsandbox:x:{USER}:{USER}::{FOLDER}:/bin/sh\n",
    "group": f"root:x:0:\nsandbox:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Files in /etc that are the sandbox's own."""

_INODES_PER_MB = 64
_BASE = "/tmp"
"""Where the new root is mounted before it is the root; any folder that every machine has."""

_FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": kernel.MS_NOATIME,
    "nodiratime": kernel.MS_NODIRATIME,
    "relatime": kernel.MS_RELATIME,
}
"""Options of a mount, as the kernel writes them. A change of a mount must repeat those that it has."""


def build(size: int, readable: Iterable[str], owner: int) -> None:
    """Give this process, which has just got its own mount namespace, the root of a new sandbox.

    ``size``: bytes of all files together. ``readable``: folders to show beyond those of the system; one that
    does not exist is an error. ``owner``: to whom the writable folders belong. Raises OSError.
    """
    kernel.mount("none", "/", "", kernel.MS_PRIVATE | MS_REC)
    sources = _opened(readable)
    options = f"size={size},nr_inodes={most_files(size)},mode=755"
    kernel.mount("sandbox", _BASE, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for path, source in sources.items():
        _show(path, source)
    _make_own_files()
    for path in (FOLDER, TEMPORARY, SHARED):
        os.makedirs(_BASE + path, exist_ok=True)
        os.chown(_BASE + path, owner, owner)
    for path in (FOLDER, TEMPORARY, SHARED):
        kernel.mount(_BASE + path, _BASE + path, "", MS_BIND | MS_REC)
    # The kernel lets a namespace mount /proc only if it sees a whole one already.
    os.mkdir(f"{_BASE}/proc")
    kernel.mount("/proc", f"{_BASE}/proc", "", MS_BIND | MS_REC)
    kernel.replace_root(_BASE)
    _make_read_only()


def most_files(size: int) -> int:
    """Return the number of files and folders that a sandbox may have whose files have ``size`` bytes."""
    return 1024 + (size >> 20) * _INODES_PER_MB


def mount_processes() -> None:
    """Show the processes of this process's own namespace in /proc, or none where the kernel refuses it.

    It is read-only, because the kernel's settings are in it, and root may change some without a capability.
    """
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
    try:
        kernel.mount("proc", "/proc", "proc", flags)
    except PermissionError:  # as in a container that hides parts of /proc
        kernel.mount("none", "/proc", "tmpfs", flags, "size=4k")


def _opened(readable: Iterable[str]) -> dict[str, int]:
    """Return descriptors of everything of the machine that commands see, by its path.

    Links of the system's folders, such as /bin to usr/bin, have no descriptor: they are made again.
    """
    paths = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    paths += [path for name in _SETTINGS if os.path.exists(path := f"/etc/{name}")]
    paths += [f"/dev/{name}" for name in _DEVICES]
    paths += sorted(path for path in readable if not _is_below(path, _SYSTEM))
    return {path: os.open(path, os.O_PATH) for path in paths}


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _show(path: str, source: int) -> None:
    """Show a file or folder of the machine at the same path of the new root."""
    target = _BASE + path
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    kernel.mount(f"/proc/self/fd/{source}", target, "", MS_BIND | MS_REC)
    os.close(source)


def _make_own_files() -> None:
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), _BASE + path)
    os.makedirs(f"{_BASE}/etc", exist_ok=True)
    for name, text in _FILES.items():
        Path(_BASE, "etc", name).write_text(text)
    os.makedirs(f"{_BASE}/var", exist_ok=True)
    with suppress(FileExistsError):
        os.symlink(TEMPORARY, f"{_BASE}/var/tmp")
    for name, target in _LINKS.items():
        os.symlink(target, f"{_BASE}/dev/{name}")


def _make_read_only() -> None:
    """Make every mount except the writable ones read-only, those below the machine's folders included."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for fields in mounts:
        path = _unescaped(fields[4])
        if path in (FOLDER, TEMPORARY, SHARED) or _is_below(path, ["/proc"]):
            continue
        flags = sum(_FLAGS.get(option, 0) for option in fields[5].split(","))
        kernel.mount("none", path, "", MS_REMOUNT | MS_BIND | flags | MS_RDONLY | MS_NOSUID)


def _unescaped(path: str) -> str:
    """Return a path as it is. In /proc/self/mountinfo a space is a backslash and 040."""
    first, *rest = path.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)
