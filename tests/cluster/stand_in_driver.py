#!/usr/bin/env python
"""Stands in for `slipstream` in the tests of train.sbatch: one Ray actor on every node, then as RECIPE says.

Called like the real one: stand_in_driver.py train RECIPE cluster.type=slurm [key=value ...]. RECIPE is JSON:
    exit_code     what to exit with; a list has one for each start of the job
    checkpoint    at these starts of the job, do as a run that has committed a checkpoint
    linger        then (true, or at these starts) wait for SIGTERM, and take a second to write `saved`
                  beside RECIPE
    fails_at_first  at the first start of a job: say when a node is lost, and fail when there is `fail`
                  beside RECIPE
    stubborn      ignore SIGTERM, and never end
    leave_behind  start a process that detaches itself, on every node
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slipstream.backend.driver.start.job import NOTES_S, note_progress, notes_written

CLEAN_UP_S = 1.0
START = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
"""Number of this start of the job, from 0."""


@ray.remote(num_cpus=1)
class Probe:
    def look(self, leave_behind: bool) -> dict[str, object]:
        if leave_behind:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        node = ray.get_runtime_context().get_node_id()
        ip = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
        return {"node": os.environ["SLURMD_NODENAME"], "ip": ip}


def lose_a_node(then: Path) -> int:
    """Wait until a node is lost, then for the file ``then``. Returns the exit code of a failed run."""
    while all(node["Alive"] for node in ray.nodes()):
        time.sleep(0.2)
    names = [name for name in ray.cluster_resources() if name.startswith("slurm_node:")]
    print("LOST node2" if names == ["slurm_node:node1"] else f"LEFT {names}", flush=True)
    while not then.exists():
        time.sleep(0.2)
    return 1


def main() -> int:
    verb, recipe_path, *overrides = sys.argv[1:]
    recipe = json.loads(Path(recipe_path).read_text())
    signals: list[int] = []
    terminated = threading.Event()

    def on_term(signum: int, _frame: object) -> None:
        signals.append(signum)
        terminated.set()

    ray.init(log_to_driver=False)  # finds the cluster by RAY_ADDRESS
    signal.signal(signal.SIGTERM, on_term)
    nodes = [n for n in ray.nodes() if n["Alive"]]
    group = placement_group([{"CPU": 1}] * len(nodes), strategy="STRICT_SPREAD")
    places = [PlacementGroupSchedulingStrategy(group, i) for i in range(len(nodes))]
    probes = [Probe.options(scheduling_strategy=place).remote() for place in places]
    seen = ray.get([probe.look.remote(recipe.get("leave_behind", False)) for probe in probes], timeout=120)
    facts = {"verb": verb, "overrides": overrides, "actors": seen, "driver": os.environ["SLURMD_NODENAME"]}
    print("FACTS " + json.dumps(facts), flush=True)
    while recipe.get("stubborn"):
        signal.pause()
    if recipe.get("fails_at_first") and START == 0:
        return lose_a_node(Path(recipe_path).with_name("fail"))
    if START in recipe.get("checkpoint", []):
        note_progress(os.environ, 8 * (START + 1))
        notes_written(NOTES_S)
    linger = recipe.get("linger", False)
    if linger is True or (linger and START in linger):
        terminated.wait(timeout=120)
        threading.Event().wait(CLEAN_UP_S)
        # Ray must still be there: a real run saves its state through its actors.
        ray.get([probe.look.remote(False) for probe in probes], timeout=60)
        Path(recipe_path).with_name("saved").write_text(f"{len(signals)} signal(s)")
        print("SAVED", flush=True)
    codes = recipe.get("exit_code", 0)
    return int(codes if isinstance(codes, int) else codes[min(START, len(codes) - 1)])


if __name__ == "__main__":
    sys.exit(main())
