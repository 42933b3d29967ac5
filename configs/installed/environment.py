"""The kind of the installed environment, for GPUs or for CPUs, and the exact versions that belong to each.

``make install`` and docker/Dockerfile record in the environment itself what they have installed:

    python -m slipstream.configs.installed.environment gpu            records the kind
    python -m slipstream.configs.installed.environment --check gpu    compares the packages with their pins

It imports nothing but the standard library, so that it also runs as a file before Slipstream is installed.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["cpu", "gpu"]

RECORD = "slipstream-environment.json"
"""Name of the record, below the environment's prefix."""

FOLDER = Path(__file__).parents[1] / "environment"
PINS = {"cpu": FOLDER / "constraints.txt", "gpu": FOLDER / "gpu.txt"}
"""File with the exact versions of each kind."""


@dataclass(frozen=True)
class InstalledEnvironment:
    """The record of an installation."""

    kind: Kind
    python: str
    pins: str
    """SHA-256 of the file of exact versions that the environment was installed from."""


class UnreadableRecord(ValueError):
    """A record was damaged or written by something else."""


def has_gpus() -> bool:
    """True if this machine has a driver for GPUs, without loading it."""
    return os.path.exists("/dev/nvidiactl")


def pinned(kind: Kind) -> dict[str, str]:
    """Return the exact version of every package of an environment, by its normalized name.

    A line with a marker after the version, which holds for some Pythons only, is left out.
    """
    lines = (line.split("#")[0].strip() for line in PINS[kind].read_text(encoding="utf-8").splitlines())
    pins = (line.partition("==") for line in lines if "==" in line and ";" not in line)
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, _, version in pins}


def differences(kind: Kind) -> list[str]:
    """Return the packages that are not installed in their exact version, with what is there."""
    wrong: list[str] = []
    for name, version in pinned(kind).items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed.partition("+")[0] != version:  # a plus begins the variant of a build: +cpu
            wrong.append(f"{name}: {installed} found, {version} expected")
    return wrong


def digest(kind: Kind) -> str:
    """Return the SHA-256 of the file with the exact versions of ``kind``."""
    return hashlib.sha256(PINS[kind].read_bytes()).hexdigest()


def write_record(kind: Kind, prefix: Path) -> Path:
    """Record below ``prefix`` that an environment of ``kind`` was installed. Return the record's path."""
    path = prefix / RECORD
    record = InstalledEnvironment(kind, platform.python_version(), digest(kind))
    path.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
    return path


def read_record(prefix: Path) -> InstalledEnvironment | None:
    """Return what was installed below ``prefix``; None if nothing was recorded. Raises UnreadableRecord."""
    path = prefix / RECORD
    try:
        record = InstalledEnvironment(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        raise UnreadableRecord(f"{path} cannot be read ({error}): run `make install` again") from None
    if record.kind not in get_args(Kind):
        raise UnreadableRecord(
            f"{path}: kind {record.kind!r} found, 'cpu' or 'gpu' expected: run `make install` again"
        )
    return record


def main() -> None:
    """Record or check the kind that the command line names, for the environment of this interpreter."""
    arguments = sys.argv[1:]
    for kind in get_args(Kind):
        if arguments == [kind]:
            write_record(kind, Path(sys.prefix))
            return
        if arguments == ["--check", kind]:
            sys.exit("\n".join(differences(kind)) or None)
    sys.exit(f"[--check] and cpu or gpu expected, found: {' '.join(arguments) or 'nothing'}")


if __name__ == "__main__":
    main()
