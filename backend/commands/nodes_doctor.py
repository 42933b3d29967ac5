"""``slipstream doctor --nodes``: whether the nodes of an allocation can run a job together, or why not.

    hello ─► versions ─► look: container, devices, limits ─► meet: every pair, clocks
          ─► stream: pairs in turn ─► reduce ─► folder: shared, locks

Each question goes to the probes of all nodes at once (``node_probe.py``), and has a time limit.
"""

import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.backend.commands.doctor import Finding
from slipstream.backend.commands.node_probe import CONNECT_S, REDUCE_S, STREAM_S
from slipstream.backend.commands.node_surroundings import findings_around, some, wrong
from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.slurm_jobs import CONTAINER, IMAGE, called, container_mounts
from slipstream.configs.schema.cluster import ContainerConfig

PROBE = "slipstream.backend.commands.node_probe"
HELLO_S, WRITE_S = 60.0, 40.0
"""Longest time for the probes to start, and for all nodes to write."""

CONTAINER_S = 300.0
"""Longest time for the probes to start in a container, whose image pyxis unpacks on each node."""

PAIRS_S = 25.0
"""Time in which pairs are measured; of large jobs, only some are."""

STREAM_BYTES, REDUCE_BYTES, WRITE_BYTES = 64 * 2**20, 64 * 2**20, 64 * 2**20

LARGEST_OFFSET_S = 2.0
"""Clocks may differ by this much: files and logs of the nodes would be in a wrong order."""

SLOW_LINK = 4.0
"""A pair whose rate is the median's divided by this has a fault of its own."""

SLOW_DISK = 50e6
"""Fewest bytes per second of all nodes together with which checkpoints are practical."""

Answers = Mapping[str, Any]
"""The answer of each node; Unanswered for one that has failed."""

OPEN_PORTS = "nodes must reach each other on every port: ask the site, or set cluster.network_interface"


class Unanswered(str):
    """Why a node has not answered."""


class Nodes:
    """The probes of all nodes. Close it, which ends them."""

    hosts: Mapping[str, str] = {}
    """Host names by node, as Slurm knows them; empty: they are not compared."""

    start_s = HELLO_S
    """Longest time for the probes to start."""

    def __init__(
        self,
        names: Sequence[str],
        commands: Sequence[Sequence[str]],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``commands``: start the probes; srun starts all with one. ``variables``: their environment; None:
        that of this process.
        """
        self.names = list(names)
        self._number = 0
        """Of the present question: a late answer to an earlier one counts for nothing."""
        self._lines: queue.Queue[str] = queue.Queue()
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
            for command in commands
        ]
        self._reading = len(self._processes)
        """Number of processes that may still answer."""
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, do: str, timeout_s: float, **given: object) -> dict[str, Any]:
        """Ask all probes, and return the answers by node."""
        self._number += 1
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"number": self._number, "do": do, **given}) + "\n")
                process.stdin.flush()
            except OSError:
                """The probe has ended, so it does not answer."""
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self.names) and self._reading:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
                self._reading -= not line
                said = json.loads(line)
            except queue.Empty:
                break
            except ValueError:
                continue  # printed by a library
            if isinstance(said, dict) and said.get("number") == self._number:
                answers[said["node"]] = said["answer"] if "answer" in said else Unanswered(said.get("error"))
        why = f" in {timeout_s:.0f} s" if self._reading else ": the probes have ended"
        silent = Unanswered(f"no answer to {do}{why}")
        return {name: answers.get(name, silent) for name in self.names}

    def close(self) -> None:
        """End the probes."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                """It has ended."""
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def allocated(
    count: int, folder: Path, variables: Mapping[str, str], container: ContainerConfig | None = None
) -> Nodes:
    """Start a probe on ``count`` nodes of the allocation of this process, in the container of its jobs.

    ``container``: None: probes use the environment of this process. Raises WrongInput and Failed.
    """
    nodes = variables.get("SLURM_JOB_NODELIST")
    if not nodes or shutil.which("srun") is None or shutil.which("scontrol") is None:
        raise WrongInput(
            f"--nodes: no allocation of Slurm found: call it in one, after `salloc --nodes={count}`, or "
            f"`sbatch --nodes={count} --wrap 'slipstream doctor --nodes {count}'`"
        )
    names = called("scontrol", "show", "hostnames", nodes).stdout.split()
    if not 2 <= count <= len(names):
        raise WrongInput(f"--nodes: {count} found, from 2 to the allocation's {len(names)} nodes expected")
    names = names[:count]
    shown = {name: _shown(name) for name in names}
    addresses = [f"{name}={shown[name].get('NodeAddr', name)}" for name in names]
    local_disk = variables.get("SLIPSTREAM_TMP") or "/tmp"
    options_inside, inside = in_container(container, [os.getcwd(), str(folder.absolute()), local_disk])
    # Line by line, as by default: with --unbuffered, answers of several nodes would come on one line.
    options = ["--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--no-kill"]
    command = [
        *[
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(names)}",
        ],
        *[*options, "--wait=0", *options_inside, *inside, "-m", PROBE],
        *[str(folder.absolute()), local_disk, *addresses],
    ]
    told = dict(variables)
    if container is not None:
        told |= {CONTAINER: container.runtime, IMAGE: container.image, "PYTHONNOUSERSITE": "1"}
    started = Nodes(names, [command], told)
    started.hosts = {
        name: fields["NodeHostName"] for name, fields in shown.items() if "NodeHostName" in fields
    }
    if container is not None:
        started.start_s = CONTAINER_S
    return started


def in_container(container: ContainerConfig | None, folders: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return options of srun and the Python that it starts on each node, as slurm/train.sbatch has them.

    ``folders``: those that the container shows beside its ``mounts``.
    """
    if container is None:
        return [], [sys.executable]
    mounts = container_mounts([*folders, *container.mounts])
    if container.runtime == "pyxis":
        options = {"image": container.image, "mounts": mounts, "workdir": folders[0]}
        return [f"--container-{name}={value}" for name, value in options.items()], ["python3", "-P"]
    runtime = "apptainer" if shutil.which("apptainer") or not shutil.which("singularity") else "singularity"
    enter = [runtime, "exec", "--nv", "--pwd", folders[0], "--bind", mounts, container.image]
    return [], [*enter, "python3", "-P"]


def _shown(node: str) -> dict[str, str]:
    """Return what Slurm says of a node, by name."""
    words = called("scontrol", "--oneliner", "show", "node", node).stdout.split()
    return {name: value for name, given, value in (word.partition("=") for word in words) if given}


def examine_nodes(nodes: Nodes, folder: Path, ray_port: int) -> Iterator[Finding]:
    """Yield the findings as they come. ``ray_port``: that of Ray's head in the job."""
    hello = nodes.ask("hello", nodes.start_s)
    if lost := _failed(hello):
        advice = (
            "the environment must be under the same path on every node, and so must the image of "
            "cluster.container, with Slipstream in it"
        )
        yield wrong("probes", f"not started on {lost}", advice)
        return
    yield versions_of({node: answer["versions"] for node, answer in hello.items()})
    looked = nodes.ask("look", STREAM_S)
    if lost := _failed(looked):
        yield wrong("surroundings", f"{lost}: {next(iter(_errors(looked)))}", "use one version of Slipstream")
    else:
        yield from findings_around(looked, nodes.hosts)
    peers = {node: answer["address"] for node, answer in hello.items()}
    first, host, port = nodes.names[0], *hello[nodes.names[0]]["address"][:1], hello[nodes.names[0]]["free"]
    yield head_port(nodes.ask("bind", STREAM_S, first=first, port=ray_port), first, ray_port)
    met = nodes.ask("meet", CONNECT_S + STREAM_S, peers=peers)
    pairs = pairs_of(met)
    yield pairs
    yield clocks_of(met)
    if not pairs.wrong:
        yield links_of(_streams(nodes, peers))
        ranks = {node: rank for rank, node in enumerate(nodes.names)}
        nodes.ask("load", HELLO_S)
        given = {"ranks": ranks, "host": host, "port": port, "size": REDUCE_BYTES}
        yield reduced_by(nodes.ask("reduce", REDUCE_S + CONNECT_S, **given))
    yield from _folder(nodes, first, folder)


def _streams(nodes: Nodes, peers: Answers) -> dict[tuple[str, str], Any]:
    """Return the rate of pairs, in rounds in which each node sends to one other and receives from one."""
    found: dict[tuple[str, str], Any] = {}
    until = time.monotonic() + PAIRS_S
    for step in range(1, len(nodes.names)):
        if time.monotonic() > until:
            break
        to = {node: nodes.names[(at + step) % len(nodes.names)] for at, node in enumerate(nodes.names)}
        pairs = {node: peers[other] for node, other in to.items()}
        answers = nodes.ask("stream", STREAM_S + CONNECT_S, pairs=pairs, size=STREAM_BYTES)
        found |= {(node, to[node]): answer for node, answer in answers.items()}
    return found


def _folder(nodes: Nodes, first: str, folder: Path) -> Iterator[Finding]:
    text = f"{os.getpid()}-{time.time_ns()}"
    marked = nodes.ask("mark", STREAM_S, first=first, text=text)
    try:
        if _failed(marked):
            yield wrong(
                "shared folder", str(marked[first]), f"choose another folder of runs: run.root is {folder}"
            )
            return
        shared = shared_by(nodes.ask("see", STREAM_S * 3, first=first, text=text), folder)
        yield from shared
    finally:
        nodes.ask("unmark", STREAM_S, first=first)
    if not any(finding.wrong and finding.what == "shared folder" for finding in shared):
        yield from disks_of(nodes.ask("write", WRITE_S, size=WRITE_BYTES), folder)


# ---- findings, from the answers


def versions_of(versions: Mapping[str, Mapping[str, str]]) -> Finding:
    """Return whether all nodes have the same packages."""
    differing: list[str] = []
    for name in sorted({name for of_node in versions.values() for name in of_node}):
        by_version: dict[str, list[str]] = {}
        for node, of_node in versions.items():
            by_version.setdefault(of_node.get(name, "not installed"), []).append(node)
        if len(by_version) > 1:
            told = "; ".join(f"{version} on {some(on)}" for version, on in sorted(by_version.items()))
            differing.append(f"{name}: {told}")
    if differing:
        advice = "let all nodes use one environment: SLIPSTREAM_VENV, or cluster.container"
        return wrong("versions", ". ".join(differing), advice)
    return Finding("versions", f"equal on {len(versions)} nodes")


def head_port(bound: Answers, node: str, port: int) -> Finding:
    """Return whether the first node can listen on the port of Ray's head."""
    if isinstance(bound[node], Unanswered):
        advice = (
            "another program listens there: leave out the node (--sbatch=--exclude=NODE), or submit again"
        )
        return wrong("port of Ray's head", f"{port} on {node}: {bound[node]}", advice)
    return Finding("port of Ray's head", f"{port} is free on {node}")


def pairs_of(met: Answers) -> Finding:
    """Return whether every node reaches every other one, and if not, who is cut off from whom."""
    reached = {
        (node, peer): isinstance(answer, dict) and isinstance(answer.get(peer), dict)
        for node, answer in met.items()
        for peer in met
        if peer != node
    }
    lost = [pair for pair, is_reached in reached.items() if not is_reached]
    if not lost:
        return Finding("connections", f"each of {len(met)} nodes reaches every other one")
    for node in met:
        others = [peer for peer in met if peer != node]
        if len(others) > 1 and not any(reached[peer, node] for peer in others):
            nobody = "" if any(reached[node, peer] for peer in others) else ", and it reaches nobody"
            return wrong("connections", f"nobody reaches {node}{nobody}", OPEN_PORTS)
    told = [
        f"{a} does not reach {b} ({_reason(met[a], b)})"
        + (", but is reached from there" if reached[b, a] else "")
        for a, b in lost
    ]
    return wrong("connections", some(told, "; "), OPEN_PORTS)


def _reason(answer: Any, peer: str) -> str:
    return str(answer.get(peer, "not tried") if isinstance(answer, dict) else answer)


def clocks_of(met: Answers) -> Finding:
    """Return whether the clocks of the nodes agree, as far as the round trips let it be seen."""
    off: dict[str, float] = {}
    seen: list[float] = []
    for answer in met.values():
        for peer, how in answer.items() if isinstance(answer, dict) else ():
            if isinstance(how, dict):
                seen.append(abs(how["offset"]))
                if abs(how["offset"]) - how["seconds"] / 2 > LARGEST_OFFSET_S:
                    off.setdefault(peer, 0.0)
                    off[peer] += 1
    if not seen:
        return Finding("clocks", "no node was reached to compare them", seen=False)
    if not off:
        return Finding("clocks", f"differ by {max(seen):.3f} s at most")
    most = max(off.values())
    worst = [node for node, times in off.items() if times == most]
    advice = "the site has to set it: `chronyc tracking` or `timedatectl` on the node"
    return wrong("clocks", f"{some(worst)}: off by up to {max(seen):.1f} s from the others", advice)


def links_of(rates: Mapping[tuple[str, str], Any]) -> Finding:
    """Return the rates between pairs of nodes, and the pairs that are much slower than the others."""
    failed = {pair: rate for pair, rate in rates.items() if not isinstance(rate, float)}
    if failed:
        told = [f"{a} to {b}: {why}" for (a, b), why in failed.items()]
        return wrong(
            "links",
            some(told, "; "),
            "connections are made, and data does not arrive: the MTU, or a firewall",
        )
    median = statistics.median(rates.values())
    slow = [f"{a} to {b}: {_rate(rate)}" for (a, b), rate in rates.items() if rate < median / SLOW_LINK]
    if slow:
        told = f"{some(slow, '; ')}, and half of all pairs have {_rate(median)} or more"
        return wrong(
            "links", told, "a cable, or another interface: compare cluster.network_interface on the nodes"
        )
    lowest, highest = min(rates.values()), max(rates.values())
    return Finding("links", f"{_rate(lowest)} to {_rate(highest)} for each of {len(rates)} pairs")


def reduced_by(answers: Answers) -> Finding:
    """Return how fast all nodes add up a tensor together."""
    if failed := _failed(answers):
        advice = "NCCL and gloo use another interface than these connections: set cluster.network_interface"
        return wrong("all-reduce", f"{failed}: {next(iter(_errors(answers)))}", advice)
    return Finding("all-reduce", f"{_rate(min(answers.values()))} for each node, of {REDUCE_BYTES >> 20} MiB")


def shared_by(answers: Answers, folder: Path) -> list[Finding]:
    """Return whether all nodes see the folder of runs, and whether locks keep them apart in it."""
    blind = [
        node for node, answer in answers.items() if isinstance(answer, Unanswered) or answer.get("unshared")
    ]
    if blind:
        told = f"{folder} is not the same folder on {some(blind)}"
        return [
            wrong("shared folder", told, "set run.root to a folder on a file system that all nodes share")
        ]
    shared = Finding("shared folder", f"all nodes see {folder}")
    bad = {node: answer["locks"] for node, answer in answers.items() if answer["locks"]}
    if bad:
        told = [f"{node}: {why}" for node, why in bad.items()]
        advice = (
            "mount it with locks (Lustre: -o flock; NFS: version 4), or set run.root to another file system"
        )
        return [shared, wrong("file locks", some(told, "; "), advice)]
    return [shared, Finding("file locks", f"keep {len(answers)} nodes apart")]


def disks_of(answers: Answers, folder: Path) -> Iterator[Finding]:
    """Yield the rate at which all nodes write together, into the folder of runs and to their own disks."""
    if failed := _failed(answers):
        yield wrong("disk", f"{failed}: {next(iter(_errors(answers)))}", "is it full, or read-only?")
        return
    together = len(answers) * min(answer["folder"] for answer in answers.values())
    told = f"{_rate(together)} of all nodes together into {folder}"
    if together < SLOW_DISK:
        yield wrong("shared disk", told, "checkpoints would take long: set run.root to a faster file system")
    else:
        yield Finding("shared disk", told, f"cluster.file_system_bytes_per_s: {together:.1e}")
    slow = [f"{node}: {_rate(a['local'])}" for node, a in answers.items() if a["local"] < SLOW_DISK]
    if slow:
        yield wrong("local disks", some(slow, "; "), "set cluster.node_disk to a faster disk of the nodes")
    else:
        yield Finding("local disks", f"{_rate(min(a['local'] for a in answers.values()))} or more")


def _errors(answers: Answers) -> dict[str, str]:
    """Return the reasons of those that have failed, the reasons that say most first."""
    failed = {str(answer): node for node, answer in answers.items() if isinstance(answer, Unanswered)}
    return dict(sorted(failed.items(), key=lambda item: item[0].startswith("no answer")))


def _failed(answers: Answers) -> str:
    return some([node for node, answer in answers.items() if isinstance(answer, Unanswered)])


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
