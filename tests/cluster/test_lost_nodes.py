"""A node of a job dies: the job outlives it, or starts again, with a real Slurm and a real Ray."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.backend.commands.audit import audit_run
from tests.cluster.quickstart_job import submit_quickstart
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.test_slurm_bootstrap import JOB_TIMEOUT_S, Jobs, facts

NOTICED_S = 180.0
"""Slurm finds a node down after 10 s here and Ray after some 20 s; the rest is for a loaded machine."""


@pytest.fixture
def three_nodes() -> Iterator[SlurmCluster]:
    reason = SlurmCluster.unavailable()
    if reason:
        pytest.fail(reason)
    with SlurmCluster(nodes=3) as cluster:
        yield cluster


def is_down(cluster: SlurmCluster, node: str) -> bool:
    return "State=DOWN" in cluster.scontrol("--oneliner", "show", "node", node)


@pytest.mark.slow  # `make test-cluster` runs it; test_train_on_slurm.py has a second start
@pytest.mark.timeout(900)
def test_a_lost_node_ends_the_job_only_when_the_run_cannot_go_on_and_then_the_job_starts_again(
    three_nodes: SlurmCluster, tmp_path: Path
) -> None:
    cluster, jobs = three_nodes, Jobs(three_nodes, tmp_path)
    job = jobs.submit({"linger": True, "fails_at_first": True}, nodes=2)
    cluster.wait_for_output(job, "FACTS", JOB_TIMEOUT_S)
    assert facts(cluster.output(job))["driver"] == "node1"
    cluster.kill_node("node2")
    cluster.wait_until("node2 to be down", lambda: is_down(cluster, "node2"), NOTICED_S)
    assert cluster.job(job)["JobState"] == "RUNNING", cluster.output(job)
    cluster.wait_until("Ray to notice", lambda: "LOST node2" in cluster.output(job), NOTICED_S)
    (tmp_path / "fail").touch()
    cluster.wait_for_output(job, "lost node2: asking Slurm to start the job again", NOTICED_S)
    cluster.wait_until("a second start", lambda: cluster.output(job).count("FACTS") == 2, NOTICED_S)
    assert cluster.job(job)["Restarts"] == "1"
    # On the node of the batch script, of which nobody is left to notice anything.
    head = cluster.job(job)["BatchHost"]
    cluster.start_node("node2")
    cluster.wait_until("node2 to be back", lambda: not is_down(cluster, "node2"), NOTICED_S)
    cluster.kill_node(head)
    cluster.wait_until("a third start", lambda: cluster.output(job).count("FACTS") == 3, NOTICED_S)
    cluster.cancel(job, "--batch", "--signal=TERM")
    result = cluster.wait(job, JOB_TIMEOUT_S)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert "SAVED" in result.output


@pytest.mark.slow  # test_engine_supervisor.py has the decision
@pytest.mark.timeout(1800)
def test_the_engine_of_a_lost_node_goes_on_on_another_one(three_nodes: SlurmCluster, tmp_path: Path) -> None:
    cluster, run = three_nodes, tmp_path / "runs/quickstart"
    sizes = ("run.steps=5000", "eval.every=0", "eval.max_prompts=8", "rollout.engine.count=2")
    job = submit_quickstart(cluster, tmp_path, *sizes, nodes=3)
    cluster.wait_for_output(job, "step    2/", 600)
    cluster.kill_node("node3")
    cluster.wait_for_output(job, "engine-1 has left its node: its node is lost: Ray has lost 10.77.0.13", 600)
    cluster.wait_for_output(job, "engine-1 is placed on 10.77.0.12", 600)
    cluster.wait_for_output(job, "the run goes on with 2 of 3 collectors: Ray has lost 10.77.0.13", 600)

    def step() -> int:
        return int(re.findall(r"step +(\d+)/", cluster.output(job))[-1])

    before = step()
    cluster.wait_until("two further steps", lambda: step() > before + 2, 600)
    cluster.wait_until("node3 to be down", lambda: is_down(cluster, "node3"), NOTICED_S)
    slipstream = (sys.executable, "-m", "slipstream.backend.cli")
    status = cluster.login(*slipstream, "status", str(run), timeout_s=120)
    assert f"job {job} is running on node[1-2]" in status and "lag" in status, status
    logs = cluster.login(*slipstream, "logs", str(run), timeout_s=120)
    assert all(name in logs for name in ("out.log", "driver.log", "trainer-0.log", "engine-0")), logs
    stopped = cluster.login(*slipstream, "stop", str(run), timeout_s=600)
    assert f"job {job} has ended: CANCELLED" in stopped and "the run has ended: stopped" in stopped
    result = cluster.wait(job, 60)
    assert result.state == "CANCELLED", result.output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["exit"], summary["groups"]["failed"]) == ("stopped", 0)
    assert audit_run(run, print).discrepancies == []
