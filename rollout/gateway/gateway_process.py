"""One gateway process: from its specification to its orderly end. No endpoint and no session in here.

    journal ──► sessions as they were ──► endpoints ──► users
       └──► link ──► driver            engine pool ◄── routing records

    python -m slipstream.rollout.gateway.gateway_process '{"run": ..., "number": 0, "processes": 1, ...}'

The process takes its settings from the recipe in the run folder, and finds the driver there, too. It may
outlive the driver, whose successor takes it over. It ends by SIGTERM, after ``linger_s`` seconds without a
driver, and when its journal fails: then it must not take another request. The process that started it starts
it again, unless its exit code is WRONG_INPUT; one that was killed is forked again (``run_forked``).
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from slipstream.rollout.engine.descriptors import RESERVED, make_room, raise_limit
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.server_process import let_import_sglang
from slipstream.rollout.gateway.administration import Administration
from slipstream.rollout.gateway.engines import EngineTokens
from slipstream.rollout.gateway.forward import Forwarding, Owners, PeersOnly
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.journal_file import DamagedJournal, JournalError
from slipstream.rollout.gateway.keys import KEY_VARIABLE, ApiKeys, KeysError, keys_file
from slipstream.rollout.gateway.link import DriverLink
from slipstream.rollout.gateway.peers import (
    GatewayAddress,
    journal_of,
    name_of,
    read_address,
    remove_address,
    shared_secret,
    write_address,
)
from slipstream.rollout.gateway.port import PortServer
from slipstream.rollout.gateway.spec import Build, GatewaySpec, GatewaySurroundings, Served
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.system.disk import telling_of_stalls
from slipstream.rollout.system.garbage import (
    keep_few_heaps,
    kept_for_good,
    look_seldom_for_garbage,
    return_free_memory,
)
from slipstream.rollout.system.key import Application, Key
from slipstream.rollout.system.linux import PR_SET_PDEATHSIG, prctl
from slipstream.rollout.system.restarts import RestartLimit, Restarts
from slipstream.rollout.system.steady_clock import steady_s
from slipstream.rollout.tokens.tokenizer import Decode
from slipstream.rollout.tokens.turn_entries import Entry

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

SWEEP_S = 5.0
"""Time between two looks for sessions that have rested for too long."""

RETURN_S = 10.0
"""Time after which free memory is given back again: requests of megabytes leave holes."""

GRACE_S = 4.0
"""Time that running answers have at an orderly end."""

CLOSE_S = 1.0
"""Time for the ends of answers that were cut off."""

HANDOVER_S = 2.0
"""Time for handing over what is left at an orderly end. The rest stays in the journal."""

END_S = 9.0
"""Longest time of an orderly end, after which the process ends at once: the journal has what counts."""

WRONG_INPUT = 2
"""Exit code of a process that would fail in the same way again."""

DESCRIPTORS = 2
"""Descriptors of a request: its connections with the user and with the engine."""


class GatewayFailed(RuntimeError):
    """A gateway process cannot start or go on. The message says why and what to do."""


async def serve(
    spec: GatewaySpec,
    *,
    build: Build,
    decode: Decode,
    stop: asyncio.Event,
    ready: Callable[[GatewayAddress], None],
) -> None:
    """Serve users until ``stop`` is set. ``ready`` is called when they can reach the process.

    ``build`` makes endpoints and sessions, and ``decode`` returns the text of token ids.

    Raises GatewayFailed, KeysError and JournalError when the process cannot start or go on.
    """
    config, gateway = spec.config, spec.gateway
    async with AsyncExitStack() as stack:
        path, name = journal_of(spec.run, spec.number), name_of(spec.number)
        journal = await asyncio.to_thread(TurnJournal.open, path, name)
        stack.push_async_callback(_close_journal, journal)
        stack.enter_context(telling_of_stalls(log.warning, "Answers end when it does"))
        room = make_room(gateway.limits.concurrent, setting="gateway.limits.concurrent", each=DESCRIPTORS)
        pool = EnginePool(
            wait_timeout_s=config.rollout.engine.start_timeout_s,
            isolate_versions=config.weights.interrupt == "in_place",
            most_requests=room,
            report=lambda: link.report(),
        )
        stack.push_async_callback(pool.close)
        link = DriverLink(journal, pool, lambda: DriverAddress.read(spec.run))
        keys = ApiKeys(keys_file(spec.gateway, spec.run), environment=os.environ.get(KEY_VARIABLE, ""))
        owners = Owners(spec.number, spec.processes)
        retained = ((row.number, row.entry()) for row in journal.retained())
        source = EngineTokens(pool, decode)
        served = build(GatewaySurroundings(spec, source, journal, keys, retained, decode, owners.mint))
        app: Application = served.app
        if owners.processes > 1:
            forwarding = Forwarding(
                served.app,
                owners,
                keys,
                lambda number: read_address(spec.run, number),
                longest_body=gateway.limits.body_bytes,
            )
            stack.push_async_callback(forwarding.close)
            app = forwarding
        look_seldom_for_garbage()
        places = max(
            1, raise_limit() - RESERVED - room
        )  # each answer that runs has a connection to an engine, too
        await _Process(spec, shared_secret(spec.run), journal, link, served, app, places).run(stop, ready)


class _Process:
    """Everything that runs in a gateway process, and the order in which it ends."""

    def __init__(
        self,
        spec: GatewaySpec,
        secret: Key,
        journal: TurnJournal,
        link: DriverLink,
        served: Served,
        app: Application,
        places: int,
    ) -> None:
        """``places``: number of connections that users may have."""
        self._places = places
        self._spec = spec
        self._secret = secret
        self._journal = journal
        self._link = link
        self._served = served
        self._app = app
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self, stop: asyncio.Event, ready: Callable[[GatewayAddress], None]) -> None:
        """Serve until ``stop`` is set, or something fails."""
        servers = self._servers()
        try:
            self._start(self._link.run(), "handing over")
            self._start(self._journal.failed(), "watching the journal")
            self._start(self._sweep(), "ending sessions")
            self._start(self._linger(), "waiting for a driver")
            for server in servers:
                self._start(server.serve(), f"serving {server.url}")
                await server.is_listening.wait()
            address = self._address(servers)
            write_address(self._spec.run, self._spec.number, address)
            ready(address)
            self._start(stop.wait(), "waiting for the end")
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not stop.is_set():
                raise GatewayFailed(f"{' and '.join(task.get_name() for task in done)} has ended by itself")
            await self._end(servers)
        finally:
            remove_address(self._spec.run, self._spec.number)
            for server in servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _end(self, servers: Sequence[PortServer]) -> None:
        """Let answers end, record those that do not, and hand over what is left."""
        for server in servers:
            server.should_exit = True
        await _ended(servers, GRACE_S)
        with suppress(JournalError):
            await self._served.close()
        for server in servers:
            server.force_exit = True
        await _ended(servers, CLOSE_S)
        if self._link.connected.is_set():
            with suppress(TimeoutError, JournalError):
                async with asyncio.timeout(HANDOVER_S):
                    await self._journal.handed_over()

    def _start(self, work: Awaitable[object], name: str) -> asyncio.Task[object]:
        async def run() -> object:
            return await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        return task

    async def _sweep(self) -> None:
        returned_s = steady_s()
        while True:
            await asyncio.sleep(SWEEP_S)
            entries = self._served.sweep(steady_s())
            if entries:
                self._journal.append(entries)
            if steady_s() > returned_s + RETURN_S:
                await asyncio.to_thread(return_free_memory)
                returned_s = steady_s()

    async def _linger(self) -> None:
        """Wait until there was no driver for too long. Raises GatewayFailed."""
        while True:
            try:
                async with asyncio.timeout(self._spec.linger_s):
                    await self._link.connected.wait()
            except TimeoutError:
                raise GatewayFailed(
                    f"no driver has come for {self._spec.linger_s:.0f} s: go on with the run by `--resume`; "
                    "the journal keeps what was not handed over"
                ) from None
            await self._link.disconnected.wait()

    async def _record(self, entries: Sequence[Entry]) -> None:
        if entries:
            await self._journal.durable(self._journal.append(entries)[-1])

    def _servers(self) -> tuple[PortServer, PortServer, PortServer]:
        spec, gateway = self._spec, self._spec.gateway
        admin = Administration(self._served.figures, self._served.forget, self._record, self._secret)
        shared = spec.processes > 1
        opened: list[socket.socket] = []
        try:
            for setting, host, port, together in (
                ("gateway.port", gateway.host, gateway.port, shared),
                ("gateway.admin_port", LOOPBACK, gateway.admin_port + spec.number, False),
                ("", LOOPBACK, 0, False),
            ):
                opened.append(_bound(setting, host, port, together=together))
        except BaseException:
            for listener in opened:
                listener.close()
            raise
        users, administration, peers = opened
        return (
            PortServer(self._app, users, most_connections=self._places),
            PortServer(admin, administration),
            PortServer(PeersOnly(self._served.app, self._secret), peers),
        )

    def _address(self, servers: tuple[PortServer, PortServer, PortServer]) -> GatewayAddress:
        users, admin, peers = (server.url for server in servers)
        return GatewayAddress(os.getpid(), users, admin, peers, str(self._secret))


async def _ended(servers: Sequence[PortServer], timeout_s: float) -> None:
    """Wait until servers have ended, for ``timeout_s`` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(server.has_ended.wait() for server in servers))


def _bound(setting: str, host: str, port: int, *, together: bool) -> socket.socket:
    """Return a socket that is bound. ``together``: other processes of the gateway bind the port as well."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if together:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise GatewayFailed(
            f"{host}:{port} cannot be listened on: {error.strerror or error}: end what listens there, or set "
            f"{setting} to another one"
        ) from error
    return listener


async def _close_journal(journal: TurnJournal) -> None:
    with suppress(JournalError):  # the tasks that waited for it have been told
        await asyncio.to_thread(journal.close)


# ---- the program


async def _main(spec: GatewaySpec, build: Build, decode: Decode) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        if not stop.is_set():
            stop.set()
            loop.call_later(END_S, os._exit, 1)

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is for the starter

    def ready(address: GatewayAddress) -> None:
        log.info("users reach %s, and figures are at %s/metrics", address.url, address.admin)

    await serve(spec, build=build, decode=decode, stop=stop, ready=ready)


def run(
    argument: str,
    read: Callable[[str], GatewaySpec],
    parts: Callable[[GatewaySpec], tuple[Build, Decode]],
    *,
    forks: bool = False,
) -> int:
    """Run a gateway process until its end. Return its exit code.

    ``forks``: this process makes the parts, and serves in a child (``run_forked``).
    """
    keep_few_heaps()
    import uvloop

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(spec, *made))

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        spec = read(argument)
        os.umask(spec.config.run.umask)
        made = parts(spec)
    except (KeysError, ValueError) as error:
        log.error("%s", error)
        return WRONG_INPUT
    except OSError as error:
        log.error("%s", error)
        return 1
    return run_forked(partial(_exit_code, serve)) if forks else _exit_code(serve)


def _exit_code(serve: Callable[[], None]) -> int:
    """Return the exit code of a process that has served."""
    try:
        serve()
    except (KeysError, ValueError, DamagedJournal) as error:
        log.error("%s", error)
        return WRONG_INPUT
    except (GatewayFailed, JournalError, OSError) as error:
        log.error("%s", error)
        return 1
    return 0


def _parts(spec: GatewaySpec) -> tuple[Build, Decode]:
    """Return what the process serves. Imports SGLang, for which this process is prepared first."""
    let_import_sglang()
    with kept_for_good():
        from slipstream.rollout.gateway.compose import build
        from slipstream.rollout.tokens.tokenizer import load_tokenizer

    return build, load_tokenizer(spec.config.model.path).decode


LIMIT = RestartLimit("the gateway", allowed=10, window_s=3600.0, progress="it has not served", same=None)
"""Restarts by a fork. Beyond them the starter decides, whose limit is the recipe's."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_forked(serve: Callable[[], int]) -> int:
    """Run ``serve`` in a child, and again after each child that was killed. Return the exit code.

        imports everything ──► fork ──► serves ──► killed ──► fork ──► serves ──► ends ──► exit code
        (seconds of a core)             (a child)             (no imports)

    This process only waits. A child that was killed has said nothing about its input, and leaves its sessions
    in the journal. Whatever else ends it is for the starter of both. The child gets the signals to end that
    this process gets, and dies with it.
    """
    ends = False
    child = 0

    def forward(number: int, _frame: object) -> None:
        nonlocal ends
        ends = ends or number == signal.SIGTERM
        with suppress(ProcessLookupError):
            os.kill(child, number)

    restarts = Restarts(LIMIT)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until both know what to do with them
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _serve_as_child(serve, parent)
        for number in SIGNALS:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or ends:
            return abs(code)
        failure = f"it has ended by signal {-code}"
        if (refused := restarts.refused(failure)) is not None:
            log.error("the gateway %s", refused)
            return 1
        log.warning("the gateway is started again by a fork: %s", failure)


def _serve_as_child(serve: Callable[[], int], parent: int) -> None:
    """Run ``serve``, and end this process with its exit code."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else the parent has died before
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = serve()
    except BaseException:
        log.exception("the gateway has failed")
    finally:
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], GatewaySpec.read, _parts, forks=True))
