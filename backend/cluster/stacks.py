"""Shows where the processes of a run stand when one of them hangs.

a call takes too long ──► a task on each node: SIGUSR1 to its ranks ──► the handler in C writes all stacks
                      └─► the tasks of the driver, and what each awaits

The handler also runs while Python does not, as in a collective. A process that is stopped writes nothing, and
is named.
"""

import asyncio
import faulthandler
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slipstream.backend.cluster.configured_ray import ray

FOLDER = "stacks"
"""Folder in that of the logs."""

WRITE_S = 2.0
"""Longest wait for a process to write its stacks. The handler takes some milliseconds."""

DUMP_S = 120.0
"""Longest wait for all nodes, on each of which Ray may have to start a process first."""

_STATES = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "D": "waits for a device",
    "Z": "has ended",
}


class ShownProcess(NamedTuple):
    """A process that writes its stacks when it is told to (``shows_stacks``)."""

    node: str
    """Ray's id of its node."""
    pid: int
    path: str
    """File that its stacks go to."""


def shows_stacks(logs: Path, name: str) -> ShownProcess:
    """Let the calling process, which runs in a worker of Ray, write its stacks whenever it gets SIGUSR1."""
    path = logs / FOLDER / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(signal.SIGUSR1, path.open("a"), all_threads=True)  # the file stays open
    return ShownProcess(ray.get_runtime_context().get_node_id(), os.getpid(), str(path))


async def show_stacks(processes: Mapping[int, ShownProcess], logs: Path) -> dict[int, str]:
    """Let processes write their stacks, and write down what the tasks of this one wait for.

    Return why there is no stack, by the key of each process without one.
    """
    _write_tasks(logs / FOLDER / "driver.txt")
    by_node: dict[str, dict[int, ShownProcess]] = defaultdict(dict)
    for key, process in processes.items():
        by_node[process.node][key] = process
    asked = {node: asyncio.ensure_future(_asked(node, of_node)) for node, of_node in by_node.items()}
    if asked:
        await asyncio.wait(asked.values(), timeout=DUMP_S)
    missing: dict[int, str] = {}
    for node, answer in asked.items():
        if answer.done() and answer.exception() is None:
            missing |= answer.result()
        else:
            answer.cancel()
            missing |= dict.fromkeys(by_node[node], "is on a node that does not answer")
    return missing


async def _asked(node: str, processes: dict[int, ShownProcess]) -> dict[int, str]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": strategy, "max_retries": 0}
    return await ray.remote(signal_processes).options(**options).remote(processes)


def signal_processes(processes: Mapping[int, ShownProcess]) -> dict[int, str]:
    """Let processes of this machine write their stacks. Return, by key, why one has written none."""
    sizes: dict[int, int] = {}
    missing: dict[int, str] = {}
    for key, (_, pid, path) in processes.items():
        try:
            size = Path(path).stat().st_size
            os.kill(pid, signal.SIGUSR1)
            sizes[key] = size
        except OSError:
            missing[key] = "has ended"
    deadline = time.monotonic() + WRITE_S
    while sizes and time.monotonic() < deadline:  # no event tells of another process's writing
        time.sleep(0.02)
        sizes = {key: size for key, size in sizes.items() if Path(processes[key].path).stat().st_size <= size}
    for key in sizes:
        missing[key] = _STATES.get(_state(processes[key].pid), "does not react to a signal")
    return missing


def _state(pid: int) -> str:
    """Return Linux's letter for what a process does; nothing if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _write_tasks(path: Path) -> None:
    """Append which task of the running loop waits where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        print(f"{time.strftime('%F %T')}: the tasks of the driver", file=file)
        for task in asyncio.all_tasks():
            task.print_stack(file=file)
