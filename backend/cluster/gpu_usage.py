"""GPUs of this node as NVIDIA's driver sees them: how busy each is, and the memory of each process on it.

Needs nvidia-ml-py, which the environment for GPUs has. Without it, or without a driver, there is nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from slipstream.backend.monitor.process_usage import GroupUsage
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
