"""Engines that others have started outside of the run, and that join it, serve and leave.

    GET    /engines           the engines of the run
    POST   /engines           {"url": ..., "key": ...}: a server joins, and gets a name
    GET    /room              refused if no server can join now: asked before one is started
    GET    /engines/NAME      where it stands, as soon as it has left, or after some seconds
    DELETE /engines/NAME      it begins to leave, and has left when no request is sent to it any more

    asked for its facts ──► refused, or: gets the current version ──► serves ──► leaves, or is lost

Every request carries the key of ``engines.json`` in the run folder. A server that joins holds the weights of
``model.path``, and gets the current version before its first request, as an engine does that starts again: no
publication intervenes. When it leaves, its requests go on elsewhere with the tokens that they have.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from slipstream.backend.driver.processes.engines import EngineLimits
from slipstream.backend.driver.start.identity import identify
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.connection import EngineError, EngineLost
from slipstream.rollout.engine.patches import VERSION
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.server_process import ServerAccess
from slipstream.rollout.engine.supervisor import Supervisor
from slipstream.rollout.system.durable import write_durably
from slipstream.rollout.system.key import Key, new_key

ENGINES = "engines.json"
"""File of the run folder with the address and the key of this service. Only the owner of the run reads it."""

ASKED_AGAIN_S = 20.0
"""Longest time for which a question where an engine stands is not answered."""

ASKED = "it was asked to"
"""Why an engine has left that was to leave."""

RUN_ENDED = "the run has ended"
"""Why an engine has left that has served to the end of the run."""

KEPT = 64
"""Number of engines that have left whose reasons are kept."""

CODE = ("rollout.engine", "bridge.engine", "bridge.group", "bridge.transport")
"""Packages of which a server and the driver need the same version."""


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a server that joins says of itself."""

    url: str
    key: str


class EngineState(msgspec.Struct):
    """One engine, as the service tells of it."""

    name: str
    url: str = ""
    serves: bool = False
    joined: bool = False
    """It was started outside of the run."""
    leaving: bool = False
    """It was asked to leave, and has not left: it gets a version, or its last requests move on."""
    left: str | None = None
    """Why it has left; null: it has not."""


class JoinRefused(Exception):
    """A server cannot serve this run. The message has every reason."""


def facts_of(config: RunConfig, limits: EngineLimits) -> dict[str, str]:
    """Return what a server of this recipe must say of itself. Reads files of the model."""
    engine = config.rollout.engine
    return {
        "model": str(identify(config.model.path)),
        "vocabulary": str(limits.vocab_size),
        "context": str(limits.max_length),
        "ranks": str(limits.ranks),
        "dtype": engine.quantization or config.model.dtype,
        "transport": config.weights.transport.type,
        "adapter": str(limits.adapter),
        "SGLang": VERSION,
        "Slipstream": code_digest(),
    }


@cache
def code_digest(packages: tuple[str, ...] = CODE) -> str:
    """Return a digest of the code that a server and its driver share, as it is at the first call."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(f"slipstream.{package}")
        assert spec is not None and spec.submodule_search_locations
        for file in sorted(Path(spec.submodule_search_locations[0]).glob("*.py")):
            digest.update(f"{package}.{file.stem}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class JoinedEngine:
    """An ``EngineHandle`` of a server that somebody else starts and ends."""

    def __init__(
        self, name: str, access: ServerAccess, limits: EngineLimits, expected: Mapping[str, str]
    ) -> None:
        """``expected``: what the server must say of itself."""
        self.name = name
        self._address = limits.address(name, access)
        self._expected = expected
        self._leaving = asyncio.Event()

    async def placed(self) -> str:
        return self._address.url

    def give_up_place(self, *, unfit: bool) -> None:
        """Do nothing: its place is not the run's."""

    async def start(self) -> EngineAddress:
        """Compare what the server says of itself. Raises JoinRefused."""
        timeout_s = self._address.answer_timeout_s
        try:
            async with asyncio.timeout(timeout_s), EngineClient(self._address) as client:
                told, version = await client.facts(), await client.weight_version()
        except (EngineError, EngineLost, ValueError, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise JoinRefused(
                f"{self._address.url} does not say what it serves: {reason}; expected a server that "
                "`slipstream engine join` has started, and its key"
            ) from None
        wrong = [
            f"{name}: {told.get(name, 'nothing')} found, {wanted} expected"
            for name, wanted in self._expected.items()
            if told.get(name) != wanted
        ]
        if version != 0:
            wrong.append(f"weights of version {version} found, 0 expected: start the server again")
        if wrong:
            raise JoinRefused("; ".join(wrong))
        return self._address

    async def wait_exit(self) -> int:
        """Wait until the engine is to leave. Its death is noticed by questions."""
        await self._leaving.wait()
        return 0

    async def stands(self) -> str:
        """Return nothing: its processes are on another machine."""
        return ""

    async def stop(self) -> None:
        """Do nothing: whoever has started the server ends it."""

    @property
    def leaves(self) -> bool:
        """True when it was asked to leave."""
        return self._leaving.is_set()

    def leave(self) -> None:
        """Let the engine leave as soon as it serves."""
        self._leaving.set()


class JoinedEngines:
    """Serves who adds and removes engines. Single event loop."""

    def __init__(
        self,
        supervisor: Supervisor,
        roster: EngineRoster,
        limits: EngineLimits,
        expected: Callable[[], dict[str, str]],
        folder: Path,
        note: Callable[[str], None],
        *,
        barred: str | None = None,
    ) -> None:
        """``expected``: returns what a server must say of itself, and may take a while. ``folder``: run
        folder. ``barred``: why no server can join; None: servers can.
        """
        self._supervisor = supervisor
        self._roster = roster
        self._limits = limits
        self._expected = expected
        self._known: dict[str, str] | None = None
        self._file = folder / ENGINES
        self._note = note
        self._barred = barred
        self._key = new_key()
        self._handles: dict[str, JoinedEngine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, str] = {}
        self._joining = asyncio.Lock()
        self._number = 0
        code_digest()  # now: the files may be those of a later version when the first server joins

    @asynccontextmanager
    async def serving(self, host: str) -> AsyncGenerator[None]:
        """Listen on ``host`` inside the block, and say in the run folder where. All joined engines leave at
        its end.
        """
        app = web.Application(middlewares=[self._checked])
        app.router.add_get("/engines", self._list)
        app.router.add_post("/engines", self._join)
        app.router.add_get("/room", self._room)
        app.router.add_get("/engines/{name}", self._state)
        app.router.add_delete("/engines/{name}", self._remove)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, 0).start()
            url = f"http://{host}:{runner.addresses[0][1]}"
            write_durably(self._file, json.dumps({"url": url, "key": str(self._key)}), mode=0o600)
            yield
        finally:
            # The file is another driver's when that driver has taken the run over.
            if self._file.exists() and str(self._key) in self._file.read_text(encoding="utf-8"):
                self._file.unlink()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await runner.cleanup()

    async def keep(self, host: str) -> None:
        """Serve until cancelled."""
        async with self.serving(host):
            await asyncio.get_running_loop().create_future()

    def states(self) -> list[EngineState]:
        """Return all engines, those that have joined last."""
        serving = {client.name for client in self._roster.clients}
        leaving = {name for name, handle in self._handles.items() if handle.leaves}
        return [
            EngineState(name, url, name in serving, name in self._handles, name in leaving)
            for name, url in self._supervisor.where().items()
        ]

    # ---- requests

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._key.header.encode()):
            return _refusal(
                401, f"this request has no valid key: expected that of {ENGINES} in the run folder"
            )
        return await handler(request)

    async def _list(self, request: web.Request) -> web.Response:
        return _json(self.states())

    async def _join(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=JoinRequest)
            if not asked.url.startswith("http://"):
                raise ValueError(f"url: {asked.url!r} found, http://HOST:PORT expected")
        except (ValueError, msgspec.ValidationError) as error:
            return _refusal(400, str(error))
        async with self._joining:
            try:
                return _json(EngineState(await self._admitted(asked), asked.url, joined=True))
            except JoinRefused as refused:
                self._note(f"{asked.url} was refused as an engine: {refused}")
                return _refusal(409, str(refused))

    async def _room(self, request: web.Request) -> web.Response:
        try:
            self._check_room()
        except JoinRefused as refused:
            return _refusal(409, str(refused))
        return _json({})

    def _check_room(self) -> None:
        """Raise JoinRefused if no server can join now."""
        if self._barred is not None:
            raise JoinRefused(self._barred)
        if not self._supervisor.has_room:
            raise JoinRefused("the run has as many engines as rollout.engine.max_count allows")

    async def _admitted(self, asked: JoinRequest) -> str:
        """Take a server in, and return its name. Raises JoinRefused."""
        self._check_room()
        if asked.url in self._supervisor.where().values():
            raise JoinRefused(f"{asked.url} is an engine of the run already")
        if self._known is None:
            self._known = await asyncio.to_thread(self._expected)
        name = f"joined-{self._number}"
        handle = JoinedEngine(name, ServerAccess(asked.url, Key(asked.key)), self._limits, self._known)
        await handle.start()
        self._check_room()
        self._number += 1
        self._handles[name] = handle
        self._note(f"{name} joins from {asked.url}")
        self._tasks[name] = asyncio.create_task(self._keep(handle), name=name)
        await asyncio.sleep(0)  # it counts from now on
        return name

    async def _keep(self, handle: JoinedEngine) -> None:
        reason = RUN_ENDED
        try:
            reason = await self._supervisor.keep_joined(handle)
            reason = ASKED if handle.leaves else reason
        finally:
            del self._handles[handle.name], self._tasks[handle.name]
            self._left[handle.name] = reason
            if len(self._left) > KEPT:
                del self._left[next(iter(self._left))]
            self._note(f"{handle.name} has left: {reason}")

    async def _state(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if (task := self._tasks.get(name)) is not None:
            await asyncio.wait({task}, timeout=ASKED_AGAIN_S)
        return self._standing(name)

    def _standing(self, name: str) -> web.Response:
        if name in self._left:
            return _json(EngineState(name, joined=True, left=self._left[name]))
        for state in self.states():
            if state.name == name:
                return _json(state)
        return self._unknown(name)

    async def _remove(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        handle = self._handles.get(name)
        if handle is not None:
            handle.leave()
        elif name in self._supervisor.where():
            return _refusal(
                409, f"{name} was started by the run, which ends it; expected one that has joined"
            )
        return self._standing(name)

    def _unknown(self, name: str) -> web.Response:
        there = ", ".join(self._supervisor.where()) or "none"
        return _refusal(404, f"there is no engine {name}; the run has: {there}")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": reason}), content_type="application/json"
    )


def barred(config: RunConfig) -> str | None:
    """Return why no server can join a run of this recipe; None: servers can."""
    if config.weights.transport.type == "tensor" and not config.actor.serves_adapter:
        return (
            "weights.transport.type is tensor, which shares memory with engines of the run alone; expected "
            "shards, disk or delta"
        )
    return None
