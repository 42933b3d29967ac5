"""One process at a time in a run folder that has no ledger to lock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.backend.driver.inputs import InputError

LOCK = "lock"
"""In the run folder. The file stays; what counts is who has it locked, which ends with that process."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Raises InputError while another process is inside."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process is running this run: wait for its end, or end it"
            ) from None
        yield
