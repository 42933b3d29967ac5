"""CPU and memory of the processes below a process, by what they do for the run, from /proc.

raylet ─┬─ ray::EngineActor ─── SGLang's processes          engines
        ├─ ray::CollectorActor ─── judges, sandboxes        collectors
        └─ ray::TrainerActor                                trainer

The driver of a run on one machine is the parent of its raylet.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

TITLES = {
    b"ray::EngineActor": "engines",
    b"ray::CollectorActor": "collectors",
    b"ray::TrainerActor": "trainer",
}
"""Group of a process and of all below it, by the beginning of its title. Ray gives its workers these."""

GROUPS = ("driver", *sorted(TITLES.values()))

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """One process at one moment."""

    parent: int
    began: int
    """Tells processes with the same id apart."""
    cpu_s: float
    """Computing time since its start."""


@dataclass(frozen=True)
class GroupUsage:
    """The resources that a group of processes uses on one node, or on all."""

    cpu_cores: float = 0.0
    """CPU cores that the processes kept busy since the sample before."""
    memory_bytes: int = 0
    """Memory of their own: what is resident, without files and shared memory."""
    gpu_fractions: tuple[float, ...] = ()
    """Share of the time in which each GPU that they use was busy."""
    gpu_memory_bytes: int = 0
    pids: frozenset[int] = field(default_factory=frozenset[int])
    """Processes on one node; empty in a sum over nodes."""

    def __add__(self, other: "GroupUsage") -> "GroupUsage":
        return GroupUsage(
            self.cpu_cores + other.cpu_cores,
            self.memory_bytes + other.memory_bytes,
            self.gpu_fractions + other.gpu_fractions,
            self.gpu_memory_bytes + other.gpu_memory_bytes,
        )


class UsageSampler:
    """Compares the processes below ``root`` with those of the sample before. Used from one thread."""

    def __init__(
        self,
        root: int,
        group: str | None = None,
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``group``: of ``root`` alone; None: the groups of ``TITLES`` below it."""
        self._root, self._group, self._proc, self._clock = root, group, proc, clock
        self._before: Mapping[int, Process] = {}
        self._then: float | None = None

    def sample(self) -> dict[str, GroupUsage]:
        """Return the usage of each group that has a process. The first sample has no computing times."""
        table = dict(self._table()) if self._group is None else self._own()
        members = {self._root: self._group} if self._group is not None else self._members(table)
        now = self._clock()
        seconds = None if self._then is None else now - self._then
        usage: dict[str, GroupUsage] = {}
        for pid, group in members.items():
            if group is None or pid not in table:
                continue
            cores = self._computed(pid, table[pid]) / seconds if seconds else 0.0
            each = GroupUsage(cores, self._memory(pid))
            pids = usage[group].pids | {pid} if group in usage else frozenset({pid})
            total = usage.get(group, GroupUsage()) + each
            usage[group] = GroupUsage(total.cpu_cores, total.memory_bytes, pids=pids)
        self._before, self._then = {pid: table[pid] for pid in members if pid in table}, now
        return usage

    def _computed(self, pid: int, process: Process) -> float:
        before = self._before.get(pid)
        is_same = before is not None and before.began == process.began
        return process.cpu_s - (before.cpu_s if is_same and before is not None else 0.0)

    def _own(self) -> dict[int, Process]:
        process = self._read(self._root)
        return {} if process is None else {self._root: process}

    def _table(self) -> Iterator[tuple[int, Process]]:
        for name in os.listdir(self._proc):
            if name.isdigit() and (process := self._read(int(name))) is not None:
                yield int(name), process

    def _read(self, pid: int) -> Process | None:
        with suppress(OSError, ValueError, IndexError):  # processes come and go
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
            return Process(int(fields[1]), int(fields[19]), cpu_s)
        return None

    def _members(self, table: Mapping[int, Process]) -> dict[int, str | None]:
        """Return the group of each process below the root; None: it has no group."""
        children: dict[int, list[int]] = {}
        for pid, process in table.items():
            children.setdefault(process.parent, []).append(pid)
        members: dict[int, str | None] = {}
        waiting: list[tuple[int, str | None]] = [(pid, None) for pid in children.get(self._root, ())]
        while waiting:
            pid, above = waiting.pop()
            group = members[pid] = above or self._title(pid)
            waiting += [(child, group) for child in children.get(pid, ())]
        return members

    def _title(self, pid: int) -> str | None:
        with suppress(OSError):
            title = (self._proc / str(pid) / "cmdline").read_bytes()
            for beginning, group in TITLES.items():
                if title.startswith(beginning):
                    return group
        return None

    def _memory(self, pid: int) -> int:
        with suppress(OSError, ValueError, IndexError):
            fields = (self._proc / str(pid) / "statm").read_bytes().split()
            return (int(fields[1]) - int(fields[2])) * PAGE_BYTES
        return 0


def usage_metrics(usage: Mapping[str, GroupUsage]) -> dict[str, float]:
    """Return the metrics of groups, by the tags of ``tags.py``."""
    metrics: dict[str, float] = {}
    for group, each in usage.items():
        metrics[f"process/{group}_cpu_cores"] = each.cpu_cores
        metrics[f"process/{group}_memory_gib"] = each.memory_bytes / 2**30
        if each.gpu_fractions:
            metrics[f"process/{group}_gpu_fraction"] = sum(each.gpu_fractions) / len(each.gpu_fractions)
            metrics[f"process/{group}_gpu_memory_gib"] = each.gpu_memory_bytes / 2**30
    return metrics
