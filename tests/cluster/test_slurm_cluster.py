"""The fake cluster itself: what a test may rely on, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.slurm_cluster import SlurmCluster

REPOSITORY = Path(__file__).parents[2]
HOLD_A_CLUSTER = """
import sys
from tests.cluster.slurm_cluster import SlurmCluster
with SlurmCluster(nodes=1) as cluster:
    print(cluster.run_on("node1", "readlink", "/proc/self/ns/net").strip(), flush=True)
    sys.stdin.read()
"""
NODE_FACTS = """
PATH={prefix}/bin:$PATH
hostname
python -c "import sys; print(sys.prefix)"
python -c "import socket; print(socket.gethostbyname(socket.gethostname()))"
python -c "import socket; print(socket.create_server(('127.0.0.1', 0)).getsockname()[0])"
df --output=size --block-size=1 /dev/shm | tail -n 1
ls "$SLURM_SUBMIT_DIR/slurm/train.sbatch"
"""


def holders_of(namespace: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") == namespace:
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_node_sees_the_repository_and_the_environment_by_the_same_path(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = tmp_path / "facts.sh"
    script.write_text(NODE_FACTS.replace("{prefix}", sys.prefix))
    batch = tmp_path / "batch.sh"
    batch.write_text(f"#!/bin/bash\nsrun --nodelist=node2 --nodes=1 --ntasks=1 bash '{script}'\n")
    job = slurm_cluster.submit(batch, cwd=REPOSITORY, nodes=2, ntasks_per_node=1, output=tmp_path / "out.log")
    result = slurm_cluster.wait(job, timeout_s=120)
    host, prefix, ip, loopback, shm, file = result.output.split()
    assert (host, prefix, ip, loopback) == ("node2", sys.prefix, slurm_cluster.node_ips["node2"], "127.0.0.1")
    assert int(shm) >= 1 << 30
    assert file == str(REPOSITORY / "slurm/train.sbatch")


def test_a_killed_owner_leaves_no_process_behind(slurm_cluster: SlurmCluster) -> None:
    # The second cluster beside the fixture's also shows that two can be up at once.
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_CLUSTER],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout
    namespace = owner.stdout.readline().strip()
    assert len(holders_of(namespace)) >= 2  # process 1 of the node, and slurmd
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    # Ends when the last process that inherited the pipe is gone.
    assert owner.stdout.read() == ""
    slurm_cluster.wait_until(f"{namespace} to be empty", lambda: not holders_of(namespace))


def test_a_node_comes_back_after_it_was_killed() -> None:
    with SlurmCluster(nodes=1) as cluster:
        cluster.kill_node("node1")
        cluster.start_node("node1")
        assert cluster.run_on("node1", "hostname").strip() == "node1"
