"""Keeps the engines serving: starts them, notices lost ones, restarts them, brings them up to date.

    STARTING --healthy--> SYNCING --holds the current version--> SERVING --lost / condemned--> STARTING
                             ^                                      |
                             +-------------- withdrawn -------------+

An engine is in the roster only while SERVING. It is lost when its server ends or stands still: every few
seconds it is asked whether it is well (``unwell``). What its processes do is then written down. It is
admitted while no publication can intervene. An engine is withdrawn when its server is well but its weights
are not whole, because the trainer died while it sent them.

An engine that is lost while it runs users' requests is started again, and that is not counted: no user ends a
run. An engine whose node is lost waits for another node, and the others go on. While fewer than ``fewest``
engines have a node, for ``patience_s`` at most, requests wait if no engine serves. Then the run ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineError, EngineLost
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.restarts import NodeLost, RestartLimit, Restarts

LONGEST_PAUSE_S = 5.0
"""Longest time between two questions."""

LONGEST_PAUSE_OF_SCHEDULERS_S = 60.0
"""Longest time between two questions that a server hands on to its schedulers."""

GIVE_WAY_S = 60.0
"""Longest wait for engines that give way to end what they do. Their processes are ended after it."""

STOOD_STILL = 1.5
"""If an answer is missed by this many times its time-out, this process itself did not run to read it."""


async def unwell(client: EngineClient, *, busy_s: float = 0.0) -> str:
    """Wait until a server does not say that it is well, or its schedulers hang. Return a sentence about it.

    ``busy_s``: longest time for which an update may keep a scheduler from answering.
    """
    hung = _hung(client, max(client.address.timeout_s, busy_s))
    questions = {asyncio.ensure_future(_silent(client)), asyncio.ensure_future(hung)}
    try:
        done, _ = await asyncio.wait(questions, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for question in questions:
            question.cancel()


async def _silent(client: EngineClient) -> str:
    """Ask the process that serves HTTP. It says nothing of the schedulers."""
    clock = asyncio.get_running_loop().time
    timeout_s = client.address.answer_timeout_s
    while True:
        await asyncio.sleep(min(LONGEST_PAUSE_S, timeout_s / 4))
        began, since = clock(), time.strftime("%T")
        if not await client.healthy() and clock() - began < STOOD_STILL * timeout_s:
            return f"it does not say within {timeout_s:g} s that it is well (asked at {since})"


async def _hung(client: EngineClient, timeout_s: float) -> str:
    """Ask the schedulers, which may be busy for as long as a request may stand still."""
    clock = asyncio.get_running_loop().time
    answered, since = clock(), time.strftime("%T")
    while True:
        await asyncio.sleep(min(LONGEST_PAUSE_OF_SCHEDULERS_S, timeout_s / 4))
        asked = clock()
        with suppress(EngineError):  # a refusal is an answer
            try:
                await client.respond()
            except EngineLost:
                if clock() - asked < STOOD_STILL * client.address.timeout_s:
                    if clock() - answered < timeout_s:
                        continue
                    return f"its schedulers have not answered for {timeout_s:g} s, since {since}"
        answered, since = clock(), time.strftime("%T")


SHOWN = 4
"""Number of users' requests that a message names."""


class EngineGone(RuntimeError):
    """An engine must not be started again (``Restarts``)."""


class EngineHandle(Protocol):
    """The owner of one server's process, wherever it runs."""

    name: str

    async def placed(self) -> str:
        """Wait until the engine has a node, and say which one."""
        ...

    def give_up_place(self, *, unfit: bool) -> None:
        """Leave the node, which is lost, or ``unfit`` because the engine does not start there."""
        ...

    async def start(self) -> EngineAddress:
        """Start, or restart, from the run's initial weights. Returns when the server is healthy.

        Raises NodeLost when its node is gone, and what else keeps it from starting.
        """
        ...

    async def wait_exit(self) -> int: ...

    async def stands(self) -> str:
        """Let the processes of an engine that hangs write where they stand. Return what is found, which
        follows the reason in a sentence. Raises nothing.
        """
        ...

    async def stop(self) -> None: ...


class WeightsSource(Protocol):
    """Who knows the current policy version and has its weights. In a run that trains it is
    ``ServedWeights`` of ``backend.driver.weights``, which has the trainer publish to the engine."""

    async def bring_up_to_date(self, engine: EngineAddress, admit: Callable[[], None]) -> str | None:
        """Bring ``engine`` to the current version and call ``admit``. Return None, or why it failed."""
        ...


class Roster(Protocol):
    """The engines that serve: ``EngineRoster``, or the judge's."""

    lost: asyncio.Queue[tuple[EngineClient, str]]
    """Engines to be started again, each once, with the reason."""
    outdated: asyncio.Queue[tuple[EngineClient, str]]
    """Engines to be brought up to date, each once, with the reason."""

    def add(self, client: EngineClient) -> None:
        """Add an engine to those that serve."""
        ...

    def remove(self, client: EngineClient) -> None:
        """Remove an engine from those that serve."""
        ...

    def awaited(self) -> AbstractContextManager[None]:
        """Hold requests back inside the block while no engine serves."""
        ...

    async def suspects(self, name: str) -> list[str]:
        """Return the users' requests that ran on an engine when it was lost last."""
        ...


@dataclass(frozen=True)
class EngineCounts:
    """How many engines there are at least."""

    first: int
    """Number of engines that have a node at the start. All of them serve before the run begins."""
    fewest: int
    """Number of engines below which the run waits for nodes."""
    most: int
    """Number of engines above which none is started."""
    patience_s: float
    """Longest time for which the run waits."""
    setting: str = "rollout.engine.min_count"
    """Setting that ``fewest`` is from, for messages."""


@dataclass
class _Engine:
    handle: EngineHandle
    restarts: Restarts
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """It has served."""
    has_node: bool = False
    on_trial: bool = False
    """It has not served yet on its node, which it has got during the run: the node may be at fault."""
    client: EngineClient | None = None
    """Client of the server as last started; None while it is being started."""
    condemned: asyncio.Event = field(default_factory=asyncio.Event)
    outdated: asyncio.Event = field(default_factory=asyncio.Event)
    """Its server is to be brought up to date again."""
    reason: str = ""
    gives_way: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to leave its node, for ``reason``."""


class Supervisor:
    """Single event loop. ``run`` for as long as engines are needed, then ``stop``."""

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        roster: Roster,
        weights: WeightsSource,
        *,
        limit: RestartLimit,
        counts: EngineCounts,
        note: Callable[[str], None],
        watch: Callable[[EngineClient], Awaitable[str]] = unwell,
        pause_s: float = 0.0,
    ) -> None:
        """``limit``: of each engine's restarts. ``watch``: waits until a server is not well, and tells why.
        ``pause_s``: seconds before each restart.
        """
        self._engines = {handle.name: _Engine(handle, Restarts(limit)) for handle in handles}
        self._limit = limit
        self._counts = counts
        self._roster = roster
        self._weights = weights
        self._note = note
        self._watch = watch
        self._pause_s = pause_s
        self._earlier_restarts = 0
        """Restarts on nodes that were given up."""
        self._is_serving = False
        self._changes = Changes()
        self._last_loss = ""

    @property
    def restarts(self) -> int:
        """Number of restarts of all engines so far."""
        return self._earlier_restarts + sum(engine.restarts.count for engine in self._engines.values())

    def condemn(self, name: str, reason: str) -> None:
        """Restart an engine that may hold wrong weights or does not answer.

        Does nothing while the engine is being restarted: a late verdict is about the server that is gone.
        """
        engine = self._engines[name]
        if engine.client is not None and not engine.condemned.is_set():
            engine.reason = reason
            engine.condemned.set()

    async def run(self, serving: asyncio.Event) -> None:
        """Start the first engines, set ``serving`` once every one of them serves, and keep them so. Start
        the others when there is room for them.

        Never returns. Raises, in an ExceptionGroup, EngineGone, the error of an engine's first start, the
        error of bringing an engine up to date, or NodeLost if nodes are missing for too long.
        """
        engines = list(self._engines.values())
        first, later = engines[: self._counts.first], engines[self._counts.first :]
        async with asyncio.TaskGroup() as tasks:
            for engine in first:
                tasks.create_task(self._keep(engine), name=engine.handle.name)
            tasks.create_task(self._watch_roster())
            tasks.create_task(self._watch_outdated())
            for engine in first:
                await engine.started.wait()
            self._is_serving = True
            serving.set()
            for engine in later:
                tasks.create_task(self._keep(engine), name=engine.handle.name)
            tasks.create_task(self._watch_number())

    @property
    def has_room(self) -> bool:
        """True while there are fewer engines than there may be."""
        return self._number < self._counts.most

    @property
    def to_spare(self) -> int:
        """Number of engines without which the run would go on."""
        return max(self._number - max(self._counts.fewest, 1), 0)

    async def give_way(self, names: Sequence[str], reason: str) -> None:
        """Take engines off their nodes, which others need. They wait for other nodes.

        Returns after ``GIVE_WAY_S`` at the latest. Engines that have not left by then are ended as they are.
        """
        leaving = [self._engines[name] for name in names]
        for engine in leaving:
            engine.reason = reason
            engine.gives_way.set()
        try:
            async with asyncio.timeout(GIVE_WAY_S):
                await self._changes.first(lambda: None if any(each.has_node for each in leaving) else True)
        except TimeoutError:
            for engine in leaving:
                if engine.has_node and engine.client is not None:
                    self._roster.remove(engine.client)
                late = f"{reason}; it had not ended what it did after {GIVE_WAY_S:g} s, and was killed"
                self._leave(engine, late, unfit=False)

    def where(self) -> dict[str, str]:
        """Return the address of each engine; empty: it starts, or waits for a node."""
        return {
            name: "" if engine.client is None else engine.client.address.url
            for name, engine in self._engines.items()
        }

    async def keep_joined(self, handle: EngineHandle) -> str:
        """Keep an engine that others have started, until it is lost or leaves. Return the reason.

        It is not started again. No error of its own ends the run.
        """
        engine = self._engines[handle.name] = _Engine(handle, Restarts(self._limit), has_node=True)
        engine.on_trial = True
        self._changes.notify()
        try:
            return await self._serve(engine)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            del self._engines[handle.name]
            self._changes.notify()

    async def stop(self) -> None:
        """End every server."""
        stopping = (engine.handle.stop() for engine in self._engines.values())
        await asyncio.gather(*stopping, return_exceptions=True)

    async def _watch_roster(self) -> None:
        while True:
            client, reason = await self._roster.lost.get()
            if client.name in self._engines and self._engines[client.name].client is client:
                self.condemn(client.name, reason)

    async def _watch_outdated(self) -> None:
        while True:
            client, reason = await self._roster.outdated.get()
            engine = self._engines.get(client.name)
            if engine is not None and engine.client is client:
                self._note(f"{client.name} waits for the next version: {reason}")
                engine.outdated.set()

    async def _watch_number(self) -> None:
        """Raise NodeLost when too few engines have a node for too long."""
        counts = self._counts
        while True:
            await self._changes.first(lambda: True if self._number < counts.fewest else None)
            missing = (
                f"{_engines(self._number)} found that have a node, at least {counts.fewest} expected "
                f"({counts.setting}): {self._last_loss}"
            )
            self._note(f"waiting for nodes for {counts.patience_s:g} s at most: {missing}")
            try:
                with self._roster.awaited():
                    async with asyncio.timeout(counts.patience_s):
                        await self._changes.first(lambda: True if self._number >= counts.fewest else None)
            except TimeoutError:
                raise NodeLost(
                    f"no node has come within {counts.patience_s:g} s (rollout.engine.patience_s). "
                    f"{missing}. Go on with --resume where there are enough nodes, or with fewer engines"
                ) from None

    @property
    def _number(self) -> int:
        """Number of engines that have a node."""
        return sum(engine.has_node for engine in self._engines.values())

    async def _keep(self, engine: _Engine) -> None:
        while True:
            await self._place(engine)
            try:
                reason = await self._serve_until_it_gives_way(engine)
            except NodeLost as lost:
                if not self._is_serving:  # better started again than begun with fewer engines
                    raise
                self._leave(engine, f"its node is lost: {lost}", unfit=False)
                continue
            if engine.gives_way.is_set():
                self._leave(engine, engine.reason, unfit=False)
                continue
            if users := await self._roster.suspects(engine.handle.name):
                engine.restarts.excused()
                reason = (
                    f"{reason}, while it ran {', '.join(users[:SHOWN])}: not counted as a failure of the run"
                )
            elif (refused := engine.restarts.refused(reason)) is not None:
                if not engine.on_trial:
                    raise EngineGone(f"{engine.handle.name} {refused}")
                self._leave(engine, f"it {refused}", unfit=True)
                continue
            self._note(f"{engine.handle.name} is started again: {reason}")
            await asyncio.sleep(self._pause_s)

    async def _place(self, engine: _Engine) -> None:
        if engine.has_node:
            return
        while True:
            await self._changes.first(lambda: self.has_room or None)
            where = await engine.handle.placed()
            if self.has_room:
                break
            engine.handle.give_up_place(unfit=False)  # others have joined while it waited
        engine.has_node, engine.on_trial = True, self._is_serving
        engine.gives_way.clear()
        if self._is_serving:
            self._note(f"{engine.handle.name} is placed on {where}")
        self._changes.notify()

    def _leave(self, engine: _Engine, reason: str, *, unfit: bool) -> None:
        """Take an engine off its node. It waits for another one, and the others go on.

        Does nothing if it has left already, as one that was killed because it did not give way in time.
        """
        if not engine.has_node:
            return
        engine.handle.give_up_place(unfit=unfit)
        engine.has_node = False
        self._earlier_restarts += engine.restarts.count
        engine.restarts = Restarts(self._limit)
        self._last_loss = f"{engine.handle.name} has left its node: {reason}"
        self._note(f"{self._last_loss}; {_engines(self._number)} left")
        self._changes.notify()

    async def _serve_until_it_gives_way(self, engine: _Engine) -> str:
        """Run one life of the engine, which a request for its node ends. Return the reason."""
        serving = asyncio.ensure_future(self._serve(engine))
        leaving = asyncio.ensure_future(engine.gives_way.wait())
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return serving.result() if serving.done() else engine.reason
        finally:
            for each in (serving, leaving):
                each.cancel()
            await asyncio.wait({serving, leaving})

    async def _serve(self, engine: _Engine) -> str:
        """Run one life of the engine, from its start to its loss. Return the reason of the loss."""
        try:
            client = EngineClient(await engine.handle.start())
        except NodeLost:
            raise
        except Exception as error:  # it may pass, unless it repeats
            # At the start the recipe is wrong, most likely, and would be so again.
            if engine.restarts.count == 0 and not engine.on_trial:
                raise
            return f"it did not start: {error}"
        engine.condemned.clear()
        engine.client = client
        try:
            while True:
                engine.outdated.clear()
                refused = await self._weights.bring_up_to_date(
                    client.address, lambda: self._roster.add(client)
                )
                if refused is not None:
                    return f"it could not be brought to the current version: {refused}"
                engine.started.set()
                engine.on_trial = False
                engine.restarts.progressed()
                if (reason := await self._lost(engine)) is not None:
                    return reason
        finally:
            engine.client = None
            self._roster.remove(client)
            await client.close()

    async def _lost(self, engine: _Engine) -> str | None:
        """Wait for the end of the server, or for a verdict on it. Return the reason; None if the server is
        only to be brought up to date.
        """
        exit_code = asyncio.ensure_future(engine.handle.wait_exit())
        condemned = asyncio.ensure_future(engine.condemned.wait())
        outdated = asyncio.ensure_future(engine.outdated.wait())
        assert engine.client is not None
        silent = asyncio.ensure_future(self._watch(engine.client))
        try:
            done, _ = await asyncio.wait(
                {exit_code, condemned, outdated, silent}, return_when=asyncio.FIRST_COMPLETED
            )
            if done == {outdated}:
                return None
            # Collectors notice a dead server first, but its exit code tells more.
            await asyncio.wait({exit_code}, timeout=0.5)
            if exit_code.done():
                return f"its server exited with code {exit_code.result()}"
            self._roster.remove(engine.client)
            return (silent.result() if silent in done else engine.reason) + await engine.handle.stands()
        finally:
            exit_code.cancel()
            condemned.cancel()
            outdated.cancel()
            silent.cancel()


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number} engines"
