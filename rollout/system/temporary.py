"""Temporary folders that a later start removes if their owner could not.

A folder belongs to the process that holds its lock. The kernel drops the lock when that process ends, by
kill -9 too, so that a folder without a lock is a leftover. Unlike a process id, a lock also tells the truth
between containers that share a folder.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "slipstream."
"""Begins the name of every folder of this kind, and of no other folder."""


class OwnedFolder:
    """A new folder that only this user may enter, locked by this process until ``remove`` or its end."""

    def __init__(self, parent: Path, name: str) -> None:
        """Remove the leftovers in ``parent``, then make a folder there whose name contains ``name``."""
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}.", dir=parent))
            with suppress(FileNotFoundError):  # a sweep saw the folder before it was opened
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)  # or before it was locked

    def remove(self) -> None:
        """Remove the folder with everything in it. Does nothing the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove this user's folders in ``parent`` whose owner has ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, no folder, or gone
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            """Its owner lives."""
        finally:
            os.close(lock)
