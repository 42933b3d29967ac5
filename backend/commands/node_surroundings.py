"""What a process of a job meets on its node, also in a container: facts of a probe, and findings about them.

Slurm, the container and the site's limits decide which GPUs, network adapters and memory a process can use.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypedDict

from slipstream.backend.commands.doctor import NEEDED_SHM, Finding
from slipstream.backend.commands.gpu_doctor import SHARED_MEMORY, ThisMachine, infiniband_ports
from slipstream.backend.commands.slurm_jobs import CONTAINER, GPUS, IMAGE

NAMES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Variables with the image of a container. pyxis sets none, so who starts it sets ``IMAGE``."""

NO_CONTAINER = "none"
SHOWN = 4
"""Largest number of nodes that a finding names."""


class NodeSurroundings(TypedDict):
    """The answer of the probe of one node."""

    container: str
    """Image of the container; ``none`` outside of one."""
    host: str
    given_gpus: int | None
    """GPUs that Slurm, or the site, has given to the process; null: neither says."""
    gpus: int
    """GPUs that the process can open."""
    active_ports: int
    """Ports of InfiniBand or RoCE adapters that have a link."""
    has_verbs: bool
    """The process sees the devices by which programs use these adapters."""
    locked_bytes: int | None
    """Most memory that the process may lock; null: any."""
    shared_bytes: int
    """Free bytes of /dev/shm."""


def surroundings(machine: ThisMachine) -> NodeSurroundings:
    """Return what this process meets on a machine."""
    variables = machine.variables
    given = variables.get(GPUS) or variables.get("SLURM_GPUS_ON_NODE", "")
    return {
        "container": _container(machine),
        "host": (machine.text("/proc/sys/kernel/hostname") or "").strip(),
        "given_gpus": int(given) if given.isdigit() else None,
        "gpus": sum(re.fullmatch(r"nvidia\d+", name) is not None for name in machine.names("/dev")),
        "active_ports": sum("ACTIVE" in state for state in infiniband_ports(machine).values()),
        "has_verbs": any(name.startswith("uverbs") for name in machine.names("/dev/infiniband")),
        "locked_bytes": _locked_bytes(machine.text("/proc/self/limits") or ""),
        "shared_bytes": machine.free("/dev/shm"),
    }


def _container(machine: ThisMachine) -> str:
    for name in NAMES:
        if name in machine.variables:
            return machine.variables[name]
    if machine.variables.get(CONTAINER) == "pyxis":
        return machine.variables.get(IMAGE, "pyxis")
    if machine.text("/.dockerenv") is not None:
        return "docker"
    return "podman" if machine.text("/run/.containerenv") is not None else NO_CONTAINER


def _locked_bytes(limits: str) -> int | None:
    match = re.search(r"^Max locked memory +(\d+)", limits, re.MULTILINE)
    return int(match[1]) if match else None


def findings_around(nodes: Mapping[str, NodeSurroundings], hosts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is right or wrong around the processes of all nodes.

    ``hosts``: the host name of each node, as Slurm knows it; empty: it is not compared.
    """
    yield _containers(nodes)
    yield _host_names(nodes, hosts)
    yield _gpus(nodes)
    yield _adapters(nodes)
    yield _locked_memory(nodes)
    yield _shared_memory(nodes)


def _containers(nodes: Mapping[str, NodeSurroundings]) -> Finding:
    by_image: dict[str, list[str]] = {}
    for node, seen in nodes.items():
        by_image.setdefault(seen["container"], []).append(node)
    if len(by_image) == 1:
        return Finding("container", next(iter(by_image)))
    told = "; ".join(f"{image} on {some(on)}" for image, on in sorted(by_image.items()))
    return wrong("container", told, "name one image that all nodes see: cluster.container.image")


def _host_names(nodes: Mapping[str, NodeSurroundings], hosts: Mapping[str, str]) -> Finding:
    names = {node: seen["host"].partition(".")[0] for node, seen in nodes.items()}
    all_names = list(names.values())
    told = [
        f"{node} is called {name or 'nothing'}, {expected} expected"
        for node, name in names.items()
        if name != (expected := hosts.get(node, node).partition(".")[0])
        and (node in hosts or all_names.count(name) > 1)
    ]
    if not told:
        return Finding("host names", "as Slurm knows them" if hosts else "differ")
    advice = (
        "NCCL takes ranks with one host name for ranks of one node: start containers without host names of "
        "their own (apptainer.conf, enroot's hooks), or let the site correct NodeHostname in slurm.conf"
    )
    return wrong("host names", some(told, "; "), advice)


def _gpus(nodes: Mapping[str, NodeSurroundings]) -> Finding:
    told = [
        f"{node}: {seen['gpus']} of {seen['given_gpus']}"
        for node, seen in nodes.items()
        if seen["gpus"] < (seen["given_gpus"] or 0)
    ]
    if told:
        advice = (
            "the container hides them. apptainer: --nv, which is given, needs NVIDIA's driver on the node; "
            "pyxis: the site needs enroot's hook 98-nvidia.sh, and the image NVIDIA_VISIBLE_DEVICES=all"
        )
        if all(seen["container"] == NO_CONTAINER for seen in nodes.values()):
            advice = "the node's driver does not show them: `nvidia-smi` there, then ask the site"
        return wrong("GPUs", f"{some(told, '; ')} that Slurm or the site has given", advice)
    counts = sorted({seen["gpus"] for seen in nodes.values()})
    if all(not seen["given_gpus"] for seen in nodes.values()):
        return Finding("GPUs", "Slurm has given none", "to look at them: salloc --gpus-per-node=8")
    return Finding("GPUs", f"{' to '.join(map(str, counts))} on each node, as Slurm has given")


def _adapters(nodes: Mapping[str, NodeSurroundings]) -> Finding:
    what, ports = "RDMA", {node: seen["active_ports"] for node, seen in nodes.items()}
    if not any(ports.values()):
        return Finding(what, "no node has a port with a link", "NCCL uses TCP between nodes")
    hidden = [node for node, seen in nodes.items() if seen["active_ports"] and not seen["has_verbs"]]
    if hidden:
        advice = (
            "NCCL would use TCP: add /dev/infiniband to cluster.container.mounts; pyxis shows it also by "
            "enroot's hook 99-mellanox.sh, with MELLANOX_VISIBLE_DEVICES=all in the image"
        )
        return wrong(what, f"/dev/infiniband is not there on {some(hidden)}", advice)
    if without := [node for node, number in ports.items() if not number]:
        advice = "leave the nodes out (--sbatch=--exclude=NODE), or set NCCL_IB_DISABLE=1 for all"
        return wrong(what, f"no port with a link on {some(without)}", advice)
    return Finding(what, f"{' to '.join(map(str, sorted(set(ports.values()))))} ports on each node")


def _locked_memory(nodes: Mapping[str, NodeSurroundings]) -> Finding:
    what = "locked memory"
    limited = {node: seen["locked_bytes"] for node, seen in nodes.items() if seen["locked_bytes"] is not None}
    if not limited:
        return Finding(what, "without a limit")
    told = some([f"{node}: {size / 2**20:,.1f} MiB" for node, size in limited.items()], "; ")
    if not any(nodes[node]["active_ports"] for node in limited):
        return Finding(what, told, "enough without RDMA")
    advice = (
        "NCCL cannot register buffers with RDMA: `ulimit -l unlimited` before sbatch, or "
        "--sbatch=--propagate=NONE, which takes the limit of the node; the site sets that "
        "(LimitMEMLOCK=infinity of slurmd)"
    )
    return wrong(what, told, advice)


def _shared_memory(nodes: Mapping[str, NodeSurroundings]) -> Finding:
    what = "/dev/shm"
    small = [
        f"{node}: {seen['shared_bytes'] / 2**30:.1f} GiB, {needed / 2**30:.1f} GiB expected"
        for node, seen in nodes.items()
        if seen["shared_bytes"] < (needed := SHARED_MEMORY if seen["gpus"] else NEEDED_SHM)
    ]
    if not small:
        least = min(seen["shared_bytes"] for seen in nodes.values())
        return Finding(what, f"{least / 2**30:.1f} GiB or more are free")
    advice = (
        "Ray and NCCL need it: remove what fills it, or add /dev/shm to cluster.container.mounts, which shows"
        " the node's; SLIPSTREAM_OBJECT_STORE makes Ray's part smaller"
    )
    return wrong(what, some(small, "; "), advice)


def wrong(what: str, state: str, advice: str) -> Finding:
    """Return a finding of something that is wrong."""
    return Finding(what, state, advice, wrong=True)


def some(names: list[str], between: str = ", ") -> str:
    """Return the first names, and the number of the others."""
    more = f"{between}and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return between.join(names[:SHOWN]) + more
