"""Wait until the Ray of every node has joined the cluster at $RAY_ADDRESS.

    wait_for_nodes.py [--lost] --timeout-s S --log-dir DIR NODE [NODE ...]

ray_node.sh gives the Ray of node N the resource `slurm_node:N`. A placement group with one bundle for each
of these is ready exactly when all nodes are there, and Ray tells us so: nothing is polled. On a time-out, or
at the end of stdin, exits with 1 and names the missing nodes, each with the end of its log. With --lost, for
nodes that had all joined, prints the names of those that have left.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from pathlib import Path

from own_address import await_port

TAIL_LINES = 15


def tail(path: Path) -> str:
    if not path.exists():
        return "    (no log: the node never started its part of the Ray step)"
    lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join("    " + line for line in lines) or "    (empty)"


def missing_nodes(names: list[str], timeout_s: float) -> list[str]:
    """Names of the nodes that have not joined after `timeout_s`; empty as soon as all have."""
    deadline = time.monotonic() + timeout_s
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    await_port(host, int(port), timeout_s)  # ray.init gives up sooner than a slow head may need

    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        group = placement_group([{f"slurm_node:{name}": 0.001} for name in names], strategy="SPREAD")
        if group.wait(max(1.0, deadline - time.monotonic())):
            remove_placement_group(group)
            return []
        joined = ray.cluster_resources()
        return [name for name in names if f"slurm_node:{name}" not in joined]
    finally:
        ray.shutdown()


def report(names: list[str], log_dir: Path) -> None:
    for name in names:
        path = log_dir / f"ray-{name}.log"
        print(f"  {path}:\n{tail(path)}", file=sys.stderr, flush=True)


def exit_when_stdin_ends(names: list[str], log_dir: Path) -> None:
    """Thread body. Our stdin is the pipe that srun holds open: it ends when Ray is gone from every node."""
    while os.read(0, 4096):
        pass
    print("slipstream: Ray ended on every node before all nodes had joined", file=sys.stderr)
    report(names, log_dir)
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Wait until the Ray of every node has joined.")
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--lost", action="store_true")
    parser.add_argument("nodes", nargs="+")
    options = parser.parse_args()
    threading.Thread(target=exit_when_stdin_ends, args=(options.nodes, options.log_dir), daemon=True).start()
    total = len(options.nodes)
    start = time.monotonic()
    try:
        missing = missing_nodes(options.nodes, options.timeout_s)
    except (OSError, RuntimeError) as error:
        print(f"slipstream: Ray on the first node does not answer: {error}", file=sys.stderr)
        missing = options.nodes
    if options.lost:
        lost = [] if missing == options.nodes else missing  # the first node is here: then Ray itself is gone
        print(*lost)
        return 0
    if not missing:
        seconds = time.monotonic() - start
        print(f"slipstream: {total} of {total} node(s) joined in {seconds:.1f} s", flush=True)
        return 0
    seconds = time.monotonic() - start
    print(
        f"slipstream: after {seconds:.0f} s, {len(missing)} of {total} node(s) have not joined Ray:"
        f" {' '.join(missing)} (time-out: SLIPSTREAM_NODES_TIMEOUT_S). Their logs end with:",
        file=sys.stderr,
    )
    report(missing, options.log_dir)
    return 1


if __name__ == "__main__":
    sys.exit(main())
