"""What goes wrong with the file system of a run, and what to do about it: one text for all of its files."""

import errno

ADVICE = {
    errno.ENOSPC: "free space on this file system",
    errno.EDQUOT: "your quota is used up: free space, or have it raised",
    errno.EFBIG: "the limit on file sizes (ulimit -f) is too low for this file",
    errno.EROFS: "the file system is read-only: remount it, or put run.root elsewhere",
    errno.EACCES: "give the user of this run write access, or put run.root elsewhere",
    errno.EPERM: "give the user of this run write access, or put run.root elsewhere",
    errno.EIO: "the disk or its server has failed: look at `dmesg` and at the state of the file system",
    errno.ESTALE: "the file system was exported anew, or the folder was replaced: mount it again",
    errno.ENOTCONN: "the file system is not mounted any more: mount it again",
    errno.ETIMEDOUT: "the server of the file system does not answer: wait until it does",
    errno.ENOLCK: "the file system has no locks to give: restart its lock daemon, or mount it with locks",
}
"""What to do about an error of the disk, by its number."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that end when somebody makes room."""


def describe(error: OSError) -> str:
    """Return what went wrong with which file, and what to do about it."""
    where = f" ({error.filename})" if error.filename else ""
    advice = ADVICE.get(error.errno or 0)
    return f"{error.strerror or error}{where}" + (f"; {advice}" if advice else "")
