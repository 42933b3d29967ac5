"""The system calls that commands may not make, as a seccomp filter.

Namespaces keep a command from the machine's files, processes and network. The filter takes away what they do
not cover: memory that belongs to no process and no file, sockets to hypervisors, and parts of the kernel that
programs do not need and that had faults. Where there are no namespaces, it takes the network away as well.

The format is that of linux/filter.h and linux/seccomp.h; the numbers are those of asm/unistd.h.
"""

import ctypes
import errno
import platform
import struct

from slipstream.rollout.system.linux import PR_SET_SECCOMP, prctl

_REFUSED = {
    # Tracing and other processes' memory
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # Memory that is in no process and no folder
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Queues of calls that a filter does not see, and other large parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # The machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
}
"""System calls that fail with ENOSYS, so that libraries do without: their numbers on x86_64 and aarch64."""

_CLONE, _CLONE3, _SOCKET, _MMAP, _MREMAP = (56, 220), (435, 435), (41, 198), (9, 222), (25, 216)

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers above, and the AUDIT_ARCH of linux/audit.h."""

_X32 = 0x40000000
"""Bit in the numbers of x86_64's other calling convention, which the filter would not recognize."""

_NEW_NAMESPACES = 0x7E020000
"""All CLONE_NEW* of linux/sched.h."""

_PRIVATE_NETWORK = (1, 2, 10, 16)
"""Families of sockets that a network namespace keeps apart: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""

_WRITABLE, _ANONYMOUS, _NORESERVE = 2, 0x20, 0x4000
"""PROT_WRITE, MAP_ANONYMOUS, MAP_NORESERVE of linux/mman.h. What is only reserved is address space."""

_LOAD, _EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_TRAP, _FAIL = 0x00030000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_MODE_FILTER = 2


class NoFilter(OSError):
    """This machine has no filter of system calls."""


def program(largest_mapping: int, has_namespaces: bool) -> bytes:
    """Return the filter for the commands of a sandbox. Raises NoFilter.

    ``largest_mapping``: bytes of memory that a process may ask for at once. One that asks for more gets
    SIGSYS, which nothing else here causes: an allocation that merely fails could not be reported.
    """
    if platform.machine() not in _MACHINES:
        raise NoFilter(errno.ENOSYS, f"the system calls of {platform.machine()} are not known here")
    column, architecture = _MACHINES[platform.machine()]
    code = [
        *_load(_ARCHITECTURE),
        *_if(_EQUAL, architecture, [], [_op(_RETURN, _KILL)]),
        *_load(_NUMBER),
    ]
    if column == 0:
        code += _if(_AT_LEAST, _X32, [_fail(errno.ENOSYS)])
    for numbers in (*_REFUSED.values(), _CLONE3):  # glibc uses clone instead, whose flags a filter can read
        code += _if(_EQUAL, numbers[column], [_fail(errno.ENOSYS)])
    code += _if(
        _EQUAL,
        _CLONE[column],
        [*_load(_argument(0)), *_if(_ANY_BIT, _NEW_NAMESPACES, [_fail(errno.EPERM)]), _op(_RETURN, _ALLOW)],
    )
    families = [check for family in _PRIVATE_NETWORK for check in _if(_EQUAL, family, [_op(_RETURN, _ALLOW)])]
    allowed = [*_load(_argument(0)), *families] if has_namespaces else []
    code += _if(_EQUAL, _SOCKET[column], [*allowed, _fail(errno.EACCES)])
    is_memory = [
        *_load(_argument(2)),
        *_if(_ANY_BIT, _WRITABLE, [], [_op(_RETURN, _ALLOW)]),
        *_load(_argument(3)),
        *_if(_ANY_BIT, _NORESERVE, [_op(_RETURN, _ALLOW)]),
        *_if(_ANY_BIT, _ANONYMOUS, [], [_op(_RETURN, _ALLOW)]),
    ]
    code += _if(_EQUAL, _MMAP[column], [*is_memory, *_trap_above(_argument(1), largest_mapping)])
    code += _if(_EQUAL, _MREMAP[column], _trap_above(_argument(2), largest_mapping))
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def install(filter_program: bytes) -> None:
    """Put a filter on this process and all that it starts. It must have given up new privileges.

    Raises OSError.
    """
    instructions = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("@HP", len(filter_program) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, _MODE_FILTER, header)


def _op(code: int, value: int, when_true: int = 0, when_false: int = 0) -> bytes:
    return struct.pack("@HBBI", code, when_true, when_false, value)


def _fail(number: int) -> bytes:
    return _op(_RETURN, _FAIL | number)


def _load(offset: int) -> list[bytes]:
    return [_op(_LOAD, offset)]


def _if(test: int, value: int, then: list[bytes], otherwise: list[bytes] | None = None) -> list[bytes]:
    """Return the code that goes through ``then`` if the loaded word passes a test, else ``otherwise``.

    Only one of the two may have code.
    """
    if otherwise:
        return [_op(test, value, len(otherwise), 0), *otherwise]
    return [_op(test, value, 0, len(then)), *then]


def _argument(number: int) -> int:
    """Return where the lower half of an argument lies; the upper half is 4 bytes further."""
    return _ARGUMENTS + 8 * number


def _trap_above(argument: int, most: int) -> list[bytes]:
    """Return the code that ends a call whose argument of 64 bits is larger than ``most``."""
    trap, allow = _op(_RETURN, _TRAP), _op(_RETURN, _ALLOW)
    return [
        *_load(argument + 4),
        *_if(_ABOVE, most >> 32, [trap]),
        *_if(_EQUAL, most >> 32, [], [allow]),
        *_load(argument),
        *_if(_ABOVE, most & 0xFFFFFFFF, [trap]),
        allow,
    ]
