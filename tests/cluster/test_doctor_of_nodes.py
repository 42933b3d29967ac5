"""``slipstream doctor --nodes`` in an allocation of a real Slurm, on nodes without GPUs."""

import sys
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import SlurmCluster

DOCTOR_S = 300.0
"""It takes half a minute; the rest is for a loaded machine."""


@pytest.mark.timeout(600)
def test_the_nodes_of_an_allocation_are_found_sound(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = tmp_path / "doctor.sh"
    script.write_text(
        f'#!/bin/bash\n"{sys.executable}" -m slipstream.backend.cli doctor --nodes 2 --folder "{tmp_path}"\n'
    )
    job = slurm_cluster.submit(
        str(script), cwd=tmp_path, env={}, nodes=2, gpus_per_node=0, output=tmp_path / "out.log"
    )
    result = slurm_cluster.wait(job, DOCTOR_S)
    # Slow disks and starts of a loaded machine are no fault of the doctor.
    for words in ("each of 2 nodes reaches every other one", "equal on 2 nodes", "keep 2 nodes apart"):
        assert words in result.output, result.output
    assert "all-reduce" in result.output
    for node in slurm_cluster.node_ips:
        assert not slurm_cluster.processes(node)
