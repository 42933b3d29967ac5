"""Keep a process group of the sender and the engines, and replace it when its members change."""

import asyncio
import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from slipstream.bridge.publish.endpoint import EngineEndpoint, error_text
from slipstream.bridge.transport.rendezvous import BroadcastGroup, Rendezvous

Fail = Callable[[EngineEndpoint, str], None]
"""Called with each engine that could not join, and the reason."""


class EngineGroup:
    """The current group. Single caller.

    Blocking calls run in a thread that belongs to the group, so that a thread which a dead peer blocks is
    abandoned together with its group.
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
        self._joined: dict[Hashable, set[str]] = {}
        """By engine address, the groups that the engine has joined and was not asked to leave."""
        self._count = 0
        """Number of groups that were tried so far, for their names."""

    async def join(self, engines: list[EngineEndpoint], fail: Fail) -> list[EngineEndpoint]:
        """Make the members exactly ``engines``, without those that cannot join. Returns the members."""
        while engines and self._members != _addresses(engines):
            self.drop()
            await asyncio.gather(*map(self._leave, engines))
            engines = await self._open(engines, fail)
        return engines

    async def send(self, flat: Tensor) -> None:
        """Broadcast one flat tensor to all members. Raises BroadcastFailed."""
        if self._group is None or self._thread is None:
            raise RuntimeError("there is no group to send to: join engines first")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._group.send, flat)

    def drop(self) -> None:
        """Close the current group. Its members are asked to leave it before they join the next one."""
        if self._group is not None and self._thread is not None:
            self._thread.submit(self._group.close)
            self._thread.shutdown(wait=False)
        self._group, self._thread, self.name, self._members = None, None, "", frozenset()

    async def _leave(self, engine: EngineEndpoint) -> None:
        """Ask the engine to leave its old groups. Errors are ignored: they do not prevent a new group."""
        requests = (engine.leave_group(group) for group in self._joined.pop(engine.address, ()))
        await asyncio.gather(
            *(asyncio.wait_for(request, self._timeout_s) for request in requests), return_exceptions=True
        )

    async def _open(self, engines: list[EngineEndpoint], fail: Fail) -> list[EngineEndpoint]:
        """Try to open a group with all ``engines``.

        Returns all engines if it succeeds, and otherwise the engines to try again with.
        """
        self._count += 1
        name = f"{self._label}-{self._count}"
        *offsets, world_size = itertools.accumulate((engine.ranks for engine in engines), initial=1)
        rendezvous = Rendezvous(self._address, world_size, self._timeout_s)
        thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        opening = thread.submit(BroadcastGroup, self._backend, rendezvous, name, self._timeout_s)
        opened = asyncio.wrap_future(opening)
        joins = [
            asyncio.ensure_future(
                engine.join_group(
                    address=self._address,
                    port=rendezvous.port,
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
            rendezvous.close()
            thread.submit(lambda: opening.result().close())
            thread.shutdown(wait=False)
            return await self._remaining(engines, joins, opened, name, fail)
        self._group, self._thread, self.name = opened.result(), thread, name
        self._members = _addresses(engines)
        self._note_joined(name, engines)
        return engines

    async def _remaining(
        self,
        engines: Sequence[EngineEndpoint],
        joins: Sequence[asyncio.Future[None]],
        opened: asyncio.Future[BroadcastGroup],
        name: str,
        fail: Fail,
    ) -> list[EngineEndpoint]:
        """Blame engines for a group that was called off. Returns the engines that may try again.

        Engines that refused to join are to blame. The other engines waited for a member that would not come,
        and the error with which their wait ends is not held against them. If no engine refused, the engines
        that did not answer are to blame; if all of them answered, all are.
        """
        refused = [join for join in joins if join.done() and join.exception()]
        sender_error = opened.exception() if opened.done() and not refused else None
        late = [join for join in joins if not join.done()]
        if refused and late:
            await asyncio.wait(late, timeout=self._timeout_s)
        remaining: list[EngineEndpoint] = []
        for engine, join in zip(engines, joins, strict=True):
            error = join.exception() if join.done() else None
            if join in refused:
                assert error is not None
                fail(engine, error_text(error))
            elif not join.done() or not (refused or late):
                join.cancel()
                no_answer = f"no answer in {self._timeout_s:.0f} s"
                fail(engine, error_text(sender_error) if sender_error else no_answer)
            else:
                remaining.append(engine)
                if not error:
                    self._note_joined(name, [engine])
        opened.cancel()
        return remaining

    def _note_joined(self, name: str, engines: Sequence[EngineEndpoint]) -> None:
        for engine in engines:
            self._joined.setdefault(engine.address, set()).add(name)


def _addresses(engines: Sequence[EngineEndpoint]) -> frozenset[Hashable]:
    return frozenset(engine.address for engine in engines)
