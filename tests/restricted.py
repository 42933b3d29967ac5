"""Runs a command where the kernel allows less than here, to see what a sandbox does then.

python -m tests.restricted ACCOUNT COMMAND [ARGUMENT ...]

user    an account without privileges, that may make user namespaces
root    root, who may switch to other users, but may make no user namespace: a usual container
nobody  root with one user id, who may make no user namespace
"""

import os
import sys
from pathlib import Path

from slipstream.rollout.sandbox import kernel

MAPS = {"user": f"1000 {os.geteuid()} 1\n", "root": "0 0 4294967295\n", "nobody": f"0 {os.geteuid()} 1\n"}
"""User ids inside and outside, and how many."""


def main() -> int:
    """Run the command in a new user namespace, and return its exit code."""
    account, *command = sys.argv[1:]
    begin, beginner = os.pipe()
    pid = kernel.clone(kernel.CLONE_NEWUSER)
    if pid == 0:
        os.close(beginner)
        os.read(begin, 1)
        if account != "user":
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
        os.execvp(command[0], command)
    if os.geteuid() != 0:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(MAPS[account])
    Path(f"/proc/{pid}/gid_map").write_text(MAPS[account])
    os.write(beginner, b"\0")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
