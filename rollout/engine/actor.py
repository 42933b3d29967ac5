"""The Ray actor that owns the SGLang server of one node of an engine."""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slipstream.rollout.engine.adapters import AdapterServing
from slipstream.rollout.engine.server_process import (
    MEETING_PORTS,
    MeetingPoint,
    ReplicaSpec,
    ServerAccess,
    ServerProcess,
    ServerSpec,
)
from slipstream.rollout.system.network import hold_port, hold_ports, port_of


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
        host: str | None,
        start_timeout_s: float,
        data_parallel: int = 1,
        expert_parallel: int = 1,
        pipeline_parallel: int = 1,
        nodes: int = 1,
        node: int = 0,
        shared_gpus: Sequence[str] = (),
        rests: bool = False,
        environment: Mapping[str, str] | None = None,
        replica: ReplicaSpec | None = None,
        adapters: AdapterServing | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """``nodes``: of the engine. ``node``: number of this one. ``host``: address on which the server
        listens; None: that of the node in the Ray cluster.
        """
        os.umask(umask)
        self._name = name if nodes == 1 else f"{name}-node-{node}"
        self._host = _own_address() if host is None else host
        self._log_path = Path(log_folder) / f"{self._name}.log"
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
            data_parallel=data_parallel,
            expert_parallel=expert_parallel,
            pipeline_parallel=pipeline_parallel,
            nodes=nodes,
            node=node,
            args=args,
            shared_gpus=tuple(shared_gpus),
            rests=rests,
            environment=environment or {},
            replica=replica,
            adapters=adapters,
            facts=facts or {},
            label=f"{self._name}-{run:.20}",
        )
        self._server: ServerProcess | None = None
        self._ending = asyncio.Lock()
        self._meeting_ports: list[socket.socket] = []

    async def meeting_point(self) -> MeetingPoint:
        """Return where the ranks of the engine meet at its next start. The ports are held until then."""
        self._release_meeting_ports()
        self._meeting_ports = hold_ports(self._host, MEETING_PORTS)
        return MeetingPoint(self._host, port_of(self._meeting_ports[0]))

    async def start(self, version: int, meeting: MeetingPoint | None = None) -> ServerAccess:
        """Start the server, or start it again, from ``model_path``, whose weights are of ``version``.

        ``meeting``: where the ranks of the engine meet. Return the server's address and key once it is
        healthy. Raises EngineStartError.
        """
        await self.stop()
        with hold_port(self._host) as holder:
            spec = replace(self._spec, port=port_of(holder), version=version, meeting=meeting)
            self._server = server = ServerProcess(spec, self._log_path)
            try:
                await server.wait_healthy(self._start_timeout_s)
            except BaseException:
                await self.stop()
                raise
            finally:
                self._release_meeting_ports()
            return server.access

    async def wait_exit(self) -> int:
        """Wait until the server has ended for any reason, and return its exit code."""
        if self._server is None:
            raise RuntimeError(f"{self._name} was never started")
        return await self._server.wait_exit()

    async def write_stacks(self) -> tuple[str, list[str]]:
        """Let the server's processes write their stacks. Return the file, and who has written none."""
        if self._server is None:
            return "", ["no server runs"]
        return str(self._server.stacks), await asyncio.to_thread(self._server.write_stacks)

    async def stop(self) -> None:
        """End the server. Returns when it has ended, also if another call is about to end it."""
        async with self._ending:
            if self._server is not None:
                server, self._server = self._server, None
                await asyncio.to_thread(server.stop)

    def _release_meeting_ports(self) -> None:
        for holder in self._meeting_ports:
            holder.close()
        self._meeting_ports = []


def _own_address() -> str:
    """Return the address of this node in the Ray cluster."""
    import ray

    return ray.util.get_node_ip_address()
