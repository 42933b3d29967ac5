"""Shows where the processes of a run stand when one of them hangs.

a call takes too long ──► a task on each node ──► its ranks show all stacks (rollout/system/stacks.py)
                      └─► the tasks of the driver, and what each awaits
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slipstream.backend.cluster.configured_ray import ray
from slipstream.rollout.system.stacks import FOLDER, shows_stacks, write_stacks

DUMP_S = 120.0
"""Longest wait for all nodes, on each of which Ray may have to start a process first."""


class ShownProcess(NamedTuple):
    """A process that writes its stacks when it is told to (``shown_process``)."""

    node: str
    """Ray's id of its node."""
    pid: int
    path: str
    """File that its stacks go to."""


def shown_process(logs: Path, name: str) -> ShownProcess:
    """Let the calling process, which runs in a worker of Ray, write its stacks whenever it is told to."""
    shows_stacks()
    return ShownProcess(
        ray.get_runtime_context().get_node_id(), os.getpid(), str(logs / FOLDER / f"{name}.txt")
    )


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
    silent = write_stacks({pid: (Path(path).stem, Path(path)) for _, pid, path in processes.values()})
    return {key: silent[pid] for key, (_, pid, _) in processes.items() if pid in silent}


def _write_tasks(path: Path) -> None:
    """Append which task of the running loop waits where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        print(f"{time.strftime('%F %T')}: the tasks of the driver", file=file)
        for task in asyncio.all_tasks():
            task.print_stack(file=file)
