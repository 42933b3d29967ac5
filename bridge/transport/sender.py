"""Every rank of the trainer as a sender of its shards, led by the commands of the head.

    command ──► loop ──┬─► thread of engine A: join, send, send, ...
                       └─► thread of engine B: ...

The loop never waits for an engine, so a command to drop one always arrives.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slipstream.bridge.engine import orders
from slipstream.bridge.engine.orders import Incoming, Meeting, RankAnswer, Target
from slipstream.bridge.group.peers import Peers
from slipstream.bridge.group.store import fetch, join_store, put
from slipstream.bridge.group.windows import windows
from slipstream.bridge.shards.digest import digest
from slipstream.bridge.shards.export import Parameters
from slipstream.bridge.shards.regions import Message, Region
from slipstream.bridge.shards.sends import Sends, Table, indexed
from slipstream.bridge.transport.commands import (
    Command,
    Compile,
    Connect,
    Drop,
    End,
    Send,
    command_key,
    done_key,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

log = logging.getLogger(__name__)

SHARDS_KEPT = 16
"""Shards that a transfer keeps after it has used them: reading one may compute it (merged LoRA)."""


@dataclass
class _Engine:
    """One engine as this rank knows it."""

    messages: Mapping[int, Sequence[Message]]
    """By rank of the engine."""
    thread: ThreadPoolExecutor
    store: "TCPStore"
    """The thread's own connection: one that waits lets no one else in."""
    peers: Peers | None = None
    first: int = 0
    """Number of the engine's first rank in the group."""
    ranks: int = 0
    dropped: bool = False


class ShardSender:
    """Lives on a rank of the trainer for the whole run."""

    def __init__(
        self,
        sends: Sends,
        parameters: Parameters,
        rank: int,
        meeting: Meeting,
        *,
        backend: str,
        timeout_s: float,
    ) -> None:
        """``timeout_s``: limit on one transfer to an engine."""
        self._sends, self._parameters, self._rank = sends, parameters, rank
        self._meeting, self._backend, self._timeout_s = meeting, backend, timeout_s
        self._store = self._connected()
        self._tables: dict[str, Table] = {}
        self._engines: dict[str, _Engine] = {}
        self._number = itertools.count()

    def follow(self) -> None:
        """Carry out commands until one ends the publication. Raises RuntimeError if the head is gone."""
        while True:
            number = next(self._number)
            command: Command = fetch(self._store, command_key(number), cast("type[Command]", Command))
            match command:
                case End():
                    self._answer(self._store, number, RankAnswer)
                    return
                case Compile():
                    self._answer(self._store, number, lambda command=command: self._compile(command))
                case Drop(engine=name):
                    self._drop(name)
                case Connect() | Send():
                    engine = self._engines[command.engine]
                    engine.thread.submit(self._carry_out, engine, number, command)

    def _connected(self) -> "TCPStore":
        meeting = self._meeting
        return join_store(meeting.address, meeting.port, 1, meeting.timeout_s, wait=False)

    def _carry_out(self, engine: _Engine, number: int, command: Connect | Send) -> None:
        def work() -> RankAnswer:
            match command:
                case Connect():
                    return self._join(engine, command)
                case Send():
                    return self._send(engine, command)

        self._answer(engine.store, number, work)

    def _answer(self, store: "TCPStore", number: int, work: Callable[[], RankAnswer]) -> None:
        try:
            answer = work()
        except Exception as error:  # the head decides what follows from it
            log.warning("rank %d: %s", self._rank, error)
            answer = RankAnswer(error=f"rank {self._rank} of the trainer: {type(error).__name__}: {error}")
        put(store, done_key(number, self._rank), answer)

    # ---- the commands

    def _compile(self, command: Compile) -> RankAnswer:
        for table in command.tables:
            if table not in self._tables:
                self._tables[table] = indexed(fetch(self._store, orders.table_key(table), list[Region]))
        messages = self._sends.to_engine(command.tables, self._tables, command.seat)
        # All elements of a message have one type. A shard may have to be computed, and is asked for it once.
        shards = {message.moves[0].source for own in messages.values() for message in own}
        dtypes = {shard: self._shard(shard).dtype for shard in shards}
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"to-{command.engine}")
        self._engines[command.engine] = _Engine(messages, thread, self._connected())
        for engine_rank, own in messages.items():
            key = orders.list_key(command.engine, engine_rank, self._rank)
            put(self._store, key, [_incoming(message, dtypes[message.moves[0].source]) for message in own])
        return RankAnswer(serves=tuple(messages))

    def _join(self, engine: _Engine, command: Connect) -> RankAnswer:
        if self._rank in command.senders:
            # The engine's other ranks read a list of every sender.
            for engine_rank in range(command.ranks):
                if engine_rank not in engine.messages:
                    key = orders.list_key(command.engine, engine_rank, self._rank)
                    put(engine.store, key, [])
            engine.first, engine.ranks = len(command.senders), command.ranks
            engine.peers = Peers(
                engine.store,
                command.engine,
                command.senders.index(self._rank),
                engine.first + command.ranks,
                backend=self._backend,
                device=next(iter(self._parameters[0].values())).device,
                timeout_s=self._timeout_s,
            )
            if engine.dropped:
                engine.peers.leave()
        return RankAnswer()

    def _send(self, engine: _Engine, command: Send) -> RankAnswer:
        if engine.peers is None:
            return RankAnswer()
        sent, digests = 0, dict[int, list[int]]()
        for window in windows(
            [[(to, message) for message in engine.messages[to]] for to in sorted(engine.messages)]
        ):
            flats = list(self._flats([message for _, message in window]))
            engine.peers.send(
                [(engine.first + to, flat) for (to, _), flat in zip(window, flats, strict=True)]
            )
            sent += sum(flat.nbytes for flat in flats)
            if command.digests:
                for (to, _), flat in zip(window, flats, strict=True):
                    digests.setdefault(to, []).append(digest(flat))
        if command.digests:
            for to in range(engine.ranks):
                key = orders.digests_key(command.engine, command.number, to, self._rank)
                put(engine.store, key, digests.get(to, []))
        return RankAnswer(sent_bytes=sent)

    def _drop(self, name: str) -> None:
        engine = self._engines.pop(name, None)
        if engine is None:
            return
        engine.dropped = True
        engine.thread.shutdown(wait=False)
        if engine.peers is not None:
            engine.peers.leave()

    # ---- messages

    def _flats(self, messages: Sequence[Message]) -> Iterator[Tensor]:
        """Yield each message as a contiguous tensor, which is a view of a shard if it can be."""
        shard = lru_cache(SHARDS_KEPT)(self._shard)

        for message in messages:
            parts = [
                torch.as_strided(
                    shard(move.source),
                    move.shape,
                    move.source_stride,
                    int(shard(move.source).storage_offset()) + move.source_offset,
                )
                for move in message.moves
            ]
            if len(parts) == 1:
                yield parts[0].contiguous().view(-1)
            else:
                yield torch.cat([part.reshape(-1) for part in parts])

    def _shard(self, name: str) -> Tensor:
        chunk, parameter = name.split("/", 1)
        return self._parameters[int(chunk)][parameter].detach()


def _incoming(message: Message, dtype: torch.dtype) -> Incoming:
    targets = [
        Target(move.target, move.target_offset, move.target_stride, move.shape) for move in message.moves
    ]
    return Incoming(targets, message.numel, message.direct, str(dtype).removeprefix("torch."))
