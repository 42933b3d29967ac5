"""The processes that are watched: a gateway as a run has it, and programs of the tests."""

import asyncio
import json
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.peers import GatewayAddress, read_address
from slipstream.rollout.system.linux import children_of
from tests.crash.soak import unique_mb
from tests.environment import environment

SAMPLES = 5
SAMPLE_S = 0.5
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
CONTEXT = 4096


def recipe(root: Path, policy: Path, port: int, admin_port: int, **gateway: Any) -> RunConfig:
    """Make the folder of a run, and return the recipe of which its gateway takes its settings."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "memory", "root": str(root), "steps": 1},
            "model": {"path": str(policy)},
            "rollout": {"max_head_offpolicyness": 4, "batch_size": 8, "n_samples_per_prompt": 2},
            "gateway": {"port": port, "admin_port": admin_port, **gateway},
            "live": {"share": 1},
        }
    )
    config.run.folder.mkdir()
    (config.run.folder / "recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config


class Program:
    """A program of this repository as a process of its own."""

    def __init__(self, name: str, *command: str, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
            )
        self.mb: list[float] = []
        """Memory behind each part of the turns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """Raise RuntimeError if the process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended:\n{self._log.read_text()[-3000:]}")

    def line(self) -> str:
        """Return the next line that the process prints. Blocks."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line:
            self._process.wait(END_TIMEOUT_S)
            self.check()
        return line

    async def status(self) -> dict[str, Any]:
        """Return what the process says of itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return json.loads(await asyncio.to_thread(self.line))

    async def sample(self) -> None:
        """Look at the memory a few times, and remember the median."""
        samples: list[float] = []
        for _ in range(SAMPLES):
            self.check()
            pid = self._process.pid
            samples.append(unique_mb([pid, *children_of(pid)]))  # a gateway serves in a child
            await asyncio.sleep(SAMPLE_S)
        self.mb.append(statistics.median(samples))

    @property
    def ratio(self) -> float:
        """Memory at the end over that after half of the turns."""
        return self.mb[-1] / self.mb[len(self.mb) // 2 - 1]


def gateway_of(config: RunConfig, log: Path) -> Program:
    """Return the gateway process of a run."""
    run = str(config.run.folder)
    values = {"run": run, "number": 0, "processes": 1, "context": CONTEXT, "linger_s": 60}
    return Program("gateway", "slipstream.rollout.gateway.gateway_process", json.dumps(values), log=log)


async def started(gateway: Program, run: Path, *, has_engine: bool = True) -> GatewayAddress:
    """Wait until users can reach the gateway, and until it has an engine. Return where it listens."""
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
        while True:
            gateway.check()
            address = read_address(run, 0)
            if address is not None:
                async with http.get(f"{address.admin}/state") as reply:
                    if not has_engine or (await reply.json())["retry_after_s"] is None:
                        return address
            await asyncio.sleep(0.1)
