"""An engine of a run that is started outside of it: on another machine, or beside a job.

server starts from model.path ──► joins the driver ──► serves ──SIGTERM──► leaves ──► server ends
                                                         └── it is lost, or the run ends: the server ends, too

The settings are those of the run, from ``recipe.yaml`` in its folder. Both sides need that folder, and the
model.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from slipstream.backend.cluster.engine_spec import adapters_of, engine_spec
from slipstream.backend.driver.processes.engines import INITIAL_VERSION, EngineLimits
from slipstream.backend.driver.processes.joined_engines import (
    ASKED,
    ASKED_AGAIN_S,
    ENGINES,
    RUN_ENDED,
    EngineState,
    facts_of,
)
from slipstream.backend.driver.start.inputs import InputError
from slipstream.backend.driver.start.run_folder import LOGS
from slipstream.backend.trainer.engine_checkpoint import engine_model_of
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.config import UnsupportedModel
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.actor import EngineActor
from slipstream.rollout.engine.adapters import POLICY
from slipstream.rollout.engine.server_process import ServerAccess
from slipstream.rollout.system import plugins
from slipstream.rollout.system.key import Key
from slipstream.slurm.own_address import route_source

LOOKED_AGAIN_S = 1.0
"""Seconds before a driver is asked again that has not answered."""

GONE_S = 60.0
"""Time after which a driver that does not answer counts as gone."""

LEAVE_S = 60.0
"""Longest wait for an engine to leave, if a command does not say another one: it may be getting a version."""


class NotAnswered(Exception):
    """The driver of a run refuses, or does not answer. The message has the reason."""


class EngineService:
    """Asks the driver of a run for its engines (``joined_engines``)."""

    def __init__(self, run: Path) -> None:
        """``run``: the run folder. Raises InputError if no driver serves."""
        file = self._file = run / ENGINES
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            self.url, self._key = str(told["url"]), Key(told["key"])
        except FileNotFoundError:
            raise InputError(
                f"{run}: no {ENGINES} found; expected the folder of a run that is training now"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{file} cannot be read: {error}; expected that of a run that is yours"
            ) from None

    async def ask(self, method: str, path: str, body: dict[str, str] | None = None) -> bytes:
        """Return the driver's answer. Raises NotAnswered, and ConnectionError if there is no driver."""
        timeout = aiohttp.ClientTimeout(total=ASKED_AGAIN_S + GONE_S)
        headers = {"Authorization": self._key.header}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, f"{self.url}{path}", json=body) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConnectionError(
                f"the driver at {self.url} does not answer: {type(error).__name__}: {error}"
            ) from None
        if response.status != 200:
            raise NotAnswered(_reason(answer))
        return answer

    async def engines(self) -> list[EngineState]:
        return msgspec.json.decode(await self.ask("GET", "/engines"), type=list[EngineState])

    async def check_room(self) -> None:
        """Raise NotAnswered if no engine can join now."""
        await self.ask("GET", "/room")

    async def join(self, access: ServerAccess) -> str:
        """Let a server join, and return its name."""
        answer = await self.ask("POST", "/engines", {"url": access.url, "key": str(access.key)})
        return msgspec.json.decode(answer, type=EngineState).name

    @property
    def is_over(self) -> bool:
        """True if the driver serves no engines any more because it has ended in order."""
        return not self._file.exists()

    async def remove(self, name: str, wait_s: float = LEAVE_S) -> EngineState:
        """Let an engine leave. Return where it stands when it has left, or after ``wait_s``.

        Raises NotAnswered, and ConnectionError if there is no driver.
        """
        state = msgspec.json.decode(await self.ask("DELETE", f"/engines/{name}"), type=EngineState)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while state.left is None:
                        state = await self._state(name)
        except ConnectionError:
            if not self.is_over:
                raise
        if state.left is None and self.is_over:  # a question that came at its end may have no answer
            state.left = RUN_ENDED
        return state

    async def _state(self, name: str) -> EngineState:
        """Return where an engine stands, as soon as it has left, or after some seconds."""
        return msgspec.json.decode(await self.ask("GET", f"/engines/{name}"), type=EngineState)

    async def left(self, name: str) -> str:
        """Wait until an engine has left, or the driver is gone. Return the reason."""
        clock = asyncio.get_running_loop().time
        heard_s = clock()
        while True:
            try:
                state = await self._state(name)
            except NotAnswered as error:
                return str(error)
            except ConnectionError as error:
                if self.is_over:
                    return RUN_ENDED
                if clock() - heard_s >= GONE_S:
                    return str(error)
                await asyncio.sleep(LOOKED_AGAIN_S)
                continue
            heard_s = clock()
            if state.left is not None:
                return state.left


def leaving(state: EngineState, wait_s: float) -> str:
    """Return what an engine that is still leaving after ``wait_s`` has to finish."""
    finishes = "its last requests move to other engines" if state.serves else "it gets the current version"
    return f"{state.name} is still leaving after {wait_s:g} s: {finishes} first"


async def join(
    config: RunConfig, service: EngineService, run: Path, host: str | None, say: Callable[[str], None]
) -> str | None:
    """Start an engine, let it join the run and serve until SIGTERM, SIGINT or the end of the run. Return why
    it ended otherwise.

    ``host``: address of this machine that the run reaches; None: the one by which the driver is reached.
    Raises InputError, EngineStartError and NotAnswered.
    """
    await service.check_room()
    own = host or route_source(urlsplit(service.url).hostname or "")
    actor = _actor(config, run, own)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    stop = asyncio.ensure_future(stopped.wait())
    try:
        say(f"starting an engine on {own}")
        joining = asyncio.ensure_future(_joined(config, service, actor))
        await asyncio.wait({joining, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            await asyncio.wait({joining})
            return None
        try:
            name = joining.result()
        except ConnectionError:
            if not service.is_over:
                raise
            say(f"{RUN_ENDED} before the engine has joined it")
            return None
        say(f"{name} has joined {run}")
        return await served(service, actor.wait_exit(), name, stop, say)
    finally:
        stop.cancel()
        await actor.stop()


async def _joined(config: RunConfig, service: EngineService, actor: EngineActor) -> str:
    """Start the server, let it join, and return its name."""
    meeting = await actor.meeting_point() if config.rollout.engine.data_parallel > 1 else None
    return await service.join(await actor.start(INITIAL_VERSION, meeting))


async def served(
    service: EngineService,
    exit_code: Awaitable[int],
    name: str,
    stop: asyncio.Future[Literal[True]],
    say: Callable[[str], None],
) -> str | None:
    """Wait for the end of an engine. Let it leave if it is to stop. Return why it has failed; None: it was
    asked to leave, or the run has ended.

    ``exit_code``: of its server, when that has ended.
    """
    left = asyncio.ensure_future(service.left(name))
    ended = asyncio.ensure_future(exit_code)
    try:
        done, _ = await asyncio.wait({stop, left, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        ended.cancel()
    if stop in done:
        with suppress(ConnectionError, NotAnswered):  # a driver that has lost it sends it no requests
            state = await service.remove(name)
            if state.left is None:
                say(f"{leaving(state, LEAVE_S)}; its server ends now")
        return None
    if ended in done:
        return f"{name}: its server exited with code {ended.result()}"
    reason = left.result()
    told = f"{name} has left: {reason}"
    if reason not in (ASKED, RUN_ENDED):
        return told
    say(told)
    return None


def _actor(config: RunConfig, run: Path, host: str) -> EngineActor:
    """Return the owner of the server. Raises InputError."""
    engine, model = config.rollout.engine, config.model
    if engine.nodes > 1:
        raise InputError(
            f"rollout.engine.nodes: {engine.nodes} found, 1 expected: an engine that joins is on one machine"
        )
    try:
        spec = model_spec(model.path, plugins.resolved(model.families))
    except (UnsupportedModel, OSError, ValueError) as error:
        raise InputError(f"model.path: {error}") from error
    adapters = adapters_of(config, spec)
    adapter = None if adapters is None else POLICY
    limits = EngineLimits.of(engine, spec.geometry, config.run.step_timeout_s, adapter=adapter)
    device = config.cluster.device
    on_gpus = device == "gpu" or (device == "auto" and has_gpus())
    name = f"joined-{socket.gethostname()}-{os.getpid()}"
    start_from = engine_model_of(model, engine.quantization, run, spec).path
    server = engine_spec(config, start_from, "cuda" if on_gpus else "cpu", adapters)
    return EngineActor(
        replace(server, host=host, seed=server.seed + os.getpid(), facts=facts_of(config, limits)),
        name=name,
        run=config.run.name,
        umask=config.run.umask,
        logs=run / LOGS,
        start_timeout_s=engine.start_timeout_s,
    )


def _reason(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")[:500]
