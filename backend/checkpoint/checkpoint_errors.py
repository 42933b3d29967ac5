"""CheckpointError, and errors of the disk as one that says what to do about them."""

import errno
from collections.abc import Generator
from contextlib import contextmanager

from slipstream.rollout.system.disk import describe

_TAKEN = "; a checkpoint of this name exists already: move it away"
_FULL = ", or lower checkpoint.keep_last"
_MORE = {errno.ENOTEMPTY: _TAKEN, errno.EEXIST: _TAKEN, errno.ENOSPC: _FULL, errno.EDQUOT: _FULL}
"""What to do about an error of a checkpoint, beyond what ``describe`` says."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Earlier checkpoints and the trainer are unchanged."""


@contextmanager
def explained(what: str) -> Generator[None]:
    """Turn an OSError of the block into a CheckpointError that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {describe(error)}{_MORE.get(error.errno or 0, '')}") from error
