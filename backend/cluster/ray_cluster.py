"""The Ray cluster of a run: started here on one machine, joined in a Slurm job."""

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.guard import guarded
from slipstream.backend.cluster.placement import Node
from slipstream.configs.schema import RunConfig

OBJECT_STORE_BYTES = 128 * 2**20
"""Room for the batches of a run on one machine. The object store is shared memory, which a laptop lacks."""


class ClusterError(RuntimeError):
    """No cluster can be used."""


@contextmanager
def ray_cluster(config: RunConfig) -> Iterator[list[Node]]:
    """Connect to Ray and give its nodes. A cluster started here ends on exit, with all of its files."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        if config.cluster.type == "local":
            # Ray's sockets live below this folder, and a socket's path may have about 100 characters.
            folder = Path(tempfile.mkdtemp(prefix="slipstream-ray-", dir="/tmp"))
            stack.enter_context(guarded(folder))
        stack.callback(ray.shutdown)
        if config.cluster.type == "local":
            _start_local(config, folder)
        else:
            _join_job()
        signal.signal(signal.SIGTERM, on_sigterm)  # ray.init puts in one that exits without cleaning up
        yield [
            Node(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"]
        ]


def driver_address(config: RunConfig) -> str:
    """Return the address of this node by which the run's other processes reach it."""
    return "127.0.0.1" if config.cluster.type == "local" else ray.util.get_node_ip_address()


def _start_local(config: RunConfig, folder: Path) -> None:
    ray.init(
        address="local",
        # Logical CPUs: on a small machine trainer and engines share the cores.
        num_cpus=config.actor.parallel.world_size + config.rollout.engine.count,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
    )


def _join_job() -> None:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise ClusterError(
            "cluster.type is slurm, but RAY_ADDRESS is not set: "
            'launch with `sbatch "$(slipstream slurm-script)" RECIPE`'
        )
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
