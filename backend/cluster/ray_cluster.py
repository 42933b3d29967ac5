"""The Ray cluster of a run: started here on one machine, joined in a Slurm job or where others run one."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.guard import guarded
from slipstream.backend.cluster.object_store import (
    free_memory,
    free_shared_memory,
    object_store,
    too_small,
)
from slipstream.backend.cluster.placement import Node, actor_count
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.cluster import Cluster
from slipstream.rollout.system.temporary import OwnedFolder

TEMPORARY = Path("/tmp")
"""Folder of the folder with Ray's sockets, whose paths may have about 100 characters."""


class ClusterError(RuntimeError):
    """No cluster can be used."""


@contextmanager
def ray_cluster(config: RunConfig, *, batch_bytes: int, note: Callable[[str], None]) -> Iterator[list[Node]]:
    """Connect to Ray and give its nodes. A cluster started here ends on exit, with all of its files.

    ``batch_bytes``: size of the largest batch. ``note``: tells the user something.
    """
    cluster = config.cluster
    _check_address(cluster)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        if cluster.type == "local":
            folder = OwnedFolder(TEMPORARY, f"ray-{config.run.name:.8}")
            stack.callback(folder.remove)
            stack.enter_context(guarded(folder.path))
        stack.callback(ray.shutdown)
        if cluster.type == "local":
            _start_local(actor_count(config), folder.path, batch_bytes, note)
        else:
            ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
        if threading.current_thread() is threading.main_thread():  # no other thread has signals
            signal.signal(signal.SIGTERM, on_sigterm)  # ray.init puts in one that exits without cleaning up
        if cluster.type != "local":
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            smallest = min(int(resources.get("object_store_memory", 0)) for resources in alive)
            if message := too_small(smallest, batch_bytes):
                note(message)
        _note_gpus_of_others(cluster)
        yield alive_nodes()


_of_others: dict[str, int] = {}
"""GPUs of each node, by its id, that were in use when the run joined the cluster."""


def _note_gpus_of_others(cluster: Cluster) -> None:
    _of_others.clear()
    if cluster.type == "ray":
        from ray._private.state import available_resources_per_node  # nothing public knows it by node

        free = available_resources_per_node()
        for node in alive_nodes():
            _of_others[node.id] = node.gpus - int(free.get(node.id, {}).get("GPU", 0))


def alive_nodes() -> list[Node]:
    """Return the nodes that the cluster has now, with the GPUs that the run may use."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)) - _of_others.get(node["NodeID"], 0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def driver_address(cluster: Cluster) -> str:
    """Return the address of this node by which the run's other processes reach it."""
    return "127.0.0.1" if cluster.type == "local" else ray.util.get_node_ip_address()


def _start_local(actors: int, folder: Path, batch_bytes: int, note: Callable[[str], None]) -> None:
    store = object_store(batch_bytes, shared_memory=free_shared_memory(), memory=free_memory())
    if store.note:
        note(store.note)
    ray.init(
        address="local",
        # Logical CPUs, for each of which Ray starts a process that an actor may have. No actor takes one.
        num_cpus=actors,
        object_store_memory=store.size,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        # Ray lets every user of the machine write to its folder: it is inside of one that nobody else enters.
        _temp_dir=str(folder / "r"),
        _plasma_directory=None if store.in_shared_memory else str(folder),
    )


def _check_address(cluster: Cluster) -> None:
    """Raise ClusterError if RAY_ADDRESS does not fit the recipe."""
    address = os.environ.get("RAY_ADDRESS")
    if cluster.type == "slurm" and not address:
        raise ClusterError(
            "cluster.type is slurm, but RAY_ADDRESS is not set: "
            'launch with `sbatch "$(slipstream slurm-script)" RECIPE`'
        )
    if cluster.type == "ray" and not address:
        raise ClusterError("cluster.type is ray, but RAY_ADDRESS is not set: set it to the head's HOST:PORT")
    if cluster.type == "local" and address:
        # Ray has been imported without the settings that close a local cluster to others (configured_ray).
        raise ClusterError(
            f"cluster.type is local, but RAY_ADDRESS is set to {address}: unset it to run on this machine, "
            "or set cluster.type to ray to run on that cluster"
        )
