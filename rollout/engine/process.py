"""One SGLang server as a child process: its arguments, start, health, end."""

import asyncio
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slipstream.rollout.engine import cpu
from slipstream.rollout.engine.leftovers import kill_group, members, shared_memory_of, unlink


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
    args: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further ServerArgs, by field name."""
    shared_gpus: tuple[str, ...] = ()
    """GPUs of the server, if it takes turns on them with the trainer. Empty: those of its parent process."""
    replica: "ReplicaSpec | None" = None


@dataclass(frozen=True)
class ReplicaSpec:
    """A copy of the weights beside the server, which routes of the server can read and change."""

    mount: str
    """Import path of the function that adds these routes."""
    folder: str
    """Folder of the copy. It belongs to this server: it is emptied at the start and removed at the end."""


def server_args(spec: ServerSpec) -> dict[str, object]:
    """Return fields of SGLang's ServerArgs: our own, overridden by those for a CPU, then by ``spec.args``."""
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
    if spec.shared_gpus:
        # Lets the server release its GPU memory; its weights wait on the host meanwhile.
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments | (cpu.SERVER_ARGS if spec.device == "cpu" else {}) | dict(spec.args)


LAUNCHER = (sys.executable, "-m", "slipstream.rollout.engine.launch")
"""Command of the server's program, which takes one further argument: JSON."""

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the http_proxy of the environment, which does not reach servers of this cluster."""


class ServerProcess:
    """Owns a server's process group. Call ``stop`` on every exit path; ``launch.py`` covers a dead owner."""

    def __init__(self, spec: ServerSpec, log_path: Path, launcher: Sequence[str] = LAUNCHER) -> None:
        self.url = f"http://{spec.host}:{spec.port}"
        self._log_path = log_path
        self._leftovers: set[Path] = {Path(spec.replica.folder)} if spec.replica else set()
        unlink(self._leftovers)
        # SGLang never removes its sockets. The folder is in /tmp because a socket's path has at most about
        # 100 characters.
        temporary = tempfile.mkdtemp(prefix="slipstream-engine-", dir="/tmp")
        self._leftovers.add(Path(temporary))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else a paused engine looks dead
        if spec.shared_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.shared_gpus)
        if spec.device == "cpu":
            environment |= cpu.environment(spec.tensor_parallel)
        replica = asdict(spec.replica) if spec.replica else None
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *launcher,
                    json.dumps({"server": server_args(spec), "replica": replica, "temporary": temporary}),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

        # Not in the event loop's executor, whose threads are joined when the loop ends.
        self._exit: Future[int] = Future()
        threading.Thread(target=self._watch, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until /health returns 200. Raises EngineStartError if it does not, or the server ends."""
        deadline = time.monotonic() + timeout_s
        exited = asyncio.ensure_future(self.wait_exit())
        try:
            while time.monotonic() < deadline:
                # If the server has ended, the reply came from another server that has taken the port.
                if await asyncio.to_thread(self._is_healthy) and not exited.done():
                    self._leftovers |= shared_memory_of(members(self._process.pid))
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

    def _watch(self) -> None:
        self._exit.set_result(self._process.wait())

    def stop(self) -> None:
        """Kill the whole process group; there is nothing to drain. Does nothing the second time.

        SGLang's own handling of SIGTERM takes seconds and ends in SIGKILL as well.
        """
        kill_group(self._process.pid, self._leftovers)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _is_healthy(self) -> bool:
        try:
            with _DIRECTLY.open(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _tail(self, lines: int = 25) -> str:
        with self._log_path.open(errors="replace") as log:
            tail = "".join(deque(log, lines))
        return f"; the end of {self._log_path}:\n{tail}"
