"""The environment of a process that a test starts."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(*folders: str | Path, **variables: str) -> dict[str, str]:
    """This process's environment, with ``folders`` and the repository's root first on the Python path."""
    path = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | variables
