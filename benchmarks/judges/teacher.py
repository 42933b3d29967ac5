"""A teacher that does not change: an SGLang server of the start policy, whose prompts have the hint."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.rollout.engine.server_process import ServerProcess, ServerSpec
from slipstream.rollout.system.network import hold_port, port_of

START_TIMEOUT_S = 300

KEY_VARIABLE = "JUDGES_TEACHER_KEY"
"""Environment variable of the server's key."""


@asynccontextmanager
async def teaching(policy: Path, log: Path) -> AsyncIterator[str]:
    """Serve ``policy`` inside the block, and give the URL. Raises EngineStartError."""
    with hold_port("127.0.0.1") as port:
        spec = ServerSpec(
            policy, "float32", "cpu", 1, "127.0.0.1", port_of(port), version=0, seed=0, label="teacher"
        )
        server = ServerProcess(spec, log)
        try:
            await server.wait_healthy(START_TIMEOUT_S)
            os.environ[KEY_VARIABLE] = str(server.access.key)
            yield server.access.url
        finally:
            await asyncio.to_thread(server.stop)
