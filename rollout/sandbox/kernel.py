"""Calls of the Linux kernel about namespaces and mounts, which Python's library does not have."""

import ctypes
import os
import platform
import signal

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWCGROUP = 0x02000000
"""From linux/sched.h."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 1024, 2048, 4096, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
"""From linux/mount.h."""

_MNT_DETACH = 2
_SYS_CLONE, _SYS_PIVOT_ROOT = {"x86_64": (56, 155), "aarch64": (220, 41)}.get(platform.machine(), (-1, -1))

# PyDLL keeps Python's lock during a call: a clone must not find it released.
_libc = ctypes.PyDLL(None, use_errno=True)


def clone(flags: int) -> int:
    """Fork this process, which must have one thread, into new namespaces. Return 0 in the child.

    No namespace of process ids could be had from ``os.fork``. Raises OSError.
    """
    pid = _libc.syscall(
        _SYS_CLONE, ctypes.c_ulong(flags | signal.SIGCHLD), *map(ctypes.c_ulong, (0, 0, 0, 0))
    )
    return _checked(pid, "clone")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or change a mount. Raises OSError."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*arguments), f"mount {target}")


def replace_root(new_root: str) -> None:
    """Make a mount the root of this mount namespace, and take the old root away. Raises OSError."""
    os.chdir(new_root)
    _checked(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def set_host_name(name: bytes) -> None:
    """Set the host name of this namespace. Raises OSError."""
    _checked(_libc.sethostname(name, ctypes.c_size_t(len(name))), "sethostname")


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
