"""slurm/train.sbatch on a real Slurm of two fake nodes, with a real Ray and a stand-in for `slipstream`."""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import JobResult, SlurmCluster, tree

REPOSITORY = Path(__file__).parents[2]
SCRIPT = "slurm/train.sbatch"
JOB_TIMEOUT_S = 90.0
"""A job takes 10 to 15 s; the rest is for a loaded machine."""


class Jobs:
    """Submits train.sbatch as a user would, with all that it writes below one folder."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    def submit(
        self,
        recipe: dict[str, object],
        *overrides: str,
        verb: str | None = None,
        nodes: int,
        env: dict[str, str] | None = None,
    ) -> int:
        path = self.folder / "a recipe.json"  # with a space, and absolute
        path.write_text(json.dumps(recipe))
        verbs = [verb] if verb else []
        return self.submit_arguments(*verbs, str(path), *overrides, nodes=nodes, env=env)

    def submit_arguments(self, *arguments: str, nodes: int, env: dict[str, str] | None = None) -> int:
        environment = {
            "SLIPSTREAM_VENV": sys.prefix,
            "SLIPSTREAM_COMMAND": str(Path(__file__).with_name("stand_in_driver.py")),
            "SLIPSTREAM_LOG_DIR": str(self.folder / "node logs"),
            "SLIPSTREAM_CPUS_PER_NODE": "1",
            "SLIPSTREAM_OBJECT_STORE": "100000000",
        }
        return self.cluster.submit(
            SCRIPT,
            *arguments,
            cwd=REPOSITORY,
            env=environment | (env or {}),
            nodes=nodes,
            gpus_per_node=0,
            output=self.folder / "out.log",
        )

    def finish(self, job: int) -> JobResult:
        """The job's result, once nothing of it is left on any node."""
        result = self.cluster.wait(job, JOB_TIMEOUT_S)
        for node in self.cluster.node_ips:
            left = self.cluster.processes(node)
            assert not left, f"left on {node}:\n{tree(left)}\n{result.output}"
        assert not temporary_folders(job)
        return result


def temporary_folders(job: int) -> list[Path]:
    """Ray's folders of a job. All nodes have them in the same /tmp here."""
    return list(Path("/tmp").glob(f"slipstream.{job}.*"))


@pytest.fixture
def jobs(slurm_cluster: SlurmCluster, tmp_path: Path) -> Jobs:
    return Jobs(slurm_cluster, tmp_path)


def facts(output: str) -> dict[str, object]:
    line = next(line for line in output.splitlines() if line.startswith("FACTS "))
    found: dict[str, object] = json.loads(line.removeprefix("FACTS "))
    return found


@pytest.mark.slow  # test_train_on_slurm.py has a real run on two nodes
def test_a_completed_run_had_an_actor_on_every_node_and_leaves_nothing_running(jobs: Jobs) -> None:
    # As a job that was killed has left it, and as one that runs on another node holds it.
    left, used = (Path(tempfile.mkdtemp(prefix="slipstream.0.", dir="/tmp")) for _ in "12")
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    job = jobs.submit({"leave_behind": True}, "a.b=1 2", "c=[3]", nodes=2)
    result = jobs.finish(job)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    seen = facts(result.output)
    assert seen["verb"] == "train"
    assert seen["overrides"] == ["cluster.type=slurm", "a.b=1 2", "c=[3]"]
    assert seen["driver"] == "node1"
    actors = {actor["node"]: actor["ip"] for actor in seen["actors"]}  # type: ignore[attr-defined]
    assert actors == jobs.cluster.node_ips
    for node in jobs.cluster.node_ips:  # node-local logs were brought home
        assert (jobs.folder / "node logs" / f"ray-{node}" / "raylet.out").exists()
    assert not left.exists()
    assert used.exists()
    os.close(lock)
    used.rmdir()


def test_a_failed_run_fails_the_job_with_its_own_exit_code(jobs: Jobs) -> None:
    result = jobs.finish(jobs.submit({"exit_code": 1}, "a.b=1", verb="sft", nodes=1))
    assert (result.state, result.exit_code) == ("FAILED", 1), result.output
    seen = facts(result.output)
    assert (seen["verb"], seen["overrides"]) == ("sft", ["cluster.type=slurm", "a.b=1"])


def test_scancel_lets_the_run_save_its_state_while_ray_is_still_up(jobs: Jobs) -> None:
    job = jobs.submit({"linger": True, "exit_code": 3, "leave_behind": True}, nodes=2)
    jobs.cluster.wait_for_output(job, "FACTS", JOB_TIMEOUT_S)
    modes = [folder.stat().st_mode & 0o777 for folder in temporary_folders(job)]
    jobs.cluster.cancel(job)
    result = jobs.finish(job)
    assert modes == [0o700, 0o700]
    assert result.state == "CANCELLED", result.output
    assert "start the job again" not in result.output
    assert (jobs.folder / "saved").read_text() == "1 signal(s)", result.output


@pytest.mark.slow  # scancel sends the same signal
def test_sigterm_to_the_batch_script_as_before_the_time_limit_lets_the_run_decide(jobs: Jobs) -> None:
    job = jobs.submit({"linger": True, "exit_code": 3}, nodes=1)
    jobs.cluster.wait_for_output(job, "FACTS", JOB_TIMEOUT_S)
    sockets = jobs.cluster.listening("node1")
    jobs.cluster.cancel(job, "--batch", "--signal=TERM")
    result = jobs.finish(job)
    assert "raylet" in {program for _, program in sockets}
    assert {address for address, _ in sockets} == {"127.0.0.1"}, f"a job of one node needs no more: {sockets}"
    assert result.state == "CANCELLED", f"the user has stopped it, and nothing has failed: {result.output}"
    assert (jobs.folder / "saved").read_text() == "1 signal(s)", result.output


RESTART_S = 240.0
"""Slurm waits before it starts a job again; the rest is for a loaded machine."""


@pytest.mark.slow  # `make test-cluster` runs it; test_train_on_slurm.py has a second start
@pytest.mark.timeout(900)
def test_a_job_is_started_again_for_its_time_limit_and_a_preemption_until_it_makes_no_progress(
    jobs: Jobs,
) -> None:
    recipe: dict[str, object] = {"exit_code": [75, 3, 75], "linger": [1], "checkpoint": [1]}
    job = jobs.submit(recipe, nodes=1, env={"SLIPSTREAM_RESTARTS": "1"})
    jobs.cluster.wait_until("a second start", lambda: jobs.cluster.output(job).count("FACTS") == 2, RESTART_S)
    assert "the time limit was near: asking Slurm to start the job again" in jobs.cluster.output(job)
    # As Slurm warns of a preemption, and of a time limit that was shortened.
    jobs.cluster.cancel(job, "--batch", "--signal=USR1")
    jobs.cluster.wait_until("a third start", lambda: jobs.cluster.output(job).count("FACTS") == 3, RESTART_S)
    result = jobs.finish(job)
    assert (jobs.folder / "saved").read_text() == "1 signal(s)", result.output
    assert (result.state, result.exit_code) == ("FAILED", 1), result.output
    report = result.output.partition("1 restarts without a new checkpoint")[2]
    assert "checkpoint of step 16" in report and "restart 2 on node1" in report, result.output
    assert "restart 1" not in report, "the checkpoint of the second start counts"
    assert "what has ended the last of them: the time limit was near" in report


def test_nothing_survives_the_sigkill_of_the_batch_script(jobs: Jobs) -> None:
    job = jobs.submit({"stubborn": True, "leave_behind": True}, nodes=1)
    jobs.cluster.wait_for_output(job, "FACTS", JOB_TIMEOUT_S)
    jobs.cluster.cancel(job, "--batch", "--signal=KILL")
    result = jobs.cluster.wait(job, JOB_TIMEOUT_S)
    assert (result.state, result.signal) == ("FAILED", 9), result.output
    # Here Slurm does not know of the driver's own session; it is gone an instant after the job.
    jobs.cluster.wait_until("node1 to be empty", lambda: not jobs.cluster.processes("node1"), timeout_s=60)
    for folder in temporary_folders(job):
        shutil.rmtree(folder)


def test_a_node_that_does_not_join_is_named_and_the_run_never_starts(jobs: Jobs) -> None:
    # /dev/shm is a node's own: with the environment there, only node1 has one.
    jobs.cluster.run_on("node1", "ln", "-s", sys.prefix, "/dev/shm/venv")
    try:
        job = jobs.submit(
            {}, nodes=2, env={"SLIPSTREAM_VENV": "/dev/shm/venv", "SLIPSTREAM_NODES_TIMEOUT_S": "10"}
        )
        result = jobs.finish(job)
    finally:
        jobs.cluster.run_on("node1", "rm", "/dev/shm/venv")
    assert (result.state, result.exit_code) == ("FAILED", 1), result.output
    assert "1 of 2 node(s) have not joined Ray: node2" in result.output
    assert "FACTS" not in result.output


def test_a_missing_recipe_argument_is_a_usage_error(jobs: Jobs) -> None:
    result = jobs.finish(jobs.submit_arguments(nodes=1))
    assert (result.state, result.exit_code) == ("FAILED", 2)
    assert "usage: sbatch" in result.output


def test_a_recipe_that_does_not_exist_is_refused_before_ray_starts(jobs: Jobs) -> None:
    result = jobs.finish(jobs.submit_arguments("no/such.yaml", nodes=1))
    assert (result.state, result.exit_code) == ("FAILED", 2)
    assert "no recipe no/such.yaml" in result.output


# ---- in a container: the stand-ins for apptainer and pyxis show the programs of this test as the image's


APPTAINER = """#!/bin/bash
# apptainer exec --nv --pwd FOLDER --bind MOUNTS IMAGE COMMAND ...
[[ "$1 $2 $3 $5" == "exec --nv --pwd --bind" ]] || exit 97
echo "apptainer $7: ${*:8:2}" >>"$CONTAINER_LOG"
export PATH=$IMAGE_BIN:$PATH
exec "${@:8}"
"""

SRUN = """#!/bin/bash
# srun with pyxis: takes the options of containers out, and is the real srun otherwise.
[[ $1 != --help ]] || { echo "--container-image=IMAGE"; exit; }
rest=()
for word in "$@"; do
    case $word in
    --container-image=*) echo "pyxis ${word#*=}" >>"$CONTAINER_LOG" ;;
    --container-mounts=*:*,*:* | --container-workdir=/*) ;;
    --container-*) exit 97 ;;
    *) rest+=("$word") ;;
    esac
done
export PATH=$IMAGE_BIN:$PATH
exec "$REAL_SRUN" "${rest[@]}"
"""


def contained(jobs: Jobs, runtime: str, program: str, text: str) -> dict[str, str]:
    """The variables of a job in a container that a stand-in for ``program`` runs."""
    tools, image = jobs.folder / "tools", jobs.folder / "image.file"
    tools.mkdir()
    image.touch()
    (tools / program).write_text(text)
    (tools / program).chmod(0o755)
    real = shutil.which("srun")
    assert real is not None
    return {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "SLIPSTREAM_VENV": "/no/environment/on/the/host",
        "SLIPSTREAM_CONTAINER": runtime,
        "SLIPSTREAM_CONTAINER_IMAGE": str(image),
        "SLIPSTREAM_CONTAINER_MOUNTS": "/usr:/usr",
        "CONTAINER_LOG": str(jobs.folder / "containers"),
        "IMAGE_BIN": str(Path(sys.prefix) / "bin"),
        "REAL_SRUN": real,
    }


@pytest.mark.slow
def test_with_apptainer_everything_of_a_job_runs_in_the_image(jobs: Jobs) -> None:
    job = jobs.submit({}, nodes=2, env=contained(jobs, "apptainer", "apptainer", APPTAINER))
    result = jobs.finish(job)
    assert (result.state, result.exit_code) == ("COMPLETED", 0), result.output
    assert len(facts(result.output)["actors"]) == 2  # type: ignore[arg-type]
    lines = (jobs.folder / "containers").read_text().splitlines()
    assert all(line.startswith(f"apptainer {jobs.folder}/image.file: ") for line in lines)
    started = " ".join(lines)
    assert started.count("ray_node.sh") == 2
    assert all(program in started for program in ("own_address.py", "wait_for_nodes.py", "contain.py"))


@pytest.mark.slow
def test_with_pyxis_a_run_in_the_image_gets_one_sigterm_and_saves_its_state(jobs: Jobs) -> None:
    variables = contained(jobs, "pyxis", "srun", SRUN)
    job = jobs.submit({"linger": True, "exit_code": 9}, nodes=1, env=variables)
    jobs.cluster.wait_for_output(job, "FACTS", JOB_TIMEOUT_S)
    jobs.cluster.cancel(job, "--batch", "--signal=TERM")
    result = jobs.finish(job)
    assert (result.state, result.exit_code) == ("FAILED", 9), result.output
    assert (jobs.folder / "saved").read_text() == "1 signal(s)", result.output
    lines = (jobs.folder / "containers").read_text().splitlines()
    assert len(lines) >= 4 and set(lines) == {f"pyxis {jobs.folder}/image.file"}


def test_a_container_without_its_program_is_refused_before_ray_starts(jobs: Jobs) -> None:
    result = jobs.finish(jobs.submit({}, nodes=1, env={"SLIPSTREAM_CONTAINER": "podman"}))
    assert (result.state, result.exit_code) == ("FAILED", 2)
    assert "SLIPSTREAM_CONTAINER_IMAGE is not set" in result.output
