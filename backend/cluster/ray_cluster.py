"""The Ray cluster of a run: started here on one machine, joined in a Slurm job; its actors."""

import hashlib
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slipstream.backend.cluster.actors import TrainerActor
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.guard import guarded
from slipstream.backend.cluster.placement import Node, Placement
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.actor import EngineActor
from slipstream.rollout.engine.process import ReplicaSpec

OBJECT_STORE_BYTES = 128 * 2**20
"""Enough for the batches of a run on one machine; the object store is shared memory that a laptop lacks."""


POLICY_RANK = "slipstream.backend.trainer.rank.TrainerRank"
"""What the actors of a reinforcement learning run hold."""


class ClusterError(RuntimeError):
    """There is no cluster to run on."""


@contextmanager
def ray_cluster(config: RunConfig) -> Iterator[list[Node]]:
    """A connected Ray; its nodes. A cluster that was started here ends, with all of its files, on exit."""
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


def _start_local(config: RunConfig, folder: Path) -> None:
    ray.init(
        address="local",
        # Logical CPUs: on a small machine trainer and engines share the cores.
        num_cpus=config.actor.parallel.world_size + config.rollout.engine.count,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=str(folder),
        _node_ip_address="127.0.0.1",
    )


def _join_job() -> None:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise ClusterError(
            "cluster.type is slurm, but RAY_ADDRESS is not set: "
            "launch with `sbatch slurm/train.sbatch RECIPE`"
        )
    ray.init(address=address, log_to_driver=False, logging_level="error")


def _on(node: Node, gpus: int) -> dict[str, Any]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy, "max_restarts": 0}


def create_trainer(
    config: RunConfig,
    placement: Placement,
    logs: Path,
    *,
    rank_class: str = "slipstream.backend.trainer.rank.TrainerRank",
) -> list[Any]:
    """One actor handle per trainer rank."""
    gpus = int(placement.device == "cuda")
    remote = ray.remote(TrainerActor)
    return [
        remote.options(**_on(node, gpus)).remote(config, rank, placement.device, str(logs), rank_class)
        for rank, node in enumerate(placement.trainer)
    ]


def replica_of(config: RunConfig, engine: str) -> ReplicaSpec | None:
    """Where an engine keeps a copy of the weights, if the transport wants one. A run's next start finds the
    same folder, so that what a crash has left does not stay.
    """
    transport = config.weights.transport
    if transport.type != "delta":
        return None
    run = hashlib.sha256(str(config.run.folder.resolve()).encode()).hexdigest()[:12]
    return ReplicaSpec(
        "slipstream.bridge.transport.replica.mount", str(transport.memory / f"slipstream-{run}-{engine}")
    )


def create_engine(
    config: RunConfig, placement: Placement, number: int, logs: Path, trainer_gpus: Sequence[Sequence[str]]
) -> Any:
    """The actor handle of engine ``number``. It waits for its server's end while it starts and stops it.

    ``trainer_gpus``: ids of each trainer rank's GPUs. A colocated engine has those and asks Ray for none.
    """
    engine = config.rollout.engine
    sharing = placement.shared[number] if placement.shared else ()
    shared = [gpu for rank in sharing for gpu in trainer_gpus[rank]]
    gpus = engine.tensor_parallel if placement.device == "cuda" and not shared else 0
    options = _on(placement.engines[number], gpus) | {"max_concurrency": 8}
    return (
        ray.remote(EngineActor)
        .options(**options)
        .remote(
            name=f"engine-{number}",
            model_path=str(config.model.path.resolve()),
            dtype=config.model.dtype,
            device=placement.device,
            tensor_parallel=engine.tensor_parallel,
            seed=config.run.seed + number,
            args=engine.args,
            log_folder=str(logs),
            loopback=config.cluster.type == "local",
            start_timeout_s=engine.start_timeout_s,
            shared_gpus=shared,
            replica=replica_of(config, f"engine-{number}"),
        )
    )
