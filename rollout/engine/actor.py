"""The Ray actor that owns the SGLang server of one node of an engine."""

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

from slipstream.rollout.engine.server_process import (
    MEETING_PORTS,
    MeetingPoint,
    ServerAccess,
    ServerProcess,
    ServerSpec,
)
from slipstream.rollout.system.network import hold_port, hold_ports, port_of


class EngineActor:
    """Starts, watches and ends one server. Ray creates it on the node, and with the GPUs, of the server."""

    def __init__(
        self, spec: ServerSpec, *, name: str, run: str, umask: int, logs: Path, start_timeout_s: float
    ) -> None:
        """``spec``: of the server. Its host is empty for the address of the node in the Ray cluster; each
        start draws a port and has a version. ``name``: that of the engine.
        """
        os.umask(umask)
        self._name = name if spec.nodes == 1 else f"{name}-node-{spec.node}"
        self._log_path = logs / f"{self._name}.log"
        self._start_timeout_s = start_timeout_s
        self._spec = replace(spec, host=spec.host or _own_address(), label=f"{self._name}-{run:.20}")
        self._server: ServerProcess | None = None
        self._ending = asyncio.Lock()
        self._meeting_ports: list[socket.socket] = []

    async def meeting_point(self) -> MeetingPoint:
        """Return where the ranks of the engine meet at its next start. The ports are held until then."""
        self._release_meeting_ports()
        self._meeting_ports = hold_ports(self._spec.host, MEETING_PORTS)
        return MeetingPoint(self._spec.host, port_of(self._meeting_ports[0]))

    async def start(self, version: int, meeting: MeetingPoint | None = None) -> ServerAccess:
        """Start the server, or start it again, from ``model_path``, whose weights are of ``version``.

        ``meeting``: where the ranks of the engine meet. Return the server's address and key once it is
        healthy. Raises EngineStartError.
        """
        await self.stop()
        with hold_port(self._spec.host) as holder:
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
