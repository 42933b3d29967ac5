"""Resources that the run's processes use. In a job, the driver asks a small actor on each node."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from slipstream.backend.cluster.actors import on_node
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.placement import Node
from slipstream.backend.monitor.process_usage import GroupUsage, UsageSampler, usage_metrics
from slipstream.configs.installed.environment import has_gpus


class GpuSample(NamedTuple):
    """One GPU at one moment."""

    busy: float
    """Share of the driver's last sampling period in which a kernel ran."""
    memory: Mapping[int, int]
    """Bytes of each process on it, by process id."""


class GpuReader:
    """Reads the GPUs of this node. Used from one thread."""

    def __init__(self) -> None:
        self._nvml: Any = None
        if not has_gpus():
            return
        try:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
        except Exception:  # no such package, or a driver that cannot be asked: there are no figures then
            return
        self._nvml = pynvml

    def sample(self) -> list[GpuSample]:
        """Return the GPUs that can be read."""
        if self._nvml is None:
            return []
        samples: list[GpuSample] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                device = self._nvml.nvmlDeviceGetHandleByIndex(index)
                busy = self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
                processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
            except self._nvml.NVMLError:
                continue
            samples.append(GpuSample(busy, {each.pid: each.usedGpuMemory or 0 for each in processes}))
        return samples


def with_gpus(usage: Mapping[str, GroupUsage], gpus: list[GpuSample]) -> dict[str, GroupUsage]:
    """Return the usage of groups with that of the GPUs on which they have a process."""
    return {
        group: replace(
            each,
            gpu_fractions=tuple(gpu.busy for gpu in gpus if each.pids & gpu.memory.keys()),
            gpu_memory_bytes=sum(gpu.memory.get(pid, 0) for gpu in gpus for pid in each.pids),
        )
        for group, each in usage.items()
    }


ANSWER_TIMEOUT_S = 5.0
"""Longest wait for the nodes. A sample takes some milliseconds."""


class UsageReader:
    """Looks at the processes of one node that descend from ``root``; an actor's is Ray's daemon."""

    def __init__(self, root: int | None = None) -> None:
        self._sampler = UsageSampler(os.getppid() if root is None else root)
        self._gpus = GpuReader()

    def sample(self) -> dict[str, GroupUsage]:
        """Return the usage of each group of processes on this node."""
        return with_gpus(self._sampler.sample(), self._gpus.sample())


class NodeUsages:
    """All nodes of a run. One that does not answer is left out from then on."""

    def __init__(self, nodes: Sequence[Node], *, is_local: bool) -> None:
        """``is_local``: the driver has started Ray, and all processes of the run descend from it."""
        remote: Any = ray.remote(UsageReader)
        self._actors: list[Any] = [
            remote.options(**on_node(node, gpus=0)).remote() for node in nodes if not is_local
        ]
        self._here = UsageReader(os.getpid()) if is_local else None
        self._driver = UsageSampler(os.getpid(), "driver")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a sample on all nodes, by the tags of ``tags.py``. Waits for the answers."""
        asked = {actor.sample.remote(): actor for actor in self._actors}
        ready, late = (
            ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_TIMEOUT_S) if asked else ((), ())
        )
        total = self._driver.sample() | (self._here.sample() if self._here is not None else {})
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
