"""``slipstream doctor``: what this machine offers of what Slipstream needs. Imports none of the libraries."""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.backend.cluster.object_store import free_shared_memory
from slipstream.configs.installed.environment import UnreadableRecord, digest, has_gpus, read_record

PACKAGES = {
    "torch": "tensors",
    "megatron-core": "trains the policy",
    "sglang": "generates",
    "ray": "places processes",
    "transformers": "tokenizers",
    "tensorboard": "shows metrics",
    "transformer-engine": "fused layers, GPUs only",
}
OPTIONAL = {"transformer-engine"}
NEEDED_SHM = 512 * 2**20
"""Bytes of shared memory for Ray's object store and Torch's file descriptors."""


@dataclass(frozen=True)
class Finding:
    """One thing that was examined."""

    what: str
    state: str
    advice: str = ""
    wrong: bool = False
    seen: bool = True
    """False: the thing could not be looked at from here, for the reason in ``state``."""

    @property
    def mark(self) -> str:
        """A sign for right, wrong or unseen."""
        if not self.seen:
            return "[yellow]?[/]"
        return "[red]✗[/]" if self.wrong else "[green]✓[/]"


def examine() -> list[Finding]:
    """Return every finding, in the order in which they are shown."""
    return [
        _python(),
        _kind(),
        *map(_package, PACKAGES),
        _gpus(),
        Finding("CPU cores", str(len(os.sched_getaffinity(0)))),
        _memory(),
        _shared_memory(),
        Finding("Slurm", "sbatch found" if shutil.which("sbatch") else "none", "for multi-node runs"),
    ]


def _python() -> Finding:
    wrong = sys.version_info[:2] not in ((3, 11), (3, 12))
    running = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", running, "3.11 or 3.12 is needed" if wrong else "", wrong)


def _kind() -> Finding:
    what = "environment"
    try:
        record = read_record(Path(sys.prefix))
    except UnreadableRecord as error:
        return Finding(what, "unknown", str(error), wrong=True)
    if record is None:
        return Finding(what, "not recorded", "it was not made by `make install` or docker/Dockerfile")
    changed = record.pins != digest(record.kind)
    advice = "the exact versions have changed since: run `make install`" if changed else ""
    return Finding(what, f"for {record.kind.upper()}s", advice, changed)


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name), PACKAGES[name])
    except PackageNotFoundError:
        optional = name in OPTIONAL
        advice = PACKAGES[name] if optional else f"{PACKAGES[name]}: run `make install`"
        return Finding(name, "not installed", advice, wrong=not optional)


def _gpus() -> Finding:
    if not has_gpus():
        return Finding("GPUs", "none", "the same stack runs on the CPU")
    count = sum(entry.startswith("nvidia") and entry[6:].isdigit() for entry in os.listdir("/dev"))
    return Finding("GPUs", str(count))


def _memory() -> Finding:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    small = size < 6 * 2**30
    return Finding(
        "memory", f"{size / 2**30:.0f} GiB", "the quickstart needs about 5 GiB" if small else "", small
    )


def _shared_memory() -> Finding:
    free = free_shared_memory()
    small = free < NEEDED_SHM
    advice = f"{NEEDED_SHM // 2**20} MiB are needed, in a container: --shm-size=1g" if small else ""
    return Finding("free in /dev/shm", f"{free / 2**30:.1f} GiB", advice, small)


def print_findings(findings: list[Finding]) -> None:
    """Print one line for each finding, marked as right, wrong or unseen."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        table.add_row(finding.mark, finding.what, finding.state, f"[dim]{finding.advice}[/]")
    Console().print(table)
