"""One SGLang server as a child process: its arguments, start, health, end."""

import asyncio
import http.client
import json
import os
import select
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from slipstream.rollout.engine import adapters, cpu, toolchain
from slipstream.rollout.engine.adapters import AdapterServing
from slipstream.rollout.engine.launch import READY
from slipstream.rollout.engine.leftovers import announced, kill_group, members, shared_memory_of
from slipstream.rollout.system.garbage import kept_for_good
from slipstream.rollout.system.key import Key, new_key
from slipstream.rollout.system.log_thread import PipedLog
from slipstream.rollout.system.network import process_group_variables
from slipstream.rollout.system.stacks import FOLDER, showing, write_stacks
from slipstream.rollout.system.temporary import OwnedFolder


class EngineStartError(RuntimeError):
    """A server did not become healthy. The message ends with the tail of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """Everything that a server's arguments depend on."""

    model_path: Path
    dtype: str
    device: str
    """``cuda`` or ``cpu``."""
    tensor_parallel: int
    host: str
    port: int
    version: int
    """Policy version of the weights at ``model_path``."""
    seed: int
    data_parallel: int = 1
    expert_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1
    """Nodes of the engine, each of which has a server for its share of the ranks."""
    node: int = 0
    """Number of this server's node. The server of node 0 answers requests."""
    meeting: "MeetingPoint | None" = None
    """Meeting point of the ranks. Needed for several nodes and for data parallelism."""
    args: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further ServerArgs, by field name."""
    shared_gpus: tuple[str, ...] = ()
    """GPUs of the server, if the trainer has them too. Empty: those of its parent process."""
    rests: bool = False
    """The trainer takes turns on these GPUs: the server then releases their memory."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that the run sets for its engines."""
    replica: "ReplicaSpec | None" = None
    adapters: AdapterServing | None = None
    """Adapters of the policy that the server can load; None: it gets whole weights."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the server says of itself to a driver that has not started it."""
    label: str = "engine"
    """Part of the names of the server's temporary folders, for who finds one."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the engine, on all of its nodes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_here(self) -> range:
        """Ranks of the engine whose processes this server has."""
        share = self.ranks // self.nodes
        return range(self.node * share, (self.node + 1) * share)


@dataclass(frozen=True)
class MeetingPoint:
    """An address of an engine's first node, and the first of the ports that its ranks use there to meet."""

    address: str
    port: int


MEETING_PORTS = 14
"""Number of consecutive ports of a meeting point: that of the store of the process groups, and those that
SGLang derives from it for data-parallel attention, the last of which is that port + 13."""


@dataclass(frozen=True)
class ReplicaSpec:
    """A copy of the weights beside the server, which routes of the server can read and change."""

    mount: str
    """Import path of the function that adds these routes."""
    memory: str
    """Folder in which the server's own folder for the copy is made. That one goes when the server ends."""


@dataclass(frozen=True)
class ServerAccess:
    """Address and key with which a client sends requests to a running server."""

    url: str
    key: Key


def server_args(spec: ServerSpec) -> dict[str, object]:
    """Return fields of SGLang's ServerArgs: our own, overridden by those for a CPU, then by ``spec.args``.

    The recipe comes in with ``spec``, by ``backend.cluster.engine_spec``.
    """
    arguments: dict[str, object] = {
        "model_path": str(spec.model_path),
        "dtype": spec.dtype,
        "device": spec.device,
        "tp_size": spec.tensor_parallel,
        "host": spec.host,
        "port": spec.port,
        "weight_version": str(spec.version),
        "random_seed": spec.seed,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,  # else every chunk repeats all before it
    }
    if spec.data_parallel > 1:
        arguments |= {"dp_size": spec.data_parallel, "enable_dp_attention": True}
    if spec.expert_parallel > 1:
        arguments["ep_size"] = spec.expert_parallel
    if spec.pipeline_parallel > 1:
        arguments["pp_size"] = spec.pipeline_parallel
    if spec.nodes > 1:
        arguments |= {"nnodes": spec.nodes, "node_rank": spec.node}
    if spec.meeting is not None:
        arguments["dist_init_addr"] = f"{spec.meeting.address}:{spec.meeting.port}"
    if spec.rests:
        # Lets the server release its GPU memory; its weights wait on the host meanwhile.
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        # SGLang ends otherwise: its default, "breakable", cannot release the memory of graphs.
        arguments["cuda_graph_backend_prefill"] = "disabled"
    if spec.adapters is not None:
        arguments |= spec.adapters.server_args(spec.device)
    return arguments | (cpu.SERVER_ARGS if spec.device == "cpu" else {}) | dict(spec.args)


def _preparations(spec: ServerSpec) -> list[str]:
    """Return the import paths of what is done in the server's process before the server starts."""
    on_cpu = [cpu.PREPARE] if spec.device == "cpu" else []
    if spec.adapters is None:
        return on_cpu
    return [*on_cpu, *([cpu.PREPARE_ADAPTERS] if on_cpu else []), adapters.PREPARE]


LIVE_SERVER_ARGS: Mapping[str, object] = {
    "enable_priority_scheduling": True,  # a larger number goes first
    "default_priority_value": 0,  # of rollouts, which give none
    "retraction_policy": "priority",  # a full KV cache takes rollouts off the GPU before users
}
"""ServerArgs of engines that serve users beside rollouts. A waiting request with a priority that is larger by
more than ``priority_scheduling_preemption_threshold`` (10) takes the place of a running one, which is
retracted and goes on later. SGLang asserts that ``schedule_policy`` is ``fcfs`` or ``lof`` then."""

ROUTES_SERVER_ARGS: Mapping[str, object] = {"enable_return_routed_experts": True}
"""ServerArgs of engines that tell the experts of tokens."""

LAUNCHER = (sys.executable, "-m", "slipstream.rollout.engine.launch")
"""Command of the server's program, which takes one further argument: JSON."""

TEMPORARY = Path("/tmp")
"""Folder of SGLang's sockets, which it never removes. A socket's path has at most about 100 characters."""

KEYLESS = ("SGLANG_GRPC_PORT", "SGLANG_RUST_SERVER")
"""Environment variables with which SGLang would serve requests that its key does not protect."""

WITHOUT_DIAGNOSIS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Let a server that has lost a process end at once. SGLang's diagnosis takes 66 seconds, in which requests
hang; a user who wants it sets these variables."""

SGLANGS_OWN = "sglang::"
"""Begins the title of the processes of schedulers, of the detokenizer and of the controller."""

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the http_proxy of the environment, which does not reach servers of this cluster."""


COMPILATION_S = 1800.0
"""Seconds that an engine may take beyond its time-out while it compiles kernels, as the first engine on a
machine does. DeepGEMM's take minutes."""

LOG_S = 2.0
"""Longest wait for the disk to take the end of a server's log."""

BETWEEN_COMPILERS_S = 60.0
"""Longest time between two compilers, in which a server loads one kernel and prepares the next one."""


@dataclass
class StartTime:
    """The time that a start may take. It has no clock of its own."""

    timeout_s: float
    began: float
    compiled: float | None = None
    """When a compiler was last seen; None: never."""

    def goes_on(self, now: float, compiles: Callable[[], bool]) -> bool:
        """True until the time is over. ``compiles`` says whether a compiler runs, and is asked after that."""
        over = now - self.began - self.timeout_s
        if over < 0:
            return True
        if over >= COMPILATION_S:
            return False
        if compiles():
            self.compiled = now
        return self.compiled is not None and now - self.compiled < BETWEEN_COMPILERS_S


class ServerProcess:
    """Owns a server's process group. Call ``stop`` on every exit path; ``launch.py`` covers a dead owner."""

    def __init__(self, spec: ServerSpec, log_path: Path, launcher: Sequence[str] = LAUNCHER) -> None:
        # A key for each start: a request to a server that is gone may reach another program on its port.
        self.access = ServerAccess(f"http://{spec.host}:{spec.port}", new_key())
        self._address = (spec.host, spec.port)
        self._answers_requests = spec.node == 0
        self._watches_processes = spec.node > 0 or spec.data_parallel > 1
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log_path
        self._log = PipedLog(log_path)
        self.stacks = log_path.parent / FOLDER / f"{log_path.stem}.txt"
        """File of the stacks of the server's processes."""
        self._temporary = OwnedFolder(TEMPORARY, spec.label)
        self._folders = [self._temporary]
        replica = None
        if spec.replica:
            self._folders.append(OwnedFolder(Path(spec.replica.memory), spec.label))
            replica = {
                "mount": spec.replica.mount,
                "folder": str(self._folders[-1].path),
                "model": str(spec.model_path),
            }
        self._shared_memory: set[Path] = set()
        arguments = {
            "server": server_args(spec),
            "prepare": _preparations(spec),
            "replica": replica,
            "meeting": None if spec.meeting is None else asdict(spec.meeting),
            "temporary": str(self._temporary.path),
            "facts": dict(spec.facts),
        }
        try:
            self._process = subprocess.Popen(
                [*launcher, json.dumps(arguments)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=self._log.descriptor,
                stderr=subprocess.STDOUT,
                env=_environment(spec),
                start_new_session=True,
            )
        finally:
            self._log.begins()
        self._send_key()

        # Not in the event loop's executor, whose threads are joined when the loop ends.
        self._exit: Future[int] = Future()
        threading.Thread(
            target=lambda: self._exit.set_result(self._process.wait()), name="engine-exit", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until /health returns 200, or, on a node that is not the first, until the ranks are ready.

        A server that compiles kernels when the time is over has ``COMPILATION_S`` more. Raises
        EngineStartError if that takes too long, or if the server ends.
        """
        start = StartTime(timeout_s, time.monotonic())
        exited = asyncio.ensure_future(self.wait_exit())
        try:
            while start.goes_on(
                time.monotonic(), lambda: any(map(toolchain.compiles, members(self._process.pid)))
            ):
                if await asyncio.to_thread(self._is_healthy):
                    processes = members(self._process.pid)
                    self._shared_memory |= shared_memory_of(processes)
                    if self._watches_processes:
                        self._end_with_first(processes)
                    return
                # SGLang does not announce that it is ready, so it is asked; its exit is an event.
                done, _ = await asyncio.wait({exited}, timeout=0.25)
                if done:
                    code = exited.result()
                    raise EngineStartError(f"SGLang exited with code {code} while starting{self._tail()}")
        finally:
            exited.cancel()
        raise EngineStartError(f"SGLang was not healthy within {timeout_s:.0f} s{self._tail()}")

    async def wait_exit(self) -> int:
        """Wait until the server has ended, and return its exit code."""
        return await asyncio.shield(asyncio.wrap_future(self._exit))

    def write_stacks(self) -> list[str]:
        """Let the server's processes write their stacks. Return who has not, and why."""
        names = {pid: _title(pid) for pid in showing(members(self._process.pid))}
        silent = write_stacks({pid: (name, self.stacks) for pid, name in names.items()})
        return [f"{names[pid]} (process {pid}) {why}" for pid, why in silent.items()]

    def stop(self) -> None:
        """Kill the whole process group; there is nothing to drain. Does nothing the second time.

        SGLang's own handling of SIGTERM takes seconds and ends in SIGKILL as well.
        """
        kill_group(self._process.pid, self._shared_memory | announced(self._temporary.path))
        self._process.wait()
        self._log.flush(LOG_S, ended=True)
        for folder in self._folders:
            folder.remove()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _send_key(self) -> None:
        """Give the server its key by its standard input. Other users can read a command line."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is noticed elsewhere
            self._process.stdin.write(f"{self.access.key}\n".encode())

    def _end_with_first(self, processes: Sequence[int]) -> None:
        """End the server as soon as any of SGLang's processes among ``processes`` ends.

        SGLang does so itself only for the processes that the server of the first node has started: not on the
        other nodes, and not for those of its controller of data parallelism.
        """
        watched = [self._process.pid, *filter(lambda pid: _title(pid).startswith(SGLANGS_OWN), processes)]
        descriptors: list[int] = []
        try:
            for pid in watched:
                descriptors.append(os.pidfd_open(pid))
        except ProcessLookupError:  # it has ended already
            for descriptor in descriptors:
                os.close(descriptor)
            kill_group(self._process.pid)
            return
        ends = select.poll()
        for descriptor in descriptors:
            ends.register(descriptor, select.POLLIN)

        def wait() -> None:
            ended = {descriptor for descriptor, _ in ends.poll()}
            for descriptor in descriptors:
                os.close(descriptor)
            if descriptors[0] not in ended:
                kill_group(self._process.pid)

        threading.Thread(target=wait, name="engine-processes", daemon=True).start()

    def _is_healthy(self) -> bool:
        if not self._answers_requests:
            return (self._temporary.path / READY).exists()
        # Another program that has taken the port must not see the key.
        if not self._listens():
            return False
        request = urllib.request.Request(
            f"{self.access.url}/health", headers={"Authorization": self.access.key.header}
        )
        try:
            with _DIRECTLY.open(request, timeout=5) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _listens(self) -> bool:
        """True if it is a process of this server that listens on the server's port."""
        for pid in members(self._process.pid):
            with suppress(psutil.Error):  # processes come and go
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr == self._address:
                        return True
        return False

    def _tail(self, lines: int = 25) -> str:
        self._log.flush(LOG_S, ended=self._exit.done())
        with self._log_path.open(errors="replace") as log:
            tail = "".join(deque(log, lines))
        return f"; the end of {self._log_path}:\n{tail}"


def _title(pid: int) -> str:
    """Return what SGLang calls a process; ``the server`` for the one that serves HTTP."""
    with suppress(OSError):  # processes come and go
        title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0].strip()
        if title.startswith(SGLANGS_OWN):
            return title
    return "the server"


def environment_without_gpu() -> dict[str, str]:
    """Return the additional variables of a process that imports SGLang and runs nothing on a GPU."""
    return cpu.environment(1)


def let_import_sglang() -> None:
    """Let this process import SGLang, for good. It runs nothing on a GPU, and compiles nothing."""
    variables = environment_without_gpu()
    folders = variables.pop("PYTHONPATH").split(os.pathsep)
    os.environ |= variables
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


@contextmanager
def importing_sglang() -> Iterator[None]:
    """Let this process import SGLang inside the block; what it starts later sees nothing of that."""
    variables, path = dict(os.environ), list(sys.path)
    let_import_sglang()
    try:
        with kept_for_good():
            yield
    finally:
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        sys.path[:] = path


def _environment(spec: ServerSpec) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in KEYLESS}
    environment = WITHOUT_DIAGNOSIS | environment | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else a paused engine looks dead
    environment |= process_group_variables(spec.host) | {"SGLANG_HOST_IP": spec.host}
    if spec.device == "cuda":
        environment |= toolchain.engine_variables(environment)
    environment |= spec.environment
    if spec.shared_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.shared_gpus)
    if spec.device == "cpu":
        environment |= cpu.environment(spec.ranks, spec.ranks_here)
        environment = cpu.without_other_models(spec.model_path) | environment
    paths = [str(cpu.STAND_INS / "hidden"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
