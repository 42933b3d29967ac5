"""Memory over 20,000 turns: neither a gateway nor the driver's live users may hold more and more.

    python -m tests.gateway_memory [--turns 20000] [--users 24]      ten minutes

A gateway process as a run has it, with a scripted engine behind it, hands its turns over to a process with
the driver's receiver, ledger, live turns, judging and control core (``tests.gateway_memory.driver``).
Sessions end, rest for too long, are evicted and forgotten; users hang up; turns are judged, put off,
trained, and expire. The memory of a process is what would be free if it ended.

Prints a table and, as the last line, one JSON object. Exit code 1 if a process has more than 1.2 times the
memory at the end that it had after a tenth of the turns.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from rich.console import Console

from slipstream.backend.monitor.tables import Columns, rows_table
from slipstream.configs.schema import RunConfig
from slipstream.rollout.gateway.keys import add_key
from slipstream.rollout.gateway.peers import GatewayAddress, read_address
from slipstream.rollout.network import hold_port, port_of
from tests.chat_model import write_chat_model
from tests.crash.soak import unique_mb
from tests.environment import environment
from tests.gateway_memory.engine import ScriptedEngine
from tests.gateway_memory.users import Users

ALLOWED = 1.2
PARTS = 10
"""Times at which memory is looked at: after every tenth of the turns."""
SAMPLES = 5
SAMPLE_S = 0.5
IDLE_S = 8.0
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
CONTEXT = 4096


def recipe(root: Path, policy: Path, port: int, admin_port: int) -> RunConfig:
    """Return the recipe of which the gateway takes its settings."""
    return RunConfig.model_validate(
        {
            "run": {"name": "memory", "root": str(root), "steps": 1},
            "model": {"path": str(policy)},
            "rollout": {"max_head_offpolicyness": 4, "batch_size": 8, "n_samples_per_prompt": 2},
            "gateway": {
                "port": port,
                "admin_port": admin_port,
                "idle_timeout_s": IDLE_S,
                "limits": {"sessions": 400, "session_bytes": 1_048_576},
            },
            "live": {"share": 1},
        }
    )


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
            samples.append(unique_mb([self._process.pid]))
            await asyncio.sleep(SAMPLE_S)
        self.mb.append(statistics.median(samples))

    @property
    def ratio(self) -> float:
        return self.mb[-1] / self.mb[0]


async def started(gateway: Program, run: Path) -> GatewayAddress:
    """Wait until users can reach the gateway and it has an engine. Return where it listens."""
    async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
        while True:
            gateway.check()
            address = read_address(run, 0)
            if address is not None:
                async with http.get(f"{address.admin}/state") as reply:
                    if (await reply.json())["retry_after_s"] is None:
                        return address
            await asyncio.sleep(0.1)


async def measure(turns: int, users: int, scratch: Path) -> tuple[list[Program], Users, dict[str, Any]]:
    """Have so many turns. Return the processes with their memory, the users, and what the driver says."""
    engine = ScriptedEngine()
    policy = write_chat_model(scratch / "policy", weights=False)
    key = add_key(scratch / "memory.keys.json", "users")
    with ExitStack() as stack:
        ports = [port_of(stack.enter_context(hold_port("127.0.0.1"))) for _ in range(2)]
        config = recipe(scratch, policy, *ports)
        run = config.run.folder
        run.mkdir()
        (run / "recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        async with engine.serving() as url:
            arguments = ("tests.gateway_memory.driver", str(run), url, str(engine.vocab))
            driver = stack.enter_context(Program("driver", *arguments, log=scratch / "driver.log"))
            await asyncio.to_thread(driver.line)
            values = {"run": str(run), "number": 0, "processes": 1, "context": CONTEXT, "linger_s": 60}
            arguments = ("slipstream.rollout.gateway.process", json.dumps(values))
            gateway = stack.enter_context(Program("gateway", *arguments, log=scratch / "gateway.log"))
            address = await started(gateway, run)
            talking = Users(address.url, key, address.admin, address.secret)
            for part in range(1, PARTS + 1):
                await talking.talk(users, turns * part // PARTS)
                await asyncio.sleep(IDLE_S)
                await asyncio.gather(gateway.sample(), driver.sample())
            return [gateway, driver], talking, await driver.status()


TABLE: Columns[Program] = {
    "process": lambda program: program.name,
    **{
        f"{part * 100 // PARTS} %": lambda program, part=part: f"{program.mb[part - 1]:.1f}"
        for part in range(1, PARTS + 1)
    },
    "ratio": lambda program: f"{program.ratio:.3f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=partial(argparse.RawTextHelpFormatter, width=110)
    )
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--users", type=int, default=24, help="users at a time")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-memory-") as scratch:
        programs, users, status = asyncio.run(measure(arguments.turns, arguments.users, Path(scratch)))
    Console(width=110).print(rows_table("memory, MB", programs, TABLE))
    for error in users.errors[:10]:
        print(error, file=sys.stderr)
    print(
        json.dumps(
            {
                "turns": users.turns,
                "sessions": users.sessions,
                "errors": len(users.errors),
                "steps": status["steps"],
                "ends": status["ends"],
                "held": status["held"],
                "mb": {program.name: [round(mb, 1) for mb in program.mb] for program in programs},
                "ratio": {program.name: round(program.ratio, 3) for program in programs},
                "seconds": round(time.monotonic() - began),
            }
        )
    )
    sys.exit(any(program.ratio > ALLOWED for program in programs) or bool(users.errors))


if __name__ == "__main__":
    main()
