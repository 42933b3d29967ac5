"""The workflow of environments written for the library verifiers, which run in a process of their own.

    run ──task, base_url, api_key──► verifiers_host.py ──requests──► endpoint ──► engines
     ◄──────── reward and metrics ──────┘                               └──turns──► trajectories

One host for each collector runs all of its episodes. It is a program of another Python, because what
verifiers needs cannot be installed beside SGLang. It ends with its collector.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import cast

from slipstream.rollout.reward.value import is_part_name
from slipstream.rollout.system.plugins import PluginError
from slipstream.rollout.system.programs.program import ProgramEnd, run_program
from slipstream.rollout.system.stream import FrameReader, framed
from slipstream.rollout.system.temporary import OwnedFolder
from slipstream.rollout.tokens.trajectory import Prompt
from slipstream.rollout.workflow.agent_episodes import (
    AgentEpisodes,
    AgentFailed,
    program_variables,
    wrong_limits,
)
from slipstream.rollout.workflow.endpoint import OpenEndpoint
from slipstream.rollout.workflow.limited import OnLimit

HOST = Path(__file__).with_name("verifiers_host.py")

TASK = "task"
"""Column of the prompt set: the number of a task in the environment's task set, from 0."""

LONGEST_MESSAGE = 1 << 24
"""Bytes of a message of a host."""
LONGEST_NOTE = 4000
"""Characters of what a host has printed, in the reason of a failure."""


class Verifiers(AgentEpisodes):
    """Runs episodes of an environment of verifiers, and trains what the policy has answered in them.

    workflow:
      path: slipstream.rollout.workflow.Verifiers
      args:
        environment: {taskset: {id: my-taskset}, agent: {runtime: {type: subprocess}}}
        python: /opt/verifiers/bin/python
    """

    def __init__(
        self,
        environment: Mapping[str, object],
        *,
        python: str = sys.executable,
        start_timeout_s: float = 300.0,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        on_limit: OnLimit = "train",
    ) -> None:
        """``environment``: what verifiers' ``load_environment`` takes, the table ``[env]`` of its own
        configurations. ``python``: a Python with verifiers and the environment's package.
        ``start_timeout_s``: seconds for the environment to start. The others are those of ``AgentEpisodes``.
        Raises PluginError, with all that is wrong.
        """
        wrong = wrong_limits(max_turns, max_tokens, on_limit)
        taskset = environment.get("taskset")
        if not isinstance(taskset, Mapping) or not cast("Mapping[str, object]", taskset).get("id"):
            wrong.append(
                f"environment: expected {{taskset: {{id: ...}}}} at least, found {dict(environment)}"
            )
        if not os.access(python, os.X_OK):
            wrong.append(f"python: {python} is no program")
        if wrong:
            raise PluginError(f"slipstream.rollout.workflow.Verifiers: {'; '.join(wrong)}")
        super().__init__(max_turns=max_turns, max_tokens=max_tokens, on_limit=on_limit)
        self._host = Host(python, environment, start_timeout_s)

    async def result(self, endpoint: OpenEndpoint, prompt: Prompt) -> object:
        """Run an episode. Raises AgentFailed."""
        task = prompt.metadata.get(TASK)
        if not isinstance(task, int):
            raise AgentFailed(
                f"{prompt.reference} has {task!r} in the column {TASK!r}, expected the number of a task: "
                "write the prompt set with `python -m slipstream.rollout.workflow.verifiers`"
            )
        variables = program_variables(endpoint)
        result = await self._host.episode(task, f"{endpoint.base_url}/v1", endpoint.api_key, variables)
        return numbers_of(result)

    async def close(self) -> None:
        """End the host."""
        await self._host.close()


def numbers_of(result: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards and metrics of an episode, under names that parts of a reward may have."""
    numbers: dict[str, float] = {}
    for name, value in result.items():
        allowed = re.sub(r"[^\w.-]", "_", name)[:64]
        if is_part_name(allowed):
            numbers[allowed] = value
    return numbers


class Host:
    """The program that runs episodes, which is started for the first one, and again if it has died."""

    def __init__(self, python: str, environment: Mapping[str, object], start_timeout_s: float) -> None:
        self._command = (python, "-P", str(HOST))
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._starting = asyncio.Lock()
        self._connection: _Connection | None = None

    async def episode(
        self, task: int, base_url: str, api_key: str, variables: Mapping[str, str]
    ) -> dict[str, float]:
        """Return the rewards and metrics of an episode. Raises AgentFailed. ``variables``: all environment
        variables of the program, if it is to be started.
        """
        async with self._starting:
            if self._connection is None or self._connection.has_ended:
                connection = _Connection(self._command, variables)
                try:
                    async with asyncio.timeout(self._start_timeout_s):
                        await connection.open(self._environment)
                except TimeoutError:
                    await connection.close()
                    raise AgentFailed(
                        f"the environment has not started within {self._start_timeout_s:g} s"
                    ) from None
                except BaseException:
                    await connection.close()
                    raise
                self._connection = connection
        return await self._connection.episode(task, base_url, api_key)

    async def close(self) -> None:
        """End the program."""
        if self._connection is not None:
            await self._connection.close()


class _Connection:
    """One life of the program, and the socket over which it is spoken with."""

    def __init__(self, command: tuple[str, ...], variables: Mapping[str, str]) -> None:
        self._command = command
        self._variables = variables
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None
        self._program: asyncio.Task[ProgramEnd] | None = None

    @property
    def has_ended(self) -> bool:
        return self._program is None or self._program.done()

    async def open(self, environment: Mapping[str, object]) -> None:
        """Start the program, and wait until its environment has started. Raises AgentFailed."""
        folder = OwnedFolder(Path(tempfile.gettempdir()), "verifiers")
        try:
            path = folder.path / "episodes"
            server = await asyncio.start_unix_server(self._speak, path)
            variables = {**self._variables, "SLIPSTREAM_EPISODES": str(path)}
            self._environment = environment
            self._program = asyncio.create_task(
                run_program(self._command, variables, b""), name="environment of verifiers"
            )
            self._program.add_done_callback(self._ended)
            async with server:
                await self._ready
        finally:
            folder.remove()

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what the program says, to its end."""
        self._writer = writer
        self._say(self._environment)
        with suppress(ConnectionError, asyncio.CancelledError):
            frames = FrameReader(LONGEST_MESSAGE)
            while data := await reader.read(1 << 16):
                for content in frames.feed(data):
                    self._take(json.loads(content))
        writer.close()

    def _say(self, message: Mapping[str, object]) -> None:
        assert self._writer is not None, "nobody speaks before the program does"
        self._writer.write(framed(json.dumps(message).encode()))

    def _take(self, message: dict[str, object]) -> None:
        if "ready" in message:
            self._ready.set_result(None)
            return
        waiting = self._waiting.get(cast(int, message["number"]))
        if waiting is None or waiting.done():
            return
        if "error" in message:
            waiting.set_exception(AgentFailed(str(message["error"])))
        else:
            waiting.set_result(cast("dict[str, float]", message["result"]))

    def _ended(self, program: asyncio.Task[ProgramEnd]) -> None:
        """Fail all that waits for a program that has ended."""
        reason = "the environment was ended"
        if not program.cancelled():
            error = program.exception()
            reason = f"the environment cannot be started: {error}"
            if error is None:
                end = program.result()
                reason = f"the environment has ended with exit code {end.code}: {end.errors[-LONGEST_NOTE:]}"
        for waiting in (self._ready, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(AgentFailed(reason))
        self._ready.exception()  # nobody may wait for it any more

    async def episode(self, task: int, base_url: str, api_key: str) -> dict[str, float]:
        """Return the rewards and metrics of an episode. Raises AgentFailed."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._say({"number": number, "task": task, "base_url": base_url, "api_key": api_key})
        try:
            return await self._waiting[number]
        finally:
            if self._waiting.pop(number).cancelled() and not self.has_ended:
                self._say({"cancel": number})

    async def close(self) -> None:
        """End the program, and everything that it has started."""
        if self._program is not None:
            self._program.cancel()
            await asyncio.wait({self._program})


def main() -> None:
    """Write the prompt set of an environment: one line for each task, with its number."""
    import argparse

    options = argparse.ArgumentParser(
        prog="python -m slipstream.rollout.workflow.verifiers", description=main.__doc__
    )
    options.add_argument("environment", type=Path, help="JSON file with the argument `environment`")
    options.add_argument("--python", default=sys.executable, help="Python with verifiers")
    options.add_argument("--first", type=int, default=0, help="number of the first task")
    options.add_argument("--count", type=int, default=1000, help="largest number of tasks")
    options.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    given = options.parse_args()
    command = [given.python, "-P", str(HOST), str(given.environment)]
    with given.output.open("x") as output:
        ended = subprocess.run(
            [*command, str(given.first), str(given.first + given.count)], stdout=output, check=False
        )
    if ended.returncode:
        given.output.unlink()
        sys.exit(2)


if __name__ == "__main__":
    main()
