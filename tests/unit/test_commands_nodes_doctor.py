"""``slipstream doctor --nodes``: real probes on this machine, with one planted fault each."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.backend.commands import nodes_doctor
from slipstream.backend.commands.doctor import Finding
from slipstream.backend.commands.node_probe import Probe, installed
from slipstream.backend.commands.nodes_doctor import (
    PROBE,
    Nodes,
    Unanswered,
    examine_nodes,
    in_container,
)
from slipstream.configs.schema.cluster import ContainerConfig
from tests.environment import environment
from tests.unit.test_commands_gpu_doctor import MadeUp

NAMES = ("node1", "node2", "node3")
IMAGE = "/images/slipstream.sif"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"


SCONTROL = """case "$*" in
*hostnames*) echo node1; echo node2 ;;
*) for name; do :; done; echo "NodeName=$name NodeAddr=a-$name NodeHostName=x-$name" ;;
esac"""
"""A program that answers for Slurm."""


def node(
    name: str,
    *without: str,
    variables: dict[str, str] | None = None,
    locked: str = "unlimited",
    shared_memory: int = 64 * 2**30,
    **files: str,
) -> MadeUp:
    """A node of 8 GPUs in a container, without the files that begin with ``without``."""
    sound = {
        **MadeUp().files,
        **{f"/dev/nvidia{gpu}": "" for gpu in range(8)},
        "/dev/nvidiactl": "",
        "/proc/sys/kernel/hostname": f"{name}\n",
        "/proc/self/limits": f"{LIMITS}Max locked memory         {locked:<20} {locked:<20} bytes     \n",
    }
    seen = {path: text for path, text in sound.items() if not path.startswith(without)} if without else sound
    given = {"APPTAINER_CONTAINER": IMAGE, "SLURM_GPUS_ON_NODE": "8"} if variables is None else variables
    return MadeUp(variables=given, files=seen | files, shared_memory=shared_memory)


class Here(Nodes):
    """Probes in threads of this process, so that a test can plant a fault in one of them."""

    def __init__(self, probes: dict[str, Probe]) -> None:
        self.names = list(probes)
        self.probes = probes
        self.asked: list[str] = []

    def ask(self, do: str, timeout_s: float, **given: Any) -> dict[str, Any]:
        self.asked.append(do)
        answers: dict[str, Any] = {}

        def one(name: str) -> None:
            try:
                # As over the pipes: what is no JSON would fail there.
                question = json.loads(json.dumps({"do": do, **given}))
                answers[name] = json.loads(json.dumps(self.probes[name].answer(question)))
            except Exception as error:
                answers[name] = Unanswered(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=one, args=(name,)) for name in self.names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def close(self) -> None:
        for probe in self.probes.values():
            probe.close()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes nodes, of which ``faults`` has the arguments of some."""
    monkeypatch.setattr(nodes_doctor, "STREAM_BYTES", 2**20)
    monkeypatch.setattr(nodes_doctor, "WRITE_BYTES", 2**20)
    monkeypatch.setattr(nodes_doctor, "SLOW_DISK", 1.0)  # the machine may be busy
    monkeypatch.setattr(nodes_doctor, "SLOW_LINK", 1e12)
    made: list[Here] = []

    def make(faults: dict[str, dict[str, Any]] | None = None, classes: dict[str, type[Probe]] | None = None):
        probes = {}
        for name in NAMES:
            given = {"folder": tmp_path, "local_disk": tmp_path, "machine": node(name)}
            given |= (faults or {}).get(name, {})
            probes[name] = (classes or {}).get(name, ThreadProbe)(name, "127.0.0.1", **given)
        made.append(Here(probes))
        return made[-1]

    yield make
    for each in made:
        each.close()


class ThreadProbe(Probe):
    """One process has one process group, and one set of fcntl's locks: the test of whole probes has more."""

    calls = (fcntl.flock,)  # type: ignore[assignment]

    def do_reduce(self, **given: object) -> object:
        return 1e9

    def do_load(self) -> object:
        return None


def wrong(nodes: Here, folder: Path, port: int = 0) -> list[Finding]:
    return [finding for finding in examine_nodes(nodes, folder, port) if finding.wrong]


def test_sound_nodes_have_no_fault_and_leave_nothing_behind(nodes, tmp_path: Path):
    found = list(examine_nodes(nodes(), tmp_path, 0))
    assert not [finding for finding in found if finding.wrong]
    assert [finding.what for finding in found] == [
        "versions",
        *("container", "host names", "GPUs", "RDMA", "locked memory", "/dev/shm"),
        *("port of Ray's head", "connections", "clocks", "links", "all-reduce"),
        *("shared folder", "file locks", "shared disk", "local disks"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_another_version_is_named_with_its_node(nodes, tmp_path: Path):
    (found,) = wrong(nodes({"node2": {"versions": lambda: installed() | {"torch": "1.0"}}}), tmp_path)
    assert found.what == "versions" and "torch: 1.0 on node2; " in found.state
    assert "SLIPSTREAM_VENV" in found.advice


@pytest.mark.parametrize(
    ("machine", "what", "state", "advice"),
    [
        (
            node("node2", variables={"SLURM_GPUS_ON_NODE": "8"}),
            "container",
            "none on node2",
            "container.image",
        ),
        (
            node(
                "node2", variables={"SLIPSTREAM_CONTAINER": "pyxis", "SLIPSTREAM_CONTAINER_IMAGE": "/x.sqsh"}
            ),
            "container",
            "/x.sqsh on node2",
            "container.image",
        ),
        (node("node1"), "host names", "node2 is called node1, node2 expected", "NodeHostname"),
        (node("node2", "/dev/nvidia"), "GPUs", "node2: 0 of 8", "98-nvidia.sh"),
        (
            node(
                "node2",
                "/dev/nvidia7",
                variables={"APPTAINER_CONTAINER": IMAGE, "SLIPSTREAM_GPUS_PER_NODE": "8"},
            ),
            "GPUs",
            "node2: 7 of 8 that Slurm",
            "98-nvidia.sh",
        ),
        (node("node2", "/dev/infiniband"), "RDMA", "not there on node2", "cluster.container.mounts"),
        (node("node2", "/sys/class/infiniband"), "RDMA", "no port with a link on node2", "NCCL_IB_DISABLE"),
        (node("node2", locked="8388608"), "locked memory", "node2: 8.0 MiB", "--sbatch=--propagate=NONE"),
        (node("node2", shared_memory=64 * 2**20), "/dev/shm", "node2: 0.1 GiB, 8.0 GiB expected", "/dev/shm"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_a_container_or_a_limit_keeps_from_a_node_is_told(
    nodes, tmp_path: Path, machine, what, state, advice
):
    (found,) = wrong(nodes({"node2": {"machine": machine}}), tmp_path)
    assert found.what == what and state in found.state and advice in found.advice


def test_nodes_without_gpus_adapters_and_a_container_lack_nothing(nodes, tmp_path: Path):
    bare = {
        name: {"machine": node(name, "/dev/", "/sys/", variables={}, locked="65536", shared_memory=2**30)}
        for name in NAMES
    }
    found = {finding.what: finding for finding in examine_nodes(nodes(bare), tmp_path, 0)}
    assert not [finding for finding in found.values() if finding.wrong]
    assert found["container"].state == "none"
    assert found["locked memory"].advice == "enough without RDMA"


def test_host_names_are_compared_with_those_that_slurm_knows(nodes, tmp_path: Path):
    made = nodes()
    made.hosts = {"node1": "node1.site", "node2": "rack-7", "node3": "node3"}
    (found,) = wrong(made, tmp_path)
    assert found.state == "node2 is called node2, rack-7 expected"


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_probes_start_in_the_container_of_the_sites_jobs(runtime):
    container = ContainerConfig(runtime=runtime, image=IMAGE, mounts=["/data", "/a:/b"])
    options, inside = in_container(container, ["/here", "/runs", "/here"])
    mounts = "/here:/here,/runs:/runs,/data:/data,/a:/b"
    if runtime == "pyxis":
        assert options == [
            f"--container-image={IMAGE}",
            f"--container-mounts={mounts}",
            "--container-workdir=/here",
        ]
    else:
        assert options == []
        assert inside[:-2] == ["apptainer", "exec", "--nv", "--pwd", "/here", "--bind", mounts, IMAGE]
    assert inside[-2:] == ["python3", "-P"]
    assert in_container(None, ["/here"]) == ([], [sys.executable])


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_clock_that_is_off_is_that_of_the_one_node(nodes, tmp_path: Path, off_s: float):
    import time

    (found,) = wrong(nodes({"node3": {"clock": lambda: time.time() + off_s}}), tmp_path)
    assert found.what == "clocks" and found.state.startswith("node3: off by up to 3600.")


class Unreachable(ThreadProbe):
    """A node whose port is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self._port = unused.getsockname()[1]

    def do_hello(self) -> object:
        answer: dict[str, Any] = super().do_hello()  # type: ignore[assignment]
        return answer | {"address": ["127.0.0.1", self._port]}


def test_a_closed_port_is_that_of_the_node_that_nobody_reaches(nodes, tmp_path: Path):
    (found,) = wrong(nodes(classes={"node2": Unreachable}), tmp_path)
    assert (found.what, found.state) == ("connections", "nobody reaches node2")
    assert "cluster.network_interface" in found.advice


class OneWay(ThreadProbe):
    """A node that cannot reach node3, as behind a firewall that lets answers through."""

    def do_meet(self, peers: Any) -> object:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            return super().do_meet({**peers, "node3": unused.getsockname()})


def test_a_link_of_one_way_is_told_with_its_direction(nodes, tmp_path: Path):
    (found,) = wrong(nodes(classes={"node1": OneWay}), tmp_path)
    assert found.state.startswith("node1 does not reach node3 (")
    assert "refused" in found.state and found.state.endswith("), but is reached from there")


def test_a_folder_that_a_node_does_not_share_is_told_before_its_locks(nodes, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (found,) = wrong(nodes({"node2": {"folder": tmp_path / "other"}}), tmp_path)
    assert found.what == "shared folder" and "not the same folder on node2" in found.state
    assert "run.root" in found.advice


def test_locks_that_a_file_system_refuses_are_told(nodes, tmp_path: Path):
    (found,) = wrong(nodes({"node1": {"locks": lambda folder: "flock: not supported"}}), tmp_path)
    assert (found.what, found.state) == ("file locks", "node1: flock: not supported")
    assert "flock" in found.advice


class Unlocked(ThreadProbe):
    """The first node on a file system whose locks hold on one node alone."""

    def do_mark(self, first: str, text: str) -> object:
        super().do_mark(first, text)
        self._held.close()
        return None


def test_locks_that_do_not_reach_other_nodes_are_told(nodes, tmp_path: Path):
    (found,) = wrong(nodes(classes={"node1": Unlocked}), tmp_path)
    assert found.what == "file locks" and "granted although node1 holds it" in found.state


def test_a_slow_file_system_and_a_slow_disk_are_told_apart(nodes, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(nodes_doctor, "SLOW_DISK", 1e15)
    shared, local = wrong(nodes(), tmp_path)
    assert (shared.what, local.what) == ("shared disk", "local disks")
    assert "run.root" in shared.advice and "cluster.node_disk" in local.advice


def test_a_folder_that_cannot_be_written_is_told(nodes, tmp_path: Path):
    (found,) = wrong(nodes({name: {"folder": tmp_path / "none"} for name in NAMES}), tmp_path / "none")
    assert found.what == "shared folder" and "No such file" in found.state


def test_a_port_that_another_program_has_is_told(nodes, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = wrong(nodes(), tmp_path, port)
    assert found.what == "port of Ray's head" and f"{port} on node1" in found.state


@pytest.mark.parametrize(
    ("finding", "state"),
    [
        (nodes_doctor.links_of({("a", "b"): 1e9, ("b", "c"): 1e9, ("c", "a"): 1e8}), "c to a: 0.10 GB/s"),
        (nodes_doctor.links_of({("a", "b"): 1e9, ("b", "a"): Unanswered("timed out")}), "b to a: timed out"),
        (nodes_doctor.reduced_by({"a": 1e9, "b": Unanswered("Connection refused")}), "b: Connection refused"),
        (
            nodes_doctor.pairs_of({"a": {"b": {}}, "b": Unanswered("no answer")}),
            "b does not reach a (no answer), but is",
        ),
    ],
)
def test_what_is_slow_or_fails_is_named(finding: Finding, state: str):
    assert finding.wrong and finding.state.startswith(state), finding


@pytest.mark.timeout(600)
def test_whole_probes_answer_over_their_pipes_and_add_up_tensors(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(nodes_doctor, "STREAM_BYTES", 2**20)
    monkeypatch.setattr(nodes_doctor, "HELLO_S", 240.0)
    names = NAMES[:2]
    variables = ["env", *(f"{name}={value}" for name, value in environment().items())]
    commands = [
        [*variables, f"SLURMD_NODENAME={name}", sys.executable, "-m", PROBE, str(tmp_path), str(tmp_path)]
        + [f"{each}=127.0.0.1" for each in names]
        for name in names
    ]
    started = Nodes(names, commands)
    try:
        found = {finding.what: finding for finding in examine_nodes(started, tmp_path, 0)}
    finally:
        started.close()
    assert not found["connections"].wrong and not found["file locks"].wrong, found
    assert not found["all-reduce"].wrong and "for each node" in found["all-reduce"].state, found
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_does_not_start_is_named(tmp_path: Path):
    started = Nodes(NAMES[:2], [["false"]])
    started.start_s = 1e6  # srun has ended, so nothing waits as long
    try:
        (found,) = examine_nodes(started, tmp_path, 0)
    finally:
        started.close()
    assert found.wrong and found.state == "not started on node1, node2"


def commands_in(folder: Path, **scripts: str) -> str:
    """Write programs into a folder, and return a PATH on which they come first."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_probes_of_an_allocation_know_their_container_and_slurms_host_names(tmp_path: Path, monkeypatch):
    told = f'echo "$SLIPSTREAM_CONTAINER_IMAGE $*" >{tmp_path}/told'
    path = commands_in(tmp_path, scontrol=SCONTROL, srun=told)
    monkeypatch.setenv("PATH", path)
    variables = dict(os.environ) | {"SLURM_JOB_NODELIST": "node[1-2]"}
    started = nodes_doctor.allocated(
        2, tmp_path, variables, ContainerConfig(runtime="apptainer", image=IMAGE)
    )
    started.close()
    assert started.hosts == {"node1": "x-node1", "node2": "x-node2"}
    words = (tmp_path / "told").read_text().split()
    assert words[0] == IMAGE and "apptainer" in words and "node2=a-node2" in words


def doctor(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "slipstream.backend.cli", "doctor", *arguments],
        env=environment(NO_COLOR="1", **variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_doctor_of_nodes_follows_the_site(tmp_path: Path):
    (tmp_path / "site.yaml").write_text("{node_disk: /scratch, network_interface: ib0, gres: none}")
    path = commands_in(
        tmp_path,
        scontrol=SCONTROL,
        srun=f'echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $SLIPSTREAM_GPUS_PER_NODE $*" >{tmp_path}/told',
    )
    site = str(tmp_path / "site.yaml")
    doctor("--nodes", "2", SLURM_JOB_NODELIST="node[1-2]", PATH=path, SLIPSTREAM_SITE=site)
    words = (tmp_path / "told").read_text().split()
    assert words[:3] == ["=ib0", "ib0", "8"] and words[words.index("node1=a-node1") - 1] == "/scratch"


def test_without_an_allocation_it_says_how_to_get_one():
    ended = doctor("--nodes", "4", SLURM_JOB_NODELIST="")
    assert ended.returncode == 2 and "salloc --nodes=4" in ended.stderr


@pytest.mark.parametrize("count", ["1", "0", "5"])
def test_more_nodes_than_there_are_is_wrong_input(tmp_path: Path, count: str):
    path = commands_in(tmp_path, srun="", scontrol=SCONTROL)
    ended = doctor("--nodes", count, SLURM_JOB_NODELIST="node[1-2]", PATH=path)
    assert ended.returncode == 2 and "from 2 to the allocation's 2 nodes expected" in ended.stderr
