"""The main job on a real Slurm of two fake nodes: the trainer on one, the engine on the other."""

import json
from collections import Counter
from pathlib import Path

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.cluster.quickstart_job import submit_quickstart
from tests.cluster.slurm_cluster import SlurmCluster, tree


@pytest.mark.timeout(1200)
def test_a_job_that_is_requeued_trains_the_quickstart_policy_across_two_nodes(
    slurm_cluster: SlurmCluster, tmp_path: Path
):
    job = submit_quickstart(slurm_cluster, tmp_path, "run.steps=3", "eval.max_prompts=50", nodes=2)
    slurm_cluster.wait_for_output(job, "step 1/3", 240)
    # Each where it belongs, and nowhere else.
    where = {
        part: [
            node
            for node in slurm_cluster.node_ips
            if any(part in process.command for process in slurm_cluster.processes(node))
        ]
        for part in ("ray::TrainerActor", "ray::CollectorActor", "sglang::scheduler")
    }
    sockets = {node: slurm_cluster.listening(node) for node in slurm_cluster.node_ips}
    # As after a preemption: the same command again, without --resume, in the folder that it has made.
    slurm_cluster.scontrol("requeue", str(job))
    slurm_cluster.wait_for_output(job, "Slurm has started job", 240)
    result = slurm_cluster.wait(job, 240)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert where == {
        "ray::TrainerActor": ["node1"],
        "ray::CollectorActor": ["node1", "node2"],
        "sglang::scheduler": ["node2"],
    }, result.output
    for node in slurm_cluster.node_ips:
        left = slurm_cluster.processes(node)
        assert not left, f"left on {node}:\n{tree(left)}\n{result.output}"
    for node, address in slurm_cluster.node_ips.items():
        own = Counter(program for where, program in sockets[node] if where == address)
        assert own["ray::TrainerAct" if node == "node1" else "sglang::schedul"] > 1, sockets[node]
        everywhere = Counter(
            program for where, program in sockets[node] if where not in (address, "127.0.0.1")
        )
        # Ray's services, which ask for the job's token: two of the raylet, one of each other process.
        actors = {"ray::TrainerAct", "ray::EngineActo", "ray::CollectorA", "ray::UsageReade"}
        assert set(everywhere) <= {"gcs_server", "raylet", "slipstream", "ray::IDLE", *actors}, sockets[node]
        assert everywhere["raylet"] == 2
        assert everywhere["ray::TrainerAct"] + everywhere["ray::EngineActo"] == 1
        assert everywhere["ray::CollectorA"] == 1
    summary = json.loads((tmp_path / "runs/quickstart/summary.json").read_text())
    assert (summary["exit"], summary["steps"]) == ("done", 3)
    assert audit_run(tmp_path / "runs/quickstart", print).discrepancies == []
    assert (tmp_path / "runs/quickstart/checkpoint-hf/config.json").exists()
