"""``make lock-check``: resolves the GPU environment without a GPU, and compares the result with gpu.txt.

The resolver takes the versions of the file wherever the package index still offers them and every package
accepts them. A version that it replaces is a difference, and what it cannot resolve an error: exit code 1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from slipstream.configs.installed.environment import FOLDER, PINS

TIMEOUT_S = 280
"""Longest time for the resolver. With an empty cache it reads some 240 descriptions of packages."""


class NotResolved(Exception):
    """The versions cannot be installed together; the message is the resolver's."""


def resolve(pins: Path) -> list[str]:
    """Return what the resolver chooses under ``pins``, as lines `name==version`. Raises NotResolved."""
    folders = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)])
    uv = shutil.which("uv", path=folders)
    if uv is None:
        raise NotResolved("no uv in this environment: run `make install`")
    ended = subprocess.run(
        ["sh", str(FOLDER / "lock-gpu.sh"), uv, str(pins)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"PATH": folders},
    )
    if ended.returncode:
        raise NotResolved(ended.stderr.strip())
    return ended.stdout.split("\n")[:-1]


def main() -> int:
    """Print the differences, or that there is none and the number of packages."""
    pins = PINS["gpu"]
    locked = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
    try:
        resolved = resolve(pins)
    except NotResolved as error:
        print(error)
        return 1
    differences = [
        *(f"- {line}" for line in locked if line not in resolved),
        *(f"+ {line}" for line in resolved if line not in locked),
    ]
    if differences:
        print(f"{pins} (-) and what the resolver chooses (+) differ; `make lock` writes the file anew:")
        print(*differences, sep="\n")
        return 1
    print(f"ok {len(locked)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
