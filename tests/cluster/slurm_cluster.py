"""A real Slurm of several fake nodes on this one machine, for tests of what `sbatch` does.

    host
     └─ machine room: own net, pid, mount, uts, ipc namespaces; munged, slurmctld, a bridge 10.77.0.254
         ├─ node1: the same five namespaces again; slurmd; eth0 10.77.0.11; own /dev/shm
         └─ node2: ...                                        10.77.0.12

Everything else of the file system is shared, so the repository and the virtual environment have the same
path on every node, as on a cluster with a shared file system. The nodes reach each other and nothing outside.

No process can be left behind. Every process lives below the room's pid namespace, whose first process dies
with the Python process (thread) that built the cluster, even when that is killed with SIGKILL; the kernel
then kills the rest, and the interfaces go with the namespaces. Because interfaces and addresses exist only
inside the room, any number of clusters (two checkouts, two runs) can be up at once.

The daemons are the distribution's (Slurm 22.05 on Debian 12). What differs from a production cluster: no
cgroups, so no limit on CPU, memory or devices is enforced, and no accounting database. `proctrack/pgid` is
chosen because scancel then signals what `proctrack/cgroup` signals by default: a step's own task, and not
every process below it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

NEEDED_COMMANDS = (
    "slurmctld",
    "slurmd",
    "sbatch",
    "scontrol",
    "munged",
    "ip",
    "ss",
    "unshare",
    "nsenter",
    "setpriv",
)
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
SUBNET = "10.77.0"
CONTROLLER_IP = f"{SUBNET}.254"

CLIENT_TIMEOUT_S = 20.0
"""For one scontrol, sbatch or scancel: they answer in milliseconds, and hang when slurmctld is gone."""
UP_TIMEOUT_S = 30.0
"""Bring-up takes about half a second; the rest is for a loaded machine."""
POLL_S = 0.1
"""Slurm has no prompt event for "the job ended": `sbatch --wait` backs off for up to 20 s."""

TERMINAL_STATES = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
    | {"OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
FOLDER_PREFIX = "slipstream-slurm-"
"""Below /tmp, followed by the owner's pid: the path of munge's socket has to stay under 108 characters."""
SLURM_DAEMONS = frozenset({"slurmd", "slurmstepd"})

ROOM_SCRIPT = """
mount -t proc proc /proc
mount -t tmpfs tmpfs /run/netns
hostname slurmctl
ip link set lo up
ip link add br0 type bridge
ip addr add {controller_ip}/24 dev br0
ip link set br0 up
# Anything beyond the nodes is refused at once instead of being waited for.
echo 1 > /proc/sys/net/ipv4/ip_forward
ip route add unreachable default
echo ready > {base}/run/room
exec sleep infinity
"""

NODE_SCRIPT = """
mount -t proc proc /proc
mount -t tmpfs -o size={shm_bytes},mode=1777 tmpfs /dev/shm
mount --bind {base}/hosts /etc/hosts
mount --bind {base}/resolv.conf /etc/resolv.conf
hostname {name}
readlink /proc/self/ns/pid > {base}/run/{name}.pidns
slurmd -D -N {name} &
wait
"""

SLURM_CONF = """
ClusterName=fake
SlurmctldHost=slurmctl({controller_ip})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/run/munge.sock,cred_expire=5
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd.%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout={lost_after_s}
KillWait={kill_wait_s}
EnforcePartLimits=ALL
MinJobAge=3600
GresTypes=gpu
NodeName=node[1-{nodes}] NodeAddr={first_ip} CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1 \
RealMemory={memory_mb} {gres} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(RuntimeError):
    """The fake cluster could not be built or did not answer; a time-out's message holds the Slurm logs."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `exit_code` is the batch script's, `signal` what killed it (0: nothing did)."""

    job_id: int
    state: str
    exit_code: int
    signal: int
    reason: str
    output: str
    """What the job wrote to its --output file."""


@dataclass(frozen=True)
class NodeProcess:
    pid: int
    """As this machine numbers it, not as the node does."""
    name: str
    command: str


class SlurmCluster:
    """
    with SlurmCluster(nodes=2) as cluster:
        job = cluster.submit("train.sbatch", "recipe.yaml", nodes=2, gpus_per_node=0)
        assert cluster.wait(job, timeout_s=60).state == "COMPLETED"
        assert cluster.processes("node2") == []

    `gpus_per_node` fake GPUs are /dev/null: Slurm counts and hands them out, CUDA does not see them.
    `kill_wait_s` is what scancel leaves between SIGTERM and SIGKILL (30 on most clusters), `lost_after_s` how
    long a node may be silent before Slurm gives it up (300 on most).
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        cpus_per_node: int = 4,
        gpus_per_node: int = 0,
        memory_mb: int = 16_000,
        shm_bytes: int = 2 << 30,
        kill_wait_s: int = 10,
        lost_after_s: int = 10,
    ) -> None:
        self.node_ips = {f"node{i}": f"{SUBNET}.{10 + i}" for i in range(1, nodes + 1)}
        self.cpus_per_node = cpus_per_node
        self.gpus_per_node = gpus_per_node
        self.memory_mb = memory_mb
        self.shm_bytes = shm_bytes
        self.kill_wait_s = kill_wait_s
        self.lost_after_s = lost_after_s
        self._children: list[subprocess.Popen[bytes]] = []
        self._room_pid = 0
        self._base = Path()

    @staticmethod
    def unavailable() -> str:
        """Why this machine cannot run a cluster, and what to do about it; empty when it can."""
        path = f"{os.environ.get('PATH', '')}:{SBIN}"
        absent = [command for command in NEEDED_COMMANDS if not shutil.which(command, path=path)]
        if absent:
            return f"not installed: {', '.join(absent)}; run tests/cluster/install_slurm.sh"
        if os.geteuid() != 0:
            return "fake Slurm nodes are Linux namespaces, which only root may create: run the tests as root"
        return ""

    # ---- life cycle ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if reason := self.unavailable():
            raise ClusterError(reason)
        _remove_stale_folders()
        self._base = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir="/tmp"))
        try:
            self._write_files()
            self._open_room()
            self._start_in_room("munged", f"--foreground --force --num-threads=2 {self._munged_paths()}")
            self.wait_until("munged", lambda: (self._base / "run/munge.sock").exists())
            self._start_in_room("slurmctld", "-D -i -c")
            for name in self.node_ips:
                self.start_node(name)
            self.wait_until("all nodes to be idle", self._all_idle)
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def start_node(self, name: str) -> None:
        """Boot a node, for the first time or after `kill_node`."""
        (self._base / "spool" / name).mkdir(parents=True, exist_ok=True)
        (self._base / "run" / f"{name}.pidns").unlink(missing_ok=True)
        network = f"""
            set -e
            ip netns add {name}
            ip link add {name} type veth peer name eth0 netns {name}
            ip link set {name} master br0 up
            ip -n {name} link set lo up
            ip -n {name} addr add {self.node_ips[name]}/24 dev eth0
            ip -n {name} link set eth0 up
            ip -n {name} route add default via {CONTROLLER_IP}
        """
        self._client(*self._enter_room(), "bash", "-c", network)
        script = NODE_SCRIPT.format(base=self._base, name=name, shm_bytes=self.shm_bytes)
        boot = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts", "--ipc", "--pid"]
        self._spawn(name, *self._enter_room(), *boot, "--fork", "--kill-child", "bash", "-c", script)
        self.wait_until(f"{name} to boot", lambda: bool(self._pid_namespace(name)))

    def kill_node(self, name: str) -> None:
        """Power off: every process of the node dies at once, and its network is gone."""
        os.kill(self._first_pid(name), signal.SIGKILL)
        self.wait_until(f"{name} to be dead", lambda: not self._node_processes(name))
        # The interface first: with the namespace it would go too, but at some later time.
        for thing in ("link", "netns"):
            self._client(*self._enter_room(), "ip", thing, "delete", name)

    def link(self, name: str, state: str) -> None:
        """Pull the node's network cable out (`down`), or put it in again (`up`)."""
        self._client(*self._enter_room(), "ip", "link", "set", name, state)

    # ---- jobs ----------------------------------------------------------------------------------------------

    def submit(
        self,
        script: str | Path,
        *arguments: str,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        **options: object,
    ) -> int:
        """`sbatch [--option=value ...] script arguments...` from `cwd`, with `env` added to the environment.

        Option names are spelled with underscores; True gives a bare flag. Returns the job id.
        """
        flags = []
        for key, value in options.items():
            flag = "--" + key.replace("_", "-")
            flags.append(flag if value is True else f"{flag}={value}")
        command = ["sbatch", "--parsable", *flags, str(script), *arguments]
        out = self._client(*self._enter_network(), *command, cwd=cwd, env=env)
        return int(out.strip().split(";")[0])

    def wait(self, job_id: int, timeout_s: float) -> JobResult:
        """Wait until the job has ended *and* Slurm has confirmed that its steps are gone from every node."""
        self._await_job(job_id, "end", lambda: self.job(job_id)["JobState"] in TERMINAL_STATES, timeout_s)
        record = self.job(job_id)
        code, killed_by = record["ExitCode"].split(":")
        return JobResult(
            job_id=job_id,
            state=record["JobState"],
            exit_code=int(code),
            signal=int(killed_by),
            reason=record["Reason"],
            output=self.output(job_id),
        )

    def wait_for_output(self, job_id: int, text: str, timeout_s: float) -> None:
        """Wait until the job's --output file contains `text`; raises ClusterError if the job ends without."""

        def settled() -> bool:
            ended = self.job(job_id)["JobState"] in TERMINAL_STATES
            return text in self.output(job_id) or ended

        self._await_job(job_id, f"write {text!r}", settled, timeout_s)
        if text not in self.output(job_id):
            record = self.job(job_id)
            raise ClusterError(
                f"job {job_id} ended ({record['JobState']} {record['ExitCode']}) without writing {text!r}\n"
                f"---- its output ----\n{_tail(self._output_path(job_id), 100)}"
            )

    def job(self, job_id: int) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        return _fields(self.scontrol("--oneliner", "show", "job", str(job_id)))

    def output(self, job_id: int) -> str:
        """What the job has written to its --output file so far."""
        path = self._output_path(job_id)
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self, job_id: int, *options: str) -> None:
        """`scancel [options] JOB`, for example `cancel(job, "--batch", "--signal=TERM")`."""
        self._client(*self._enter_network(), "scancel", *options, str(job_id))

    def scontrol(self, *arguments: str) -> str:
        return self.login("scontrol", *arguments)

    def login(self, *command: str, timeout_s: float = CLIENT_TIMEOUT_S) -> str:
        """Output of a command run as on a login node; raises ClusterError if it fails."""
        return self._client(*self._enter_network(), *command, timeout_s=timeout_s)

    # ---- nodes ---------------------------------------------------------------------------------------------

    def run_on(self, name: str, *command: str, timeout_s: float = CLIENT_TIMEOUT_S) -> str:
        """Output of a command run on the node beside Slurm, as by ssh; raises ClusterError if it fails."""
        target = f"--target={self._first_pid(name)}"
        return self._client("nsenter", target, *NAMESPACES, *command, timeout_s=timeout_s)

    def processes(self, name: str) -> list[NodeProcess]:
        """What runs on the node besides its first process and Slurm's daemons; zombies count."""
        first = self._first_pid(name)
        return [p for p in self._node_processes(name) if p.pid != first and p.name not in SLURM_DAEMONS]

    def listening(self, name: str) -> list[tuple[str, str]]:
        """The (address, program) of every TCP socket on which the node listens, without Slurm's own."""
        sockets = []
        for line in self.run_on(name, "ss", "-ltnpH").splitlines():
            address = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            program = re.search(r'users:\(\("([^"]*)"', line)
            sockets.append((address, program[1] if program else "?"))
        return [socket for socket in sockets if socket[1] not in {*SLURM_DAEMONS, "srun"}]

    def logs(self) -> str:
        """The last lines of every daemon's log."""
        parts = [f"---- {path.name} ----\n{_tail(path)}" for path in sorted((self._base / "log").glob("*"))]
        return "\n".join(parts)

    # ---- inside --------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        base = self._base
        base.chmod(0o755)
        for folder in ("run", "log", "state", "spool", "dev"):
            (base / folder).mkdir()
        Path("/run/netns").mkdir(parents=True, exist_ok=True)
        key = base / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(64))
        hosts = ["127.0.0.1 localhost", f"{CONTROLLER_IP} slurmctl"]
        hosts += [f"{ip} {name}" for name, ip in self.node_ips.items()]
        (base / "hosts").write_text("\n".join(hosts) + "\n")
        (base / "resolv.conf").write_text("")
        (base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        gres = ""
        if self.gpus_per_node:
            gres = f"Gres=gpu:{self.gpus_per_node}"
            for i in range(self.gpus_per_node):
                (base / "dev" / f"nvidia{i}").symlink_to("/dev/null")
            # Slurm insists on device files, and sets CUDA_VISIBLE_DEVICES only with this flag or real NVML.
            devices = f"{base}/dev/nvidia[0-{self.gpus_per_node - 1}]"
            (base / "gres.conf").write_text(f"Name=gpu Flags=nvidia_gpu_env File={devices}\n")
        count = len(self.node_ips)
        conf = SLURM_CONF.format(
            base=base,
            controller_ip=CONTROLLER_IP,
            kill_wait_s=self.kill_wait_s,
            lost_after_s=self.lost_after_s,
            nodes=count,
            first_ip=f"{SUBNET}.[11-{10 + count}]",
            cpus=self.cpus_per_node,
            memory_mb=self.memory_mb,
            gres=gres,
        )
        (base / "slurm.conf").write_text(conf)

    def _munged_paths(self) -> str:
        run = self._base / "run"
        paths = {
            "key-file": self._base / "munge.key",
            "socket": run / "munge.sock",
            "pid-file": run / "munged.pid",
            "seed-file": run / "munge.seed",
            "log-file": self._base / "log/munged.log",
        }
        return " ".join(f"--{key}={path}" for key, path in paths.items())

    def _open_room(self) -> None:
        script = ROOM_SCRIPT.format(base=self._base, controller_ip=CONTROLLER_IP)
        build = ["setpriv", "--pdeathsig=KILL", "unshare", *NAMESPACES, "--fork", "--kill-child"]
        room = self._spawn("room", *build, "bash", "-ec", script)
        self.wait_until("the machine room", lambda: (self._base / "run/room").exists())
        children = Path(f"/proc/{room.pid}/task/{room.pid}/children").read_text().split()
        self._room_pid = int(children[0])

    def _enter_room(self) -> list[str]:
        return ["nsenter", f"--target={self._room_pid}", *NAMESPACES]

    def _enter_network(self) -> list[str]:
        """All that a client needs; it keeps the working directory and sees this machine's files."""
        return ["nsenter", f"--net=/proc/{self._room_pid}/ns/net"]

    def _start_in_room(self, daemon: str, arguments: str) -> None:
        self._spawn(daemon, *self._enter_room(), daemon, *arguments.split())

    def _spawn(self, log_name: str, *command: str) -> subprocess.Popen[bytes]:
        log: IO[bytes]
        with (self._base / "log" / f"{log_name}.out").open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def _client(
        self,
        *command: str,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> str:
        environment = self._environment() | (env or {})
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"no answer in {timeout_s:.0f} s: {' '.join(command)}\n{self.logs()}"
            ) from None
        if done.returncode:
            raise ClusterError(
                f"exit code {done.returncode}: {' '.join(command)}\n{done.stderr}{done.stdout}"
            )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        # A SLURM_ or SBATCH_ variable of an outer job would change what sbatch does here.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "RAY_"))}
        return kept | {"PATH": f"{kept.get('PATH', '')}:{SBIN}", "SLURM_CONF": str(self._base / "slurm.conf")}

    def _all_idle(self) -> bool:
        try:
            out = self._client(*self._enter_network(), "sinfo", "--noheader", "--format=%T %D", timeout_s=30)
        except ClusterError:  # slurmctld does not answer yet
            return False
        return out.split() == ["idle", str(len(self.node_ips))]

    def _output_path(self, job_id: int) -> Path:
        return Path(self.job(job_id)["StdOut"])

    def _pid_namespace(self, name: str) -> str:
        path = self._base / "run" / f"{name}.pidns"
        return path.read_text().strip() if path.exists() else ""

    def _node_processes(self, name: str) -> list[NodeProcess]:
        namespace = self._pid_namespace(name)
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns/pid") != namespace:
                    continue
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                found.append(NodeProcess(int(entry.name), (entry / "comm").read_text().strip(), command))
            except OSError:  # ended while we looked
                continue
        return found

    def _first_pid(self, name: str) -> int:
        """This machine's number for the node's process 1."""
        for process in self._node_processes(name):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            match = re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)
            if match and match[1] == "1":
                return process.pid
        raise ClusterError(f"{name} is down")

    def wait_until(self, what: str, happened: Callable[[], bool], timeout_s: float = UP_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {timeout_s:.0f} s for {what}\n{self.logs()}")
            time.sleep(POLL_S)

    def _await_job(self, job_id: int, what: str, happened: Callable[[], bool], timeout_s: float) -> None:
        try:
            self.wait_until(f"job {job_id} to {what}", happened, timeout_s)
        except ClusterError as error:
            record = self.job(job_id)
            raise ClusterError(
                f"{error}\n---- job {job_id}: {record['JobState']}, reason {record['Reason']} ----\n"
                f"{_tail(self._output_path(job_id), 100)}"
            ) from None

    def _tear_down(self) -> None:
        """Kill the room, hence all that is in it. The nsenter processes outside reap the daemons and end."""
        for child in self._children[:1]:
            child.kill()
        for child in self._children:
            try:
                child.wait(timeout=UP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
        self._children.clear()
        shutil.rmtree(self._base, ignore_errors=True)


def _remove_stale_folders() -> None:
    """A killed run leaves its folder; its processes are gone."""
    for folder in Path("/tmp").glob(f"{FOLDER_PREFIX}*"):
        owner = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _fields(record: str) -> dict[str, str]:
    """`A=1 B=two words C=` as scontrol prints it; a value may hold spaces, a key never does."""
    return {
        k: v.strip() for k, v in re.findall(r"(\w+(?::\w+)?)=(.*?)(?=\s+\w+(?::\w+)?=|\s*$)", record.strip())
    }


def _tail(path: Path, lines: int = 30) -> str:
    if not path.exists():
        return "(no such file)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def tree(processes: Sequence[NodeProcess]) -> str:
    """One line per process, for an assertion message."""
    return "\n".join(f"{p.pid} {p.name}: {p.command}" for p in processes)
