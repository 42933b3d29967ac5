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
from typing import Any

from slipstream.rollout.engine import cpu
from slipstream.rollout.engine.leftovers import kill_group, members, shared_memory_of, unlink


class EngineStartError(RuntimeError):
    """The server did not become healthy; the message ends with the tail of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """What decides a server's arguments."""

    model_path: Path
    dtype: str
    device: str
    """``cuda`` or ``cpu``."""
    tensor_parallel: int
    host: str
    port: int
    version: int
    """The policy version of the weights at model_path."""
    seed: int
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further ServerArgs, by field name."""
    shared_gpus: tuple[str, ...] = ()
    """Its GPUs, where others compute on them in turn; none: those of the process that starts it."""
    replica: "ReplicaSpec | None" = None


@dataclass(frozen=True)
class ReplicaSpec:
    """A copy of the weights beside the server."""

    mount: str
    """Import path of the function that adds its routes."""
    folder: str
    """Belongs to this server: what is in it before goes, and it goes with the server."""


def server_args(spec: ServerSpec) -> dict[str, Any]:
    """The fields of SGLang's ServerArgs: ours, over them the CPU's, over them the recipe's."""
    arguments: dict[str, Any] = {
        "model_path": str(spec.model_path),
        "dtype": spec.dtype,
        "device": spec.device,
        "tp_size": spec.tensor_parallel,
        "host": spec.host,
        "port": spec.port,
        "weight_version": str(spec.version),
        "random_seed": spec.seed,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,  # else every chunk of an answer repeats all before it
    }
    if spec.shared_gpus:
        # Its memory can be taken away then, and its weights wait on the host meanwhile.
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return arguments | (cpu.SERVER_ARGS if spec.device == "cpu" else {}) | dict(spec.args)


LAUNCHER = (sys.executable, "-m", "slipstream.rollout.engine.launch")
"""The server's program; its one further argument is JSON."""

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The server is a neighbour: an http_proxy of the environment would not reach it."""


class ServerProcess:
    """Owns the server's process group. ``stop`` on every exit path; ``launch`` covers the owner's death."""

    def __init__(self, spec: ServerSpec, log_path: Path, launcher: Sequence[str] = LAUNCHER) -> None:
        self.url = f"http://{spec.host}:{spec.port}"
        self._log_path = log_path
        self._leftovers: set[Path] = {Path(spec.replica.folder)} if spec.replica else set()
        unlink(self._leftovers)
        # SGLang never removes the sockets that it makes. A socket's path may have about 100 characters.
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

        # A thread of its own, not the loop's executor: that one is joined when a loop ends.
        self._exit: Future[int] = Future()
        threading.Thread(target=self._watch, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait for /health to answer 200. Raises EngineStartError, with the log's tail, when it will not."""
        deadline = time.monotonic() + timeout_s
        exited = asyncio.ensure_future(self.wait_exit())
        try:
            while time.monotonic() < deadline:
                # An answer while our server has ended is that of another server, which has taken the port.
                if await asyncio.to_thread(self._answers) and not exited.done():
                    self._leftovers |= shared_memory_of(members(self._process.pid))
                    return
                # SGLang announces its readiness nowhere but here, so it is asked; its exit is an event.
                done, _ = await asyncio.wait({exited}, timeout=0.25)
                if done:
                    code = exited.result()
                    raise EngineStartError(f"SGLang exited with code {code} while starting{self._tail()}")
        finally:
            exited.cancel()
        raise EngineStartError(f"SGLang was not healthy within {timeout_s:.0f} s{self._tail()}")

    async def wait_exit(self) -> int:
        """The exit code, once the server has ended."""
        return await asyncio.shield(asyncio.wrap_future(self._exit))

    def _watch(self) -> None:
        self._exit.set_result(self._process.wait())

    def stop(self) -> None:
        """End the whole process group at once; there is nothing to drain. Does nothing the second time.

        SGLang's own answer to SIGTERM takes seconds and ends in SIGKILL as well.
        """
        kill_group(self._process.pid, self._leftovers)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _answers(self) -> bool:
        try:
            with _DIRECTLY.open(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _tail(self, lines: int = 25) -> str:
        with self._log_path.open(errors="replace") as log:
            tail = "".join(deque(log, lines))
        return f"; the end of {self._log_path}:\n{tail}"
