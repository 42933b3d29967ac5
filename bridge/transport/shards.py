"""From the shards of the trainer's ranks into the parameters of the engines' ranks, in place.

    begin ─► connect (new engines only) ─► receive ─► end ─► stamp
               describe  where the engine has its weights: a trace of its own loader
               compile   every trainer rank: what it sends to whom
               join      one process group for each engine

The head, which is rank 0 of the trainer, orders engines by request and commands the trainer's ranks through
its store. No weights pass through the store. An engine costs six small requests for a version, whatever the
size of the model: pause, begin, receive, end, stamp and resume. A failure of an engine ends the transfer to
this engine only; its request is the death watch, because its connection breaks with the server.
"""

import asyncio
import itertools
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from slipstream.bridge.engine import orders
from slipstream.bridge.engine.orders import Described, Meeting, Order, RankAnswer
from slipstream.bridge.group.store import put
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.endpoint import EngineEndpoint
from slipstream.bridge.publish.publication import Publication, Timeouts
from slipstream.bridge.shards.sends import EngineSeat
from slipstream.bridge.transport import commands
from slipstream.bridge.transport.commands import Command, command_key, done_key
from slipstream.bridge.transport.ordering import Ordering, TransferFailed
from slipstream.bridge.transport.ways import UnsuitedTransport

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


SLACK = 10
"""Factor of the longest time so far that an engine may take for a version."""


class Unservable(RuntimeError):
    """The published tensors do not fill the engines' parameters: the same for every engine and version."""


@dataclass
class _Connection:
    """An engine that has joined its group."""

    ordering: Ordering
    seat: int
    longest_s: float | None = None
    """Seconds that the longest transfer to this engine took; None: it has got no version yet."""

    @property
    def name(self) -> str:
        """Its name in commands and orders, which no other engine of this head has."""
        return self.ordering.name

    @property
    def engine(self) -> str:
        """Name of the engine, which a rebuilt engine keeps."""
        return self.ordering.engine


class ShardTransport:
    """The head's part. Lives as long as the trainer. Single caller."""

    def __init__(
        self,
        store: "TCPStore",
        meeting: Meeting,
        wanted: Sequence[orders.Tensor],
        *,
        trainer_ranks: int,
        backend: str,
        timeouts: Timeouts,
        engines: int,
        digests: bool,
    ) -> None:
        """``store``: the one of ``meeting``. ``engines``: number of engines that the run is planned for.
        ``digests``: compare every version by digests; else the first one of each engine.
        """
        self._store, self._meeting = store, meeting
        self._trainer_ranks, self._backend, self._timeouts = trainer_ranks, backend, timeouts
        self._engines, self._digests = engines, digests
        self._connections: dict[Hashable, _Connection] = {}
        self._unservable: str | None = None
        self._unsuited: str | None = None
        self._names = itertools.count()
        self._commands = itertools.count()
        put(store, orders.WANTED, list(wanted))

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        """Do nothing: a transfer reads the shards when it needs them."""

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        await publication.each("begin", lambda engine: engine.begin_update())
        await publication.each("connect", self._connect, moves_weights=True)
        publication.report.unservable, publication.report.unsuited = self._unservable, self._unsuited
        sent = await publication.each("receive", lambda engine: self._transfer(engine), moves_weights=True)
        publication.report.bytes_sent += max(sent.values(), default=0)
        await publication.each("end", lambda engine: engine.end_update())
        await publication.each("stamp", lambda engine: engine.rename_version(publication.version))

    def leave(self) -> None:
        """Drop every engine: none of them gets its weights this way any more. Call ``finish`` afterwards."""
        for address in list(self._connections):
            self._drop(address)

    def finish(self) -> None:
        """Let the trainer's ranks go. Must be called after every publication, successful or not.

        The store may close when this returns: every rank has read the end. Raises TransferFailed if one has
        not in time.
        """
        number = self._command(commands.End())
        keys = [done_key(number, rank) for rank in range(self._trainer_ranks)]
        limit_s = self._timeouts.transfer_s
        try:
            self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError as error:
            ranks = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TransferFailed(
                f"ranks {ranks} of the trainer have not read the end of the publication within {limit_s:g} s"
            ) from error
        for key in (command_key(number), *keys):
            self._store.delete_key(key)

    # ---- steps of one engine

    async def _connect(self, engine: EngineEndpoint) -> None:
        """Make the engine's group, unless it is in one."""
        if engine.address in self._connections:
            return
        for address, old in list(self._connections.items()):
            if old.engine == engine.name:
                self._drop(address)
        connection = self._new_connection(engine)
        self._connections[engine.address] = connection
        try:
            tables = await self._described(engine, connection)
            seat = EngineSeat(connection.seat, max(self._engines, connection.seat + 1))
            answers = await self._commanded(connection, commands.Compile(connection.name, tables, seat))
            senders = tuple(rank for rank, answer in enumerate(answers) if answer.serves)
            order = orders.Join(
                self._meeting,
                connection.name,
                senders,
                engine.ranks,
                self._backend,
                self._timeouts.transfer_s,
            )
            await self._together(
                engine, connection, order, commands.Connect(connection.name, senders, engine.ranks)
            )
        except BaseException as error:
            if isinstance(error, Unservable):
                self._unservable = str(error)
            elif isinstance(error, UnsuitedTransport):
                self._unsuited = str(error)
            self._drop(engine.address)
            raise

    async def _described(self, engine: EngineEndpoint, connection: _Connection) -> tuple[str, ...]:
        """Return the digests of the tables of the engine's ranks. Raises Unservable and UnsuitedTransport."""
        ordered = [orders.Describe(self._meeting, connection.name)] * engine.ranks
        answers = await connection.ordering.carried_out(engine, ordered, self._timeouts.answer_s)
        for answer in answers:
            if answer.untraceable is not None:
                raise UnsuitedTransport(
                    f"{engine.name} cannot get its weights shard by shard: {answer.untraceable}. Set "
                    "weights.transport to 'disk' or 'delta', which send whole HF tensors"
                )
        described = [answer.described for answer in answers if answer.described is not None]
        _require_filled(engine, described)
        return tuple(each.table for each in described)

    async def _transfer(self, engine: EngineEndpoint) -> int:
        """Send the present weights to the engine. Return the number of bytes."""
        connection = self._connections[engine.address]
        longest_s = connection.longest_s
        digests = self._digests or longest_s is None
        number = next(self._names)
        order = orders.Receive(self._meeting, connection.name, number, digests)
        command = commands.Send(connection.name, number, digests)
        timeouts, began = self._timeouts, time.monotonic()
        # The first transfer opens connections. All other engines stand still while one is waited for.
        limit_s = timeouts.transfer_s if longest_s is None else max(timeouts.answer_s, SLACK * longest_s)
        try:
            async with asyncio.timeout(limit_s):
                answers = await self._together(engine, connection, order, command)
        except TimeoutError:
            self._drop(engine.address)
            raise TransferFailed(f"no answer in {limit_s:g} s") from None
        except BaseException:
            self._drop(engine.address)
            raise
        connection.longest_s = max(longest_s or 0.0, time.monotonic() - began)
        return sum(answer.sent_bytes for answer in answers)

    async def _together(
        self,
        engine: EngineEndpoint,
        connection: _Connection,
        order: Order,
        command: Command,
    ) -> list[RankAnswer]:
        """Let the engine and the trainer's ranks work at the same time. Return the answers of the latter.

        The first failure of either side ends the step.
        """
        ordered = [order] * engine.ranks
        request = asyncio.ensure_future(connection.ordering.send(engine, ordered))
        commanded = asyncio.ensure_future(self._commanded(connection, command))
        try:
            done, _ = await asyncio.wait({request, commanded}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            await connection.ordering.answers(ordered, self._timeouts.answer_s)
            return commanded.result()
        finally:
            request.cancel()
            commanded.cancel()

    # ---- messages

    async def _commanded(self, connection: _Connection, command: Command) -> list[RankAnswer]:
        """Return the answers of the trainer's ranks. Raises TransferFailed if one is an error."""
        number = self._command(command)
        keys = [done_key(number, rank) for rank in range(self._trainer_ranks)]
        answers = await connection.ordering.read(keys, self._timeouts.transfer_s)
        self._store.delete_key(command_key(number))  # all ranks have read it
        return answers

    def _command(self, command: Command) -> int:
        number = next(self._commands)
        put(self._store, command_key(number), command)
        return number

    # ---- connections

    def _new_connection(self, engine: EngineEndpoint) -> _Connection:
        taken = {connection.seat for connection in self._connections.values()}
        seat = next(number for number in itertools.count() if number not in taken)
        name = f"{engine.name}/{next(self._names)}"
        return _Connection(Ordering(self._meeting, engine.name, name), seat)

    def _drop(self, address: Hashable) -> None:
        """Forget an engine, and let the trainer's ranks leave its group."""
        connection = self._connections.pop(address)
        connection.ordering.close()
        self._command(commands.Drop(connection.name))


def _require_filled(engine: EngineEndpoint, described: Sequence[Described]) -> None:
    unfilled = sorted({name for each in described for name in each.unfilled})
    partly = sorted({name for each in described for name in each.partly})
    if unfilled or partly:
        lists = [
            f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            for names, what in (
                (unfilled, "parameters that nothing fills"),
                (partly, "parameters that are filled in part"),
            )
            if names
        ]
        raise Unservable(
            f"SGLang's model does not match the checkpoint: {engine.name} has {'; '.join(lists)}. It would "
            "generate from values that are never published. Use a model that this SGLang supports in full"
        )
