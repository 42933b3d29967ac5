"""What the run's processes use on each node: a small actor looks there, and the driver asks now and then."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.backend.cluster.actors import on_node
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.gpu_usage import GpuReader, with_gpus
from slipstream.backend.cluster.placement import Node
from slipstream.backend.monitor.process_usage import GroupUsage, UsageSampler, usage_metrics

ANSWER_TIMEOUT_S = 5.0
"""Longest wait for the nodes. A sample takes some milliseconds."""


class NodeUsageActor:
    """Looks at the processes of one node. Ray's daemon there is the parent of all of the run's."""

    def __init__(self) -> None:
        self._sampler = UsageSampler(os.getppid())
        self._gpus = GpuReader()

    def sample(self) -> dict[str, GroupUsage]:
        """Return the usage of each group of processes on this node."""
        return with_gpus(self._sampler.sample(), self._gpus.sample())


class NodeUsages:
    """The actors of all nodes. A node that does not answer is left out from then on."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        remote: Any = ray.remote(NodeUsageActor)
        self._actors: list[Any] = [remote.options(**on_node(node, gpus=0, cpus=0)).remote() for node in nodes]
        self._driver = UsageSampler(os.getpid(), "driver")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a sample on all nodes, by the tags of ``tags.py``. Waits for the answers."""
        asked = {actor.sample.remote(): actor for actor in self._actors}
        ready, late = (
            ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_TIMEOUT_S) if asked else ((), ())
        )
        total = self._driver.sample()
        for answer in ready:
            try:
                usage: Mapping[str, GroupUsage] = ray.get(answer)
            except ray.exceptions.RayError:
                self._actors.remove(asked[answer])
                continue
            for group, each in usage.items():
                total[group] = total.get(group, GroupUsage()) + each
        for answer in late:
            self._actors.remove(asked[answer])
        return usage_metrics(total)
