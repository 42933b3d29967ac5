"""The Ray actor that owns one SGLang server."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.rollout.engine.process import ReplicaSpec, ServerAccess, ServerProcess, ServerSpec
from slipstream.rollout.network import hold_port, port_of


class EngineActor:
    """Starts, watches and ends one server. Ray creates it on the node, and with the GPUs, of the server."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        umask: int,
        model_path: str,
        dtype: str,
        device: str,
        tensor_parallel: int,
        seed: int,
        args: Mapping[str, object],
        log_folder: str,
        loopback: bool,
        start_timeout_s: float,
        shared_gpus: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        replica: ReplicaSpec | None = None,
    ) -> None:
        import ray

        os.umask(umask)
        self._name = name
        self._host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._log_path = Path(log_folder) / f"{name}.log"
        self._start_timeout_s = start_timeout_s
        self._spec = ServerSpec(
            model_path=Path(model_path),
            dtype=dtype,
            device=device,
            tensor_parallel=tensor_parallel,
            host=self._host,
            port=0,  # each start draws a port and has a version
            version=0,
            seed=seed,
            args=args,
            shared_gpus=tuple(shared_gpus),
            environment=environment or {},
            replica=replica,
            label=f"{name}-{run:.20}",
        )
        self._server: ServerProcess | None = None

    async def start(self, version: int) -> ServerAccess:
        """Start the server, or start it again, from ``model_path``, whose weights are of ``version``.

        Return its address and key once it is healthy. Raises EngineStartError.
        """
        await self.stop()
        with hold_port(self._host) as holder:
            spec = replace(self._spec, port=port_of(holder), version=version)
            self._server = ServerProcess(spec, self._log_path)
            try:
                await self._server.wait_healthy(self._start_timeout_s)
            except BaseException:
                await self.stop()
                raise
            return self._server.access

    async def wait_exit(self) -> int:
        """Wait until the server has ended for any reason, and return its exit code."""
        if self._server is None:
            raise RuntimeError(f"{self._name} was never started")
        return await self._server.wait_exit()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await asyncio.to_thread(server.stop)
