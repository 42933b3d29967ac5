"""CheckpointError, and errors of the disk in words that say what to do about them."""

import errno
from collections.abc import Generator
from contextlib import contextmanager

_ADVICE = {
    errno.ENOSPC: "free space on this file system, or lower checkpoint.keep_last",
    errno.EDQUOT: "your quota is used up: free space, or lower checkpoint.keep_last",
    errno.EFBIG: "the limit on file sizes (ulimit -f) is too low for this checkpoint",
    errno.EROFS: "the file system is read-only: remount it, or put run.root elsewhere",
    errno.EACCES: "give the user of this run write access, or put run.root elsewhere",
    errno.EPERM: "give the user of this run write access, or put run.root elsewhere",
    errno.ENOTEMPTY: "a checkpoint of this name exists already: move it away",
    errno.EEXIST: "a checkpoint of this name exists already: move it away",
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Earlier checkpoints and the trainer are unchanged."""


def describe(error: OSError) -> str:
    """Return what went wrong with which file, and what to do about it."""
    where = f" ({error.filename})" if error.filename else ""
    advice = _ADVICE.get(error.errno or 0)
    return f"{error.strerror or error}{where}" + (f"; {advice}" if advice else "")


@contextmanager
def explained(what: str) -> Generator[None]:
    """Turn an OSError of the block into a CheckpointError that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {describe(error)}") from error
