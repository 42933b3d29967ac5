"""Runs a command so that each of its descendants can be told from every other process of the machine.

    python -I -S nursery.py COMMAND ...

The kernel makes this process the parent of every orphan below it (PR_SET_CHILD_SUBREAPER): a descendant of
the command stays a descendant of this process, whatever session, environment or title it gives itself. Where
the caller may mount file systems, the command also has a /dev/shm of its own.

Standard output gets three lines: the id of the command's process; ``private`` or ``shared`` for its
/dev/shm; and, at its end, the exit code. Nothing is reaped before the first byte of standard input. At the
end of standard input (kill -9 of the caller included) everything that is left is killed.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000


def stat_of(pid: int) -> tuple[str, int] | None:
    """Return the state and the parent of a process, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent, *_ = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return state, int(parent)


def descendants_of(ancestor: int) -> list[int]:
    """Return the living processes below ``ancestor``; zombies do not count."""
    stats = {pid: stat_of(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        if stat is not None:
            children.setdefault(stat[1], []).append(pid)
    below: list[int] = []
    generation = [ancestor]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, [])]
        below += generation
    return [pid for pid in below if (stat := stats[pid]) is not None and stat[0] not in "ZX"]


def kill_descendants_of(ancestor: int) -> None:
    """Kill everything below ``ancestor``, until nothing is left."""
    while descendants := descendants_of(ancestor):
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def isolate_shared_memory() -> bool:
    """Mount an empty /dev/shm for this process and its children; return whether that is permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return False
    return (
        libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=1777") == 0
    )


def kill_at_end_of_input() -> None:
    while os.read(0, 1):
        """Nothing more is sent."""
    kill_descendants_of(os.getpid())
    os._exit(0)


def main() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER) failed")
    answers = os.dup(1)  # the command writes to standard error
    os.set_inheritable(answers, False)
    private = isolate_shared_memory()
    command = os.fork()
    if command == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.execvp(sys.argv[1], sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # the terminal sends them to the command as well
        signal.signal(number, signal.SIG_IGN)
    os.write(answers, f"{command}\n{'private' if private else 'shared'}\n".encode())
    os.read(0, 1)
    threading.Thread(target=kill_at_end_of_input, daemon=True).start()
    with suppress(ChildProcessError):  # nothing is left below this process
        while True:
            pid, status = os.wait()
            if pid == command:
                os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    threading.Event().wait()


if __name__ == "__main__":
    main()
