"""The Ray actor that owns one SGLang server."""

import asyncio
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.rollout.engine.process import ReplicaSpec, ServerProcess, ServerSpec

FIRST_PORT = 20_000
"""Ray takes those from 10,002 on for its workers."""


def free_port(host: str) -> int:
    """A TCP port that is free on an address of this machine now, and likely to be so in a while.

    A server binds its port only after seconds of starting. So it is not one of those that the kernel gives
    to connections and to whoever asks for any port meanwhile.
    """
    kernels, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    # The seeds of a run make all ranks draw alike; these numbers must differ.
    ports = random.SystemRandom().sample(range(FIRST_PORT, max(int(kernels), FIRST_PORT + 1000)), 100)
    for port in [*ports, 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return probe.getsockname()[1]
    raise OSError(f"no TCP port is free on {host}")


class EngineActor:
    """Starts, watches and ends one server. Made on the node, and with the GPUs, that it serves from."""

    def __init__(
        self,
        *,
        name: str,
        model_path: str,
        dtype: str,
        device: str,
        tensor_parallel: int,
        seed: int,
        args: Mapping[str, Any],
        log_folder: str,
        loopback: bool,
        start_timeout_s: float,
        shared_gpus: Sequence[str] = (),
        replica: ReplicaSpec | None = None,
    ) -> None:
        import ray

        self._name = name
        self._host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._log_path = Path(log_folder) / f"{name}.log"
        self._start_timeout_s = start_timeout_s
        self._settings = {
            "model_path": Path(model_path),
            "dtype": dtype,
            "device": device,
            "tensor_parallel": tensor_parallel,
            "seed": seed,
            "args": args,
            "shared_gpus": tuple(shared_gpus),
            "replica": replica,
        }
        self._server: ServerProcess | None = None

    async def start(self, version: int) -> str:
        """Start (again) from model_path, whose weights are ``version``; the server's URL once it is healthy.

        Raises EngineStartError.
        """
        await self.stop()
        spec = ServerSpec(host=self._host, port=free_port(self._host), version=version, **self._settings)
        self._server = ServerProcess(spec, self._log_path)
        try:
            await self._server.wait_healthy(self._start_timeout_s)
        except BaseException:
            await self.stop()
            raise
        return self._server.url

    async def wait_exit(self) -> int:
        """Returns the exit code when the server has ended, however that came."""
        if self._server is None:
            raise RuntimeError(f"{self._name} was never started")
        return await self._server.wait_exit()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.stop)
