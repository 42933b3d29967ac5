from collections.abc import Iterator

import pytest

from tests.cluster.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Two idle nodes of a real Slurm, without GPUs; shared, so leave the nodes up and idle."""
    reason = SlurmCluster.unavailable()
    if reason:
        pytest.fail(reason)
    with SlurmCluster(nodes=2) as cluster:
        yield cluster
