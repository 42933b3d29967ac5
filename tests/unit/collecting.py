"""Stand-ins around a collector's parts: engines that are a pure function, and a driver that only holds."""

import asyncio
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field

import msgspec

from slipstream.backend.simulate.clock import VirtualLoop
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.collection.messages import (
    ANSWERED,
    JUDGED,
    NOTHING,
    PIECE,
    UP,
    Event,
    PriorSample,
    Status,
    Up,
)
from slipstream.rollout.engine.routing import PoolStatus
from slipstream.rollout.ledger.rows.samples import OpenSample
from slipstream.rollout.system.frames import pack, split
from slipstream.rollout.tokens.record import (
    checksum,
    decode_chunks,
    decode_header,
    decode_piece,
    decode_trajectory,
    encode,
)
from slipstream.rollout.tokens.trajectory import Finish, Prompt, Trajectory, TrajectoryHeader

STATUS = Status(PoolStatus(), 0, 0.0)


# ---- engines


def next_token(ids: Sequence[int]) -> int:
    """The only token that follows on ``ids``, 1 to 40. A multiple of 13 ends a completion."""
    return 1 + zlib.crc32(array("i", ids).tobytes()) % 40


def logprob(token: int) -> float:
    """A number that float32 holds exactly."""
    return -token / 64


def ideal(ids: Sequence[int], budget: int) -> list[int]:
    """The tokens of the whole completion of ``ids``."""
    tokens: list[int] = []
    while len(tokens) < budget and not (tokens and tokens[-1] % 13 == 0):
        tokens.append(next_token([*ids, *tokens]))
    return tokens


@dataclass
class PureEngines:
    """Engines whose completions depend on the request alone. A chunk comes every ``chunk_s`` seconds.

    Versions of tokens are lower bounds until the end of the completion, when they become ``version``.
    """

    version: int = 1
    chunk: int = 2
    chunk_s: float = 1.0
    requests: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    """Token ids of each request, and the number of tokens that it went on from."""

    async def generate(self, input_ids, sampling, completion, *, greedy=False, grown=None) -> None:
        start = len(completion.tokens)
        self.requests.append((tuple(input_ids), start))
        while completion.tokens_left(sampling.max_new_tokens):
            await asyncio.sleep(self.chunk_s)
            for _ in range(min(self.chunk, completion.tokens_left(sampling.max_new_tokens))):
                token = next_token([*input_ids, *completion.tokens])
                completion.add(self.version - 1, [token], [logprob(token)])
                if token % 13 == 0:
                    completion.finish = Finish.STOP
                    break
            if completion.tokens_left(sampling.max_new_tokens) and grown is not None:
                grown()
        if len(completion.tokens) > start:
            completion.retag(start, [(self.version, len(completion.tokens) - start)])
        completion.ended()


# ---- time


class LoopWithContexts(VirtualLoop):
    """A virtual loop in which every task has a context of its own, as in a real one."""

    def call_soon(self, callback: Callable[..., object], *args: object, context: Context | None = None):
        return super().call_soon((context or copy_context()).run, callback, *args)

    def create_task(self, coro, *, name=None, context=None):
        return asyncio.Task(coro, loop=self, name=name, context=context)


def run_with_contexts(main):
    with asyncio.Runner(loop_factory=LoopWithContexts) as runner:
        return runner.run(main)


# ---- the driver's side


@dataclass
class HeldSample:
    """One episode as a driver holds it, by the rules of ``messages.Event``."""

    kind: int = PIECE
    pieces: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Chunk, and encoded header, of each piece."""
    header: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    """Chunks of a whole trajectory."""

    def happened(self, event: Event, chunk: bytes) -> None:
        assert checksum(chunk) == event.crc or not chunk
        header = bytes(event.header)
        if event.kind == PIECE:
            assert self.kind == PIECE and chunk
            assert event.base <= len(self.pieces)
            self.pieces[event.base :] = [(chunk, header)]
        elif self.kind == PIECE:
            self.chunks = [piece for piece, _ in self.pieces[: event.base]] + ([chunk] if chunk else [])
            assert event.base <= len(self.pieces)
            self.kind, self.header = event.kind, header
        else:
            assert event.kind == JUDGED and (self.kind == ANSWERED or not chunk)
            self.kind, self.header = event.kind, header
            self.chunks += [chunk] if chunk else []

    @property
    def headers(self):
        return [decode_piece(header) for _, header in self.pieces]

    @property
    def complete_calls(self) -> set[int]:
        """Requests of which the whole completion is held."""
        return {header.call for header in self.headers if header.finish is not Finish.PARTIAL}

    def tokens(self, call: int) -> list[int]:
        """The sampled tokens that are held of the completion of one request."""
        pieces = [chunk for chunk, header in self.pieces if decode_piece(header).call == call]
        return [
            token for piece in pieces for chunk in decode_chunks(piece) for token in chunk.tokens.tolist()
        ]

    def trajectory(self) -> Trajectory:
        return decode_trajectory(b"".join(self.chunks), decode_header(self.header))

    def prior(self, number: int = 0) -> tuple[PriorSample, memoryview]:
        """Return the episode as a further assignment describes it."""
        if self.kind == PIECE:
            chunks = [chunk for chunk, _ in self.pieces]
            pieces = [(len(chunk), msgspec.Raw(header)) for chunk, header in self.pieces]
            return PriorSample(number, PIECE, NOTHING, pieces), memoryview(b"".join(chunks))
        pieces = [(len(chunk), NOTHING) for chunk in self.chunks]
        prior = PriorSample(number, self.kind, msgspec.Raw(self.header), pieces)
        return prior, memoryview(b"".join(self.chunks))


@dataclass
class HoldingDriver:
    """Holds what the messages of collectors say. Only events of the assignment in ``assignments`` count."""

    samples: dict[tuple[int, int], HeldSample] = field(default_factory=dict)
    """By group and sample."""
    assignments: dict[int, int] = field(default_factory=dict)
    verdicts: list[tuple[int, int, str]] = field(default_factory=list)
    """(group, verdict, note)"""
    released: int = 0
    failed: list[tuple[int, int, str]] = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    fatal: list[str] = field(default_factory=list)
    payload: int = 0
    """Bytes of all chunks so far."""
    sent: list[tuple[Event, bytes]] = field(default_factory=list)
    """All events, with their chunks."""
    messages: list[Up] = field(default_factory=list)

    def take(self, message: Up, chunks: Sequence[bytes]) -> None:
        up, payload = split(pack(message, chunks), UP)
        self.payload += len(payload)
        self.messages.append(up)
        start = 0
        for event in up.events:
            chunk = bytes(payload[start : start + event.size])
            start += event.size
            self.sent.append((event, chunk))
            if self.assignments.get(event.group, event.assignment) == event.assignment:
                self.samples.setdefault((event.group, event.sample), HeldSample()).happened(event, chunk)
        assert start == len(payload)
        self.released += up.released
        self.verdicts += [(each.group, each.verdict, each.note) for each in up.verdicts]
        self.failed += [(each.prompt, each.attempt, each.error) for each in up.failed]
        self.evaluated += up.evaluated
        if up.fatal:
            self.fatal.append(up.fatal)

    @asynccontextmanager
    async def hearing(self, outbox: Outbox, status: Callable[[], Status] = lambda: STATUS):
        """Take what an outbox sends inside the block; all of it, unless the block is cancelled."""

        async def send(message: Up, chunks: Sequence[bytes]) -> None:
            self.take(message, chunks)

        task = asyncio.create_task(outbox.run(send, status), name="sending")
        try:
            yield self
            await asyncio.sleep(2.0)
        finally:
            task.cancel()
            await asyncio.wait({task})


SAMPLING = SamplingConfig(max_new_tokens=12)


# ---- the driver


def ready_group(id_: int, *headers: TrajectoryHeader, refs: bytes = b"refs", prompt=None) -> CollectedGroup:
    """Return a complete group with these trajectories."""
    samples = [OpenSample(JUDGED, refs, encode(header), judged=header) for header in headers]
    return CollectedGroup(id_, 0, prompt or Prompt(id_, "?"), [*samples]).counted()
