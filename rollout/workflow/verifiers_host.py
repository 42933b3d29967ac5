"""The process where environments of the library verifiers run, for ``slipstream.rollout.workflow.verifiers``.

    workflow ──{number, task, base_url, api_key}──► host ──► an episode of the environment ──► endpoint
             ◄──{number, result} or {number, error}──┘

It runs in the Python where verifiers is installed, and imports nothing else of ours: what verifiers needs and
what SGLang needs cannot be installed together. Messages are JSON, in the frames of ``system/stream.py``, over
the socket that the variable SLIPSTREAM_EPISODES names. Its end is the end of this process.

    PYTHON verifiers_host.py ENVIRONMENT.json FIRST END    prints tasks as lines of a prompt set, and ends
"""

# pyright: basic
import asyncio
import importlib
import itertools
import json
import math
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LENGTH = struct.Struct("<Q")
"""Of the number of bytes that a frame begins with."""

LONGEST_NOTE = 4000
"""Characters of an error."""

KEY = "SLIPSTREAM_EPISODE_KEY"
"""Marks clients of the policy. No variable has this name: each episode has a key of its own."""

MOST_PARTS = 31
"""Largest number of further numbers of a reward."""


class Tasks:
    """The tasks of an environment by number, which are read as far as they are asked for."""

    def __init__(self, environment: Any) -> None:
        self._left: Iterator[Any] = iter(environment.taskset)
        self._read: list[Any] = []

    def __getitem__(self, number: int) -> Any:
        self._read += itertools.islice(self._left, max(0, number + 1 - len(self._read)))
        if not 0 <= number < len(self._read):
            raise IndexError(f"there is no task {number}, only {len(self._read)} of them")
        return self._read[number]


class KeyedEpisode:
    """One attempt at an episode: the key of its endpoint, and the agents that run in it."""

    def __init__(self, key: str, by_trace: "dict[str, tuple[KeyedEpisode, Any]]") -> None:
        self.key = key
        self.is_retried = False
        """An agent has begun anew, so that the policy has sampled what no agent has used."""
        self._by_trace = by_trace
        self._traces: list[str] = []

    def begun(self, trace: Any) -> None:
        self._by_trace[trace.id] = self, trace
        self._traces.append(trace.id)

    def discarded(self, trace: object) -> None:
        self.is_retried = True

    def close(self) -> None:
        for trace in self._traces:
            del self._by_trace[trace]


class EpisodeRunner:
    """The environment, and the episodes that run in it."""

    def __init__(self, environment: Mapping[str, object], say: Callable[[dict[str, object]], None]) -> None:
        """Load the environment. Raises what verifiers raises."""
        self._vf = importlib.import_module("verifiers.v1")
        self.environment = load(environment)
        self._tasks = Tasks(self.environment)
        self._say = say
        self._running: dict[int, asyncio.Task[None]] = {}
        self._by_trace: dict[str, tuple[KeyedEpisode, Any]] = {}
        self._keyed_by_episode()

    def _keyed_by_episode(self) -> None:
        """Let one client serve all episodes. Verifiers keeps a client for each configuration to its end, and
        a configuration names one key."""
        server: Any = importlib.import_module("verifiers.v1.interception.server")
        base = importlib.import_module("verifiers.v1.clients.eval").EvalClient
        resolve, by_trace = server.resolve_client, self._by_trace

        class EpisodeClient(base):  # type: ignore[misc, valid-type]
            def _headers(self, dialect: Any, incoming: Any, session_id: str | None) -> dict[str, str]:
                headers: dict[str, str] = super()._headers(dialect, incoming, session_id)
                if session_id in by_trace:
                    attempt, trace = by_trace[session_id]
                    headers.update(dialect.auth_headers(attempt.key))
                    if not trace.agent.trainable:
                        headers["X-Turn-Type"] = "side"
                return headers

        def resolved(config: Any) -> Any:
            return (
                EpisodeClient(config) if config.api_key_var == "SLIPSTREAM_EPISODE_KEY" else resolve(config)
            )

        server.resolve_client = resolved

    def take(self, message: dict[str, Any]) -> None:
        """Begin or cancel an episode."""
        if "cancel" in message:
            if (task := self._running.get(message["cancel"])) is not None:
                task.cancel()
            return
        number = message["number"]
        self._running[number] = asyncio.create_task(self._answer(number, message))

    async def _answer(self, number: int, message: dict[str, Any]) -> None:
        attempt = KeyedEpisode(message["api_key"], self._by_trace)
        try:
            result = await self._result(attempt, message["task"], message["base_url"])
            self._say({"number": number, "result": result})
        except Exception as error:
            note = "".join(traceback.format_exception_only(error)).strip()[-LONGEST_NOTE:]
            self._say({"number": number, "error": note})
        finally:
            attempt.close()
            del self._running[number]

    async def _result(self, attempt: KeyedEpisode, task: int, base_url: str) -> dict[str, float]:
        client = self._vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        episode = await self.environment.run_episode(
            self._tasks[task],
            self._vf.ModelContext("policy", client),
            on_trace=attempt.begun,
            on_discard=attempt.discarded,
        )
        if not episode.ok:
            raise RuntimeError(why(episode))
        if attempt.is_retried:
            raise RuntimeError(
                "an agent of the episode was run again: leave that to rollout.episode_attempts"
            )
        return numbers(episode)


def load(environment: Mapping[str, object]) -> Any:
    """Return the environment that a configuration describes. Raises what verifiers raises."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    return loaders.load_environment(loaders.resolve_env_config(dict(environment)))


def numbers(episode: Any) -> dict[str, float]:
    """Return the mean reward of the agents that are trained, and the means of their rewards and metrics."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise RuntimeError("no agent of the episode is trained")
    values: dict[str, list[float]] = {}
    for trace in traces:
        named = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**trace.metrics, **named}.items():
            if value is not None and math.isfinite(value) and name != "reward":
                values.setdefault(name, []).append(float(value))
    parts = dict(itertools.islice(sorted(values.items()), MOST_PARTS))
    return {
        "reward": math.fsum(trace.reward for trace in traces) / len(traces),
        **{name: math.fsum(each) / len(each) for name, each in parts.items()},
    }


def why(episode: Any) -> str:
    """Return why an episode has failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not complete"


def print_tasks(environment: Mapping[str, object], first: int, end: int) -> None:
    """Print the tasks ``first`` to ``end`` - 1, or all that there are of them, as lines of a prompt set."""
    for number, task in itertools.islice(enumerate(load(environment).taskset), first, end):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else task.data.name or f"task {number}"
        print(json.dumps({"prompt": text, "task": number}))


async def received(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Wait for the next message. None: the socket has ended."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        return None


async def host(socket: str) -> None:
    """Run episodes until the socket ends."""
    reader, writer = await asyncio.open_unix_connection(socket)

    def say(message: dict[str, object]) -> None:
        content = json.dumps(message).encode()
        writer.write(LENGTH.pack(len(content)) + content)

    environment = await received(reader)
    if environment is None:
        return
    hosting = EpisodeRunner(environment, say)
    async with hosting.environment.serving():
        say({"ready": True})
        while (message := await received(reader)) is not None:
            hosting.take(message)
    os._exit(0)  # the starter of this process ends its children


if __name__ == "__main__":
    if len(sys.argv) == 4:
        with open(sys.argv[1]) as file:
            print_tasks(json.load(file), int(sys.argv[2]), int(sys.argv[3]))
    else:
        asyncio.run(host(os.environ["SLIPSTREAM_EPISODES"]))
