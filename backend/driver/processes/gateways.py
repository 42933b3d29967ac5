"""The gateways of a run: processes on the driver's node, started, watched, ended, or taken over.

    start, or take over ──► connects to the driver, serves ──process ends──► start again    (one task each)

They are child processes of the driver and not Ray actors. Users know the address of one node. A gateway opens
its journal on that node alone. It serves on when Ray and the driver are gone, which end every actor: without
engines, its users wait, and a driver that resumes the run finds it in the run folder and gives it engines
again. Nothing that a gateway does runs in the driver, which holds the end of its connection only
(``rollout/live``).

A gateway that has had no driver for ``LINGER_S`` ends by itself. A driver that ends on any path but kill -9
ends its gateways.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from slipstream.backend.cluster.kept_process import KeptProcess
from slipstream.configs.schema import GatewayConfig
from slipstream.rollout.gateway.keys import KEY_VARIABLE, KeysError, keys_file, read_keys
from slipstream.rollout.system.restarts import RestartLimit, Restarts

MODULE = "slipstream.rollout.gateway.gateway_process"
"""Program of a gateway. Its argument is the JSON of ``specification``."""

LINGER_S = 600.0
"""Longest time that a gateway waits for a driver: a resumed run loads its models and checkpoints first."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Times before a gateway is started again. A port, for example, may be in use for a while."""

LASTING_S = 60.0
"""A gateway that has lived so long is started again at once when it ends."""

WRONG_INPUT = 2
"""Exit code of a gateway that would fail in the same way again."""

FOLDER = "gateway"
"""Folder of the journals, and of the files that name the processes, in the run folder."""


class GatewayGone(RuntimeError):
    """A gateway cannot start, or has failed too often."""


def specification(gateway: GatewayConfig, run: Path, model: Path, number: int, context: int) -> str:
    """Return what gateway ``number`` is told. ``run``: the run folder. ``model``: folder of the model.
    ``context``: largest number of tokens that the engines take, those of the completion included. The rest is
    in ``recipe.yaml`` of the run folder, and where the driver listens is in ``rollout.live.driver_address``.
    """
    return json.dumps(
        {
            "run": str(run.absolute()),
            "number": number,
            "processes": gateway.processes,
            "context": context,
            "linger_s": LINGER_S,
            # Also so that a gateway which has outlived other settings is not taken over.
            "model": str(model.absolute()),
            "gateway": gateway.model_dump(mode="json"),
        }
    )


def announcement(gateway: GatewayConfig, run: Path, environment: Mapping[str, str]) -> str:
    """Return where users reach the gateways, and what they lack to do so. ``environment``: of the driver."""
    host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
    text = f"users reach http://{host}:{gateway.port}/v1"
    with suppress(KeysError):  # a gateway says why it cannot read them
        if not environment.get(KEY_VARIABLE) and all(
            key.revoked for key in read_keys(keys_file(gateway, run))
        ):
            text += "; every request is refused until there is an API key: `slipstream key add`"
    return text


def gateway_command(gateway: GatewayConfig, run: Path, model: Path, number: int, context: int) -> list[str]:
    """Return the command of gateway ``number``. Arguments as of ``specification``."""
    return [sys.executable, "-m", MODULE, specification(gateway, run, model, number, context)]


class Gateways:
    """Single event loop. ``run`` for as long as users are served, then ``stop``."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path,
        logs: Path,
        note: Callable[[str], None],
        *,
        limit: RestartLimit,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """``commands``: one for each gateway. ``folder``: run folder. ``limit``: of a gateway's restarts."""
        self._commands = commands
        self._folder = folder / FOLDER
        self._logs = logs
        self._note = note
        self._restarts = [Restarts(limit) for _ in commands]
        self._first_pause_s = first_pause_s
        self._processes: dict[int, KeptProcess] = {}

    @property
    def restarts(self) -> int:
        """Number of restarts of all gateways so far."""
        return sum(restarts.count for restarts in self._restarts)

    async def run(self) -> None:
        """Keep all gateways running. Ends by cancellation only; they go on until ``stop``.

        Raises, in an ExceptionGroup, GatewayGone.
        """
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(self._commands)):
                tasks.create_task(self._keep(number), name=f"gateway-{number}")

    async def stop(self) -> None:
        """End every gateway."""
        ending = (process.end() for process in self._processes.values())
        await asyncio.gather(*ending, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        clock = asyncio.get_running_loop().time
        name, command = f"gateway-{number}", self._commands[number]
        file, log = self._folder / f"process-{number}.json", self._logs / f"{name}.log"
        pause_s = self._first_pause_s
        process = KeptProcess.taken_over(command, file)
        if process is not None:
            self._note(f"{name} has outlived its driver and goes on (process {process.pid})")
        while True:
            process = self._processes[number] = process or KeptProcess.start(command, file, log)
            began = clock()
            code = await process.wait()
            del self._processes[number]
            reason = "it has ended" if code is None else f"it has ended with code {code}"
            reason = f"{reason} (log: {log})"
            if code == WRONG_INPUT:
                raise GatewayGone(f"{name} cannot run: {reason}")
            if (refused := self._restarts[number].refused(reason)) is not None:
                raise GatewayGone(f"{name} {refused}")
            self._note(f"{name} is started again: {reason}")
            process = None
            pause_s = self._first_pause_s if clock() - began > LASTING_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
