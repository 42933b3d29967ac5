"""Builds the wheel of this repository from a copy, so that nothing of an earlier build gets in."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.environment import ROOT

PARTS = ("backend", "bridge", "configs", "rollout", "slurm", "LICENSE", "README.md", "pyproject.toml")


def build_wheel(folder: Path) -> Path:
    """Build the wheel below ``folder`` and return its path."""
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            str(source),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    [wheel] = folder.glob("*.whl")
    return wheel
