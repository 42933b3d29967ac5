"""Measures short executions in sandboxes of this machine.

    python -m benchmarks.sandbox [--times 100]

Ends in one JSON object: milliseconds, the median of each step, for a sandbox that is made for one command and
for one that runs many, for ``true`` and ``python -c pass``; and how many sandboxes with one command each there are
in a second when 16 are open at a time. ``spawned``: the same command without a sandbox.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from slipstream.configs.schema.sandbox import LocalSandboxConfig
from slipstream.rollout.sandbox.local import LocalSandbox
from slipstream.rollout.sandbox.open import limits_of

COMMANDS = {
    "true": ["true"],
    "python -c pass": ["python", "-c", "pass"],
    "python -I -S -c pass": ["python", "-I", "-S", "-c", "pass"],
}
AT_A_TIME = 16

_limits = limits_of(LocalSandboxConfig())


async def milliseconds(times: int, step: Callable[[], Awaitable[object]]) -> float:
    """Return the median time of a step."""
    taken: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        await step()
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken) * 1000, 2)


async def once(command: list[str]) -> None:
    """Make a sandbox for one command."""
    sandbox = LocalSandbox(_limits)
    await sandbox.create()
    result = await sandbox.exec(command)
    assert not result.failed, result
    await sandbox.close()


async def spawn(command: list[str]) -> None:
    """Run a command without a sandbox, with the Python that sandboxes have."""
    program = [sys.executable, *command[1:]] if command[0] == "python" else command
    await asyncio.to_thread(subprocess.run, program, check=True)


async def rate(times: int) -> float:
    """Return the number of sandboxes for one command each in a second."""
    free = asyncio.Semaphore(AT_A_TIME)

    async def bounded() -> None:
        async with free:
            await once(COMMANDS["true"])

    start = time.perf_counter()
    await asyncio.gather(*[bounded() for _ in range(times)])
    return round(times / (time.perf_counter() - start), 1)


async def measure(times: int) -> dict[str, object]:
    """Return all figures."""
    await once(COMMANDS["true"])  # starts the keeper
    sandbox = LocalSandbox(_limits)
    isolation = await sandbox.create()
    figures: dict[str, object] = {"isolation": isolation.level}
    for name, command in COMMANDS.items():
        figures[name] = {
            "create_exec_close": await milliseconds(times, partial(once, command)),
            "exec": await milliseconds(times, partial(sandbox.exec, command)),
            "spawned": await milliseconds(times, partial(spawn, command)),
        }
    await sandbox.close()
    figures["sandboxes_per_s"] = await rate(3 * times)
    return figures


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description="Measure short executions in sandboxes of this machine.")
    parser.add_argument(
        "--times", type=int, default=100, help="executions of each kind (default: %(default)s)"
    )
    print(json.dumps(asyncio.run(measure(parser.parse_args().times))))


if __name__ == "__main__":
    main()
