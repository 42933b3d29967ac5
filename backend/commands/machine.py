"""Finds needs of a recipe that the machine of its run cannot meet: cores, memory, GPUs, disk and ports.

All compared needs are lower bounds, so that no recipe is refused that could run.
"""

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.backend.cluster.object_store import MAKE_ROOM, SHARED_MEMORY, free_shared_memory
from slipstream.backend.cluster.placement import Node, Placement, PlacementError
from slipstream.backend.driver.processes.gateways import FOLDER
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.rules.rollout import FP8_ON_CPUS
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import own_engines

MOST_PER_CORE = 8
"""Engines and trainer ranks for each CPU core. With more of them none answers within its time limits."""

LEAST_PROCESS = 400 << 20
"""Bytes that an engine or a trainer rank takes on a CPU before it has any weights: the libraries."""

OPTIMIZER = 3
"""Sizes of the checkpoint that a trainer's state has at least: float32 weights and two moments, of
bfloat16."""

LEAST_DISK = 64 << 20
"""Bytes of disk that the smallest run takes: its ledger, its metrics and its logs."""

LEAST_SHARED = 16 << 20
"""Bytes of /dev/shm that the smallest run takes: the load of each engine, and what processes share."""

GIB = 2**30

Place = Callable[[Sequence[Node], RunConfig], Placement]
"""``placement.place``, ``place_engines`` or ``place_trainer``: what a command places."""


@dataclass(frozen=True)
class HostFacts:
    """Facts about the machine on which a run is to start."""

    cores: int
    memory: int
    """Bytes."""
    gpus: int
    free_disk: Callable[[Path], int]
    """Returns the free bytes of the file system of a folder that exists."""
    free_shared: int
    """Bytes of shared memory that are free."""
    port_problem: Callable[[str, int], str]
    """Returns why nobody can listen on an address and port; an empty text: it is free."""


def host_facts() -> HostFacts:
    """Look at this machine."""
    return HostFacts(
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_visible_gpus(),
        free_disk=lambda folder: shutil.disk_usage(folder).free,
        free_shared=free_shared_memory(),
        port_problem=_port_problem,
    )


def fp8_problems_of(config: RunConfig, *, on_gpus: bool) -> list[str]:
    """Return why engines in fp8 cannot run here, where no setting says that there are no GPUs."""
    quantization = config.rollout.engine.quantization
    if quantization is None or on_gpus or config.cluster.device != "auto":
        return []
    return [f"rollout.engine.quantization: {quantization} found, and this machine has no GPUs: {FP8_ON_CPUS}"]


def machine_problems(config: RunConfig, machine: HostFacts, place: Place | None = None) -> list[str]:
    """Return what the machine cannot hold of a run on it alone (``cluster.type: local``).

    ``place``: the run starts here and now, and with it what ``place`` places. None: it is only looked at,
    perhaps on a machine without the GPUs that it will have.
    """
    problems = [*_ports(config, machine), *_disk(config, machine)]
    if config.cluster.type != "local":
        return problems if place is not None else []
    problems += _shared_memory(machine)
    on_gpus = config.cluster.device == "gpu" or (config.cluster.device == "auto" and machine.gpus > 0)
    if not on_gpus:
        return [*_cores(config, machine), *_memory(config, machine), *problems]
    if machine.gpus or place is not None:
        problems += _gpus(config, machine, place)
    return problems


def _processes(config: RunConfig) -> tuple[int, int, str]:
    """Return the numbers of engine and of trainer processes, and how a message counts them."""
    engine, judge = config.rollout.engine, own_engines(config.judge)
    engines = engine.count * engine.ranks
    stages = f", pipeline_parallel {engine.pipeline_parallel}" if engine.pipeline_parallel > 1 else ""
    words = (
        f"{engines} (rollout.engine: count {engine.count}, tensor_parallel {engine.tensor_parallel}{stages})"
    )
    if judge is not None:
        engines += judge.count * judge.tensor_parallel
        words += f" and {judge.count * judge.tensor_parallel} (judge.endpoint)"
    ranks = config.actor.parallel.world_size
    return engines, ranks, f"engine processes {words} and trainer ranks {ranks} (actor.parallel)"


def _cores(config: RunConfig, machine: HostFacts) -> Iterator[str]:
    engines, ranks, words = _processes(config)
    most = MOST_PER_CORE * machine.cores
    if engines + ranks > most:
        parallel = ranks > engines
        yield (
            f"{'actor.parallel' if parallel else 'rollout.engine.count'}: {words} make {engines + ranks} "
            f"processes, expected at most {most} on the {machine.cores} CPU cores of this machine "
            f"({MOST_PER_CORE} for each); use fewer, or a larger machine"
        )


def _memory(config: RunConfig, machine: HostFacts) -> Iterator[str]:
    engines, ranks, words = _processes(config)
    weights = _weights(config.model.path)
    needed = engines * (LEAST_PROCESS + weights) + ranks * LEAST_PROCESS + (1 + OPTIMIZER) * weights
    if needed > machine.memory:
        yield (
            f"rollout.engine.count: {words} take at least {needed / GIB:.1f} GiB of memory, and this "
            f"machine has {machine.memory / GIB:.1f} GiB; use fewer, a smaller model, or a larger machine"
        )


def _gpus(config: RunConfig, machine: HostFacts, place: Place | None) -> Iterator[str]:
    from slipstream.backend.cluster import placement

    try:
        (place or placement.place)([Node("this machine", "this machine", machine.gpus)], config)
    except PlacementError as error:
        yield f"cluster: {error}; use fewer, or a machine with more GPUs"


def _disk(config: RunConfig, machine: HostFacts) -> Iterator[str]:
    folder = next(
        (path for path in (config.run.root, *config.run.root.absolute().parents) if path.is_dir()), None
    )
    if folder is None:
        return
    if not os.access(folder, os.W_OK):
        yield f"run.root: {folder} cannot be written to; expected a folder of yours: set it to another one"
        return
    weights = 0 if config.actor.lora is not None else _weights(config.model.path)
    kept = config.checkpoint.keep_last if config.checkpoint.every else 0
    needed = LEAST_DISK + OPTIMIZER * weights * kept + weights
    free = machine.free_disk(folder)
    if free < needed:
        yield (
            f"run.root: {folder} has {free / GIB:.1f} GiB free, expected at least {needed / GIB:.1f} GiB for "
            f"{kept} checkpoints (checkpoint.keep_last) and the trained model; free some, or set "
            "run.root to a folder of a larger disk"
        )


def _shared_memory(machine: HostFacts) -> Iterator[str]:
    if machine.free_shared < LEAST_SHARED:
        yield (
            f"cluster: {SHARED_MEMORY} has {machine.free_shared / 2**20:.1f} MiB free, expected at least "
            f"{LEAST_SHARED >> 20} MiB: {MAKE_ROOM}"
        )


def _ports(config: RunConfig, machine: HostFacts) -> Iterator[str]:
    gateway = config.gateway
    if gateway is None or (config.run.folder / FOLDER).exists():  # gateways of the run may still serve there
        return
    for setting, host, port in (
        ("gateway.port", gateway.host, gateway.port),
        ("gateway.admin_port", "127.0.0.1", gateway.admin_port),
    ):
        if reason := machine.port_problem(host, port):
            yield f"{setting}: {reason}; set {setting} to another port, or end who listens there"


def _weights(model: Path) -> int:
    """Return the bytes of a checkpoint's weights; 0 if it is not there yet."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_gpus():
        return 0
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(entry.startswith("nvidia") and entry[6:].isdigit() for entry in os.listdir("/dev"))


def _port_problem(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {host} is in use, expected a free one"
        reason = error.strerror or error
        return f"nobody can listen on {host}:{port}: {reason}, expected an address of this machine"
    return ""
