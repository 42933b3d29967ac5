"""The process group of the sender and the engines, made anew whenever its members change."""

import asyncio
import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from slipstream.bridge.endpoint import EngineEndpoint, told
from slipstream.bridge.transport.rendezvous import BroadcastGroup, Rendezvous

Fail = Callable[[EngineEndpoint, str], None]
"""Told which engine could not be joined, and why."""


Join = asyncio.Future[None]


class EngineGroup:
    """Single caller. What blocks happens in the present group's own thread, so that one which a dead peer
    holds up is left behind with its group.
    """

    def __init__(self, *, address: str, backend: str, timeout_s: float, label: str) -> None:
        self._address = address
        self._label = label
        self._backend = backend
        self._timeout_s = timeout_s
        self.name = ""
        self._members: frozenset[Hashable] = frozenset()
        self._group: BroadcastGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._held: dict[Hashable, set[str]] = {}
        """By address, the groups that an engine has joined and was not asked to leave."""
        self._made = 0

    async def join(self, engines: list[EngineEndpoint], fail: Fail) -> list[EngineEndpoint]:
        """Make the members exactly ``engines``, less those that cannot be joined; the members."""
        while engines and self._members != {engine.address for engine in engines}:
            self.drop()
            await asyncio.gather(*map(self._leave, engines))
            engines = await self._meet(engines, fail)
        return engines

    async def send(self, flat: Tensor) -> None:
        """Broadcast one flat tensor to all members. Raises what the transport raises."""
        if self._group is None or self._thread is None:
            raise RuntimeError("there is no group to send to: join engines first")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._group.send, flat)

    def drop(self) -> None:
        """The present group is not used again. Its members are asked to leave when they join another one."""
        if self._group is not None and self._thread is not None:
            self._thread.submit(self._group.close)
            self._thread.shutdown(wait=False)
        self._group, self._thread, self.name, self._members = None, None, "", frozenset()

    async def _leave(self, engine: EngineEndpoint) -> None:
        """Whatever comes of it: an engine that keeps an old group is no obstacle to a new one."""
        leaving = (engine.leave_group(group) for group in self._held.pop(engine.address, ()))
        await asyncio.gather(
            *(asyncio.wait_for(one, self._timeout_s) for one in leaving), return_exceptions=True
        )

    async def _meet(self, engines: list[EngineEndpoint], fail: Fail) -> list[EngineEndpoint]:
        """Try to make a group of all ``engines``. Those to try again with; when it was made, that is all."""
        self._made += 1
        name = f"{self._label}-{self._made}"
        *offsets, world_size = itertools.accumulate((engine.ranks for engine in engines), initial=1)
        meeting = Rendezvous(self._address, world_size, self._timeout_s)
        thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        opening = thread.submit(BroadcastGroup, self._backend, meeting, name, self._timeout_s)
        opened = asyncio.wrap_future(opening)
        joins = [
            asyncio.ensure_future(
                engine.join_group(
                    address=self._address,
                    port=meeting.port,
                    rank_offset=offset,
                    world_size=world_size,
                    group=name,
                    backend=self._backend,
                )
            )
            for engine, offset in zip(engines, offsets, strict=True)
        ]
        _, late = await asyncio.wait(
            {opened, *joins}, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if late or opened.exception() or any(join.exception() for join in joins):
            meeting.close()
            thread.submit(lambda: opening.result().close())
            thread.shutdown(wait=False)
            return await self._who_remains(engines, joins, opened, name, fail)
        self._group, self._thread, self.name = opened.result(), thread, name
        self._members = frozenset(engine.address for engine in engines)
        self._holds(name, engines)
        return engines

    async def _who_remains(
        self, engines: list[EngineEndpoint], joins: list[Join], opened: asyncio.Future, name: str, fail: Fail
    ) -> list[EngineEndpoint]:
        """Who may try again after a meeting that was called off: all but those whom it failed for.

        That is who refused. The others waited for one that would not come, and what they answer to the end of
        the meeting is not held against them. When nobody refused it is who did not answer, or everybody.
        """
        refused = [join for join in joins if join.done() and join.exception()]
        sender_error = opened.exception() if opened.done() and not refused else None
        late = [join for join in joins if not join.done()]
        if refused and late:
            await asyncio.wait(late, timeout=self._timeout_s)
        remaining = []
        for engine, join in zip(engines, joins, strict=True):
            if join in refused:
                fail(engine, told(join.exception()))
            elif not join.done() or not (refused or late):
                join.cancel()
                fail(engine, told(sender_error) if sender_error else f"no answer in {self._timeout_s:.0f} s")
            else:
                remaining.append(engine)
                if not join.exception():
                    self._holds(name, [engine])
        opened.cancel()
        return remaining

    def _holds(self, name: str, engines: Sequence[EngineEndpoint]) -> None:
        for engine in engines:
            self._held.setdefault(engine.address, set()).add(name)
