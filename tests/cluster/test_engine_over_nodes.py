"""An engine over two nodes of a real Slurm job of three, killed part by part while the run goes on."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.cluster.quickstart_job import submit_quickstart
from tests.cluster.slurm_cluster import SlurmCluster, tree

STEPS = 40
LAUNCHER = "slipstream.rollout.engine.launch"
VICTIMS = [
    ("node2", "sglang::scheduler"),
    ("node3", "sglang::scheduler"),
    ("node2", LAUNCHER),
    ("node3", LAUNCHER),
    ("node2", "ray::EngineActor"),
    ("node3", "ray::EngineActor"),
]
"""A part of the engine's first node, and the same of its second one, by what its command line holds."""

START_S = 300
"""Time for the engine to start, also on a busy machine."""


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[SlurmCluster]:
    """Three idle nodes: one for the trainer, two for the engine."""
    reason = SlurmCluster.unavailable()
    if reason:
        pytest.fail(reason)
    with SlurmCluster(nodes=3) as cluster:
        yield cluster


def submitted(cluster: SlurmCluster, folder: Path, *overrides: str) -> int:
    """Submit a run of the quickstart recipe with one engine over two nodes."""
    return submit_quickstart(
        cluster,
        folder,
        "eval.every=0",
        "eval.max_prompts=8",
        "rollout.n_samples_per_prompt=4",
        "rollout.engine.tensor_parallel=2",
        "rollout.engine.nodes=2",
        f"rollout.engine.start_timeout_s={START_S}",
        "weights.transport={type: disk}",
        *overrides,
        nodes=3,
    )


def pids_on(cluster: SlurmCluster, node: str, part: str) -> list[int]:
    return [process.pid for process in cluster.processes(node) if part in process.command]


def launchers(cluster: SlurmCluster) -> list[list[int]]:
    """Return the servers of each of the engine's nodes."""
    return [pids_on(cluster, node, LAUNCHER) for node in ("node2", "node3")]


def servers_of_a_whole_engine(cluster: SlurmCluster) -> set[int]:
    """Return the engine's servers. Each node has one with its rank, and the first one answers requests."""
    ranks = [pids_on(cluster, node, "sglang::scheduler") for node in ("node2", "node3")]
    readers = [pids_on(cluster, node, "sglang::detokenizer") for node in ("node2", "node3")]
    assert [[len(pids) for pids in each] for each in (ranks, readers, launchers(cluster))] == [
        [1, 1],
        [1, 0],
        [1, 1],
    ]
    return {pid for pids in launchers(cluster) for pid in pids}


def requests_of(run: Path) -> int:
    """Return the number of requests that the engine has begun to answer."""
    return (run / "logs/engine-0-node-0.log").read_text().count("POST /generate")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_engine_over_two_nodes_is_killed_part_by_part_and_no_trajectory_is_lost(
    three_nodes: SlurmCluster, tmp_path: Path
):
    cluster, run = three_nodes, tmp_path / "runs/quickstart"
    job = submitted(
        cluster,
        tmp_path,
        f"run.steps={STEPS}",
        f"rollout.engine.restarts={len(VICTIMS)}",
        "run.name=quickstart",
    )
    cluster.wait_for_output(job, "step  1/", 2 * START_S)
    for number, (node, part) in enumerate(VICTIMS, start=1):
        before = servers_of_a_whole_engine(cluster)
        os.kill(pids_on(cluster, node, part)[0], signal.SIGKILL)
        cluster.wait_until(
            f"restart {number} of the engine",
            lambda number=number: cluster.output(job).count("engine-0 is started again") == number,
            60,
        )
        cluster.wait_until(
            "the servers of both nodes to end",
            lambda before=before: not before & {pid for pids in launchers(cluster) for pid in pids},
            60,
        )
        answered = requests_of(run)
        cluster.wait_until(
            f"the engine to serve behind kill {number}",
            lambda answered=answered: requests_of(run) > answered,
            START_S,
        )
    result = cluster.wait(job, 2 * START_S)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == ("done", STEPS)
    assert summary["engine_restarts"] == len(VICTIMS)
    assert (summary["groups"]["trained"], summary["groups"]["failed"]) == (STEPS * 4, 0)
    audit = audit_run(run, print)
    assert audit.discrepancies == []
    for node in cluster.node_ips:
        left = cluster.processes(node)
        assert not left, f"left on {node}:\n{tree(left)}\n{result.output}"
        shared = cluster.run_on(node, "ls", "/dev/shm").split()
        assert not [name for name in shared if "sglang" in name or "torch" in name or "psm_" in name], shared
