"""Where engines go when nodes of a real Ray are killed and added."""

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio

from slipstream.backend.cluster.actors import on_node
from slipstream.backend.cluster.placement import Placement
from slipstream.backend.cluster.ray_cluster import alive_nodes
from slipstream.backend.driver.processes.places import EnginePlaces
from slipstream.rollout.system.restarts import NodeLost

import ray
from ray.cluster_utils import Cluster

STORE = 80_000_000


async def noticed(places):
    async with asyncio.timeout(240):
        while True:
            try:
                places.check("engine-0")
            except NodeLost as lost:
                return str(lost)
            await asyncio.sleep(0.5)


async def main(cluster, first):
    places = EnginePlaces(Placement((), (), "cuda"))
    assert sorted(node.gpus for node in alive_nodes()) == [0, 2]
    await places.take("engine-0", spread=1, gpus=2, beyond=False)
    [before] = places.nodes_of("engine-0")
    places.check("engine-0")
    cluster.remove_node(first, allow_graceful=False)
    print(await noticed(places))
    places.give_up("engine-0", unfit=False)
    waiting = asyncio.ensure_future(places.take("engine-0", spread=1, gpus=2, beyond=False))
    await asyncio.wait({waiting}, timeout=2)
    assert not waiting.done(), "no node has two GPUs"
    cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=STORE)
    await asyncio.wait_for(waiting, 240)
    [after] = places.nodes_of("engine-0")
    assert after.id != before.id
    places.check("engine-0")
    print("placed again")
    # More actors than the node has CPUs, such as the trainer's ranks beside an engine.
    probes = [ray.remote(Probe).options(**on_node(after, gpus=1)).remote() for _ in range(2)]
    assert await asyncio.wait_for(asyncio.gather(*(probe.answer.remote() for probe in probes)), 240) == [1, 1]
    print("side by side")


class Probe:
    def answer(self):
        return 1


cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": STORE},
)
try:
    first = cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=STORE)
    ray.init(address=cluster.address, log_to_driver=False)
    asyncio.run(main(cluster, first))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow  # test_train_on_slurm.py loses an engine's node, test_engine_supervisor.py waits for one
@pytest.mark.timeout(900)
def test_an_engine_whose_node_is_killed_waits_for_a_node_that_is_added():
    """In a process of its own, because a process has one Ray."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(text in done.stdout for text in ("Ray has lost", "placed again", "side by side"))
