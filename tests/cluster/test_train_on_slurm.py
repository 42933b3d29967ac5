"""The main job on a real Slurm of three fake nodes: the trainer on one, the engine on another, one spare."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.cluster.quickstart_job import submit_quickstart
from tests.cluster.slurm_cluster import SlurmCluster, tree

SIZES = ("run.steps=12", "checkpoint.every=1", "eval.every=0", "eval.max_prompts=50")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "is_requeued",
    [
        pytest.param(False, id="its node"),
        # test_resume.py resumes whole runs, and test_slurm_bootstrap.py requeues jobs
        pytest.param(True, id="its node and a requeue", marks=pytest.mark.slow),
    ],
)
def test_a_job_outlives_the_node_of_its_engine_and_a_requeue_without_resume(
    tmp_path: Path, is_requeued: bool
):
    reason = SlurmCluster.unavailable()
    if reason:
        pytest.fail(reason)
    with SlurmCluster(nodes=3) as cluster:
        job = submit_quickstart(cluster, tmp_path, *SIZES, nodes=3)
        cluster.wait_for_output(job, "step  1/12", 240)
        # Each where it belongs, and nowhere else.
        where = {
            part: [
                node
                for node in cluster.node_ips
                if any(part in process.command for process in cluster.processes(node))
            ]
            for part in ("ray::TrainerActor", "ray::CollectorActor", "sglang::scheduler")
        }
        sockets = {node: cluster.listening(node) for node in cluster.node_ips}
        cluster.kill_node("node2")
        lost = "engine-0 has left its node: its node is lost: Ray has lost 10.77.0.12"
        cluster.wait_for_output(job, lost, 240)
        cluster.wait_for_output(job, "engine-0 is placed on 10.77.0.13", 240)
        cluster.wait_until("a step after that", lambda: goes_on(cluster.output(job)), 240)
        if is_requeued:
            # As after a preemption: the same command again, without --resume, in the folder that it has made.
            cluster.scontrol("requeue", str(job))
            cluster.start_node("node2")
            cluster.wait_for_output(job, "Slurm has started this job again", 240)
        result = cluster.wait(job, 240)
        assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
        assert ("resumed from version" in result.output) == is_requeued
        for node in cluster.node_ips if is_requeued else ("node1", "node3"):
            left = cluster.processes(node)
            assert not left, f"left on {node}:\n{tree(left)}\n{result.output}"
    assert where == {
        "ray::TrainerActor": ["node1"],
        "ray::CollectorActor": ["node1", "node2", "node3"],
        "sglang::scheduler": ["node2"],
    }, result.output
    own = {"node1": "ray::TrainerAct", "node2": "sglang::schedul"}
    for node, address in cluster.node_ips.items():
        listening = Counter(program for where, program in sockets[node] if where == address)
        assert node not in own or listening[own[node]] > 1, sockets[node]
        everywhere = Counter(
            program for where, program in sockets[node] if where not in (address, "127.0.0.1")
        )
        # Ray's services, which ask for the job's token: two of the raylet, one of each other process.
        actors = {"ray::TrainerAct", "ray::EngineActo", "ray::CollectorA", "ray::UsageReade"}
        assert set(everywhere) <= {"gcs_server", "raylet", "slipstream", "ray::IDLE", *actors}, sockets[node]
        assert everywhere["raylet"] == 2
        assert everywhere["ray::TrainerAct"] + everywhere["ray::EngineActo"] == (node in own)
        assert everywhere["ray::CollectorA"] == 1
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == ("done", 12)
    assert audit_run(tmp_path / "runs/quickstart", print).discrepancies == []
    assert (tmp_path / "runs/quickstart/checkpoint-hf/config.json").exists()


def goes_on(output: str) -> bool:
    """True if a training step has ended since the engine has got another node."""
    return re.search(r"step +\d+/", output.partition("engine-0 is placed on")[2]) is not None
