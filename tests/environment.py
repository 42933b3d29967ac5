"""The environment of a process that a test starts, and its end."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def environment(*folders: str | Path, **variables: str) -> dict[str, str]:
    """This process's environment, with ``folders`` and the repository's root first on the Python path."""
    path = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | variables


@contextmanager
def killed_at_end(command: Sequence[Any], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a command inside the block. Popen itself would wait for its end for ever when a test has failed."""
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
        finally:
            process.kill()
