"""Gathers what a collector has to say into few frames.

events of all episodes ──► outbox ──(FLUSH_S later)──► one frame ──► driver

Nobody waits for a piece of an unfinished episode: pieces wait for other events, up to PIECES_S. A frame and
its transaction in the driver's ledger cost several times as much as one more piece in them.

Back-pressure: while more than UNSENT_BYTES wait for the connection, ``room`` is closed and no episode starts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from slipstream.rollout.collection.messages import (
    ANSWERED,
    FRAME_BYTES,
    JUDGED,
    PIECE,
    Evaluated,
    Event,
    FailedAttempt,
    GroupVerdict,
    Status,
    Up,
)
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.frames import as_note
from slipstream.rollout.tokens.evaluated_set import EvaluatedSet
from slipstream.rollout.tokens.named_numbers import NamedNumbers
from slipstream.rollout.tokens.record import PieceHeader, checksum, encode
from slipstream.rollout.tokens.trajectory import Finish, TrajectoryHeader

FLUSH_S = 0.002
"""Longest time that an event waits for others before they are sent in one frame."""

PIECES_S = 0.05
"""Longest time that pieces of unfinished episodes wait for others."""

STATUS_EVERY_S = 1.0
"""Longest time between two messages: the driver knows how busy a collector is when nothing else happens."""

UNSENT_BYTES = 64 * 2**20
"""Bytes of chunks that may wait for the connection before new episodes have to wait."""

Send = Callable[[Up, Sequence[bytes]], Awaitable[None]]
"""Sends a message and its chunks. Returns when the connection has room for more."""


class Outbox:
    """Gathers events, and sends them in order. Single event loop.

    ``run`` goes on until it is cancelled, or raises what ``send`` raises: then the connection is gone, and
    nothing that is left here counts any more.
    """

    def __init__(self, flush_s: float = FLUSH_S) -> None:
        """``flush_s``: longest time that an event waits for others."""
        self._flush_s = flush_s
        self._full: list[tuple[Up, list[bytes]]] = []
        """Messages, with their chunks, to which nothing more is added."""
        self._next = Up()
        self._payload: list[bytes] = []
        self._payload_bytes = 0
        self._bytes = 0
        """Bytes of all chunks that are not sent."""
        self._answered: dict[tuple[int, int, int], int] = {}
        """Index in the next message of each trajectory that waits there for its reward."""
        self._due = asyncio.Event()
        self._pieces_due: asyncio.TimerHandle | None = None
        """Sends the pieces of the next message; None if there are none."""
        self._changes = Changes()

    async def room(self) -> None:
        """Wait until the connection has taken most of what was sent. The connection's end ends the wait."""
        if self._bytes > UNSENT_BYTES:
            await self._changes.first(lambda: self._bytes <= UNSENT_BYTES or None)

    async def run(self, send: Send, status: Callable[[], Status]) -> None:
        """Send by ``send``, every message with the ``status`` of that moment."""
        while True:
            try:
                async with asyncio.timeout(STATUS_EVERY_S):
                    await self._due.wait()
                    await asyncio.sleep(self._flush_s)
            except TimeoutError:
                pass
            self._due.clear()
            if self._pieces_due is not None:
                self._pieces_due.cancel()
                self._pieces_due = None
            self._begin_message()
            for message, payload in self._taken():
                message.status = status()
                await send(message, payload)
                self._bytes -= sum(map(len, payload))
                self._changes.notify()

    def flush(self) -> None:
        """Send the status soon, although nothing else has happened."""
        self._due.set()

    # ---- events of episodes

    def piece(
        self, group: int, assignment: int, sample: int, base: int, header: PieceHeader, chunk: bytes
    ) -> None:
        """A part of an unfinished episode, after its first ``base`` pieces."""
        self._add(
            Event(group, assignment, sample, PIECE, _raw(header), base, len(chunk), checksum(chunk)), chunk
        )
        if self._pieces_due is None:
            self._pieces_due = asyncio.get_running_loop().call_later(PIECES_S, self._due.set)

    def answered(
        self, group: int, assignment: int, sample: int, base: int, header: TrajectoryHeader, chunks: bytes
    ) -> None:
        """A whole trajectory without its reward: the first ``base`` pieces of its record, and ``chunks``."""
        self._answered[group, assignment, sample] = len(self._next.events)
        self._add(
            Event(group, assignment, sample, ANSWERED, _raw(header), base, len(chunks), checksum(chunks)),
            chunks,
        )
        self._due.set()

    def judged(
        self, group: int, assignment: int, sample: int, header: TrajectoryHeader, scores: bytes = b""
    ) -> None:
        """The reward of a trajectory that was ``answered``, and the chunk with a teacher's scores, if any."""
        waiting = self._answered.pop((group, assignment, sample), None)
        if waiting is None or scores:
            crc = checksum(scores) if scores else 0
            self._add(Event(group, assignment, sample, JUDGED, _raw(header), 0, len(scores), crc), scores)
        else:
            event = self._next.events[waiting]
            event.kind, event.header = JUDGED, _raw(header)
        self._due.set()

    def ended(self, group: int, assignment: int, verdict: int, note: str = "") -> None:
        """The end of a group, after all of its events."""
        self._next.verdicts.append(GroupVerdict(group, assignment, verdict, as_note(note)))
        self._due.set()

    # ---- the rest

    def released(self, episodes: int = 1) -> None:
        """The engines are done with an episode."""
        self._next.released += episodes
        self._due.set()

    def attempt_failed(self, prompt: int, attempt: int, error: str) -> None:
        self._next.failed.append(FailedAttempt(prompt, attempt, as_note(error)))
        self._due.set()

    def flushed(self, number: int) -> None:
        """The episode log is written up to request ``number`` of the driver."""
        self._next.flushed = number
        self._due.set()

    def cannot_go_on(self, reason: str) -> None:
        """Tell the driver of an error that the collector cannot recover from."""
        self._next.fatal = as_note(reason)
        self._due.set()

    def evaluated(self, task: int, header: TrajectoryHeader) -> None:
        """The result of an evaluation episode, which has been judged."""
        self._next.evaluated.append(
            Evaluated(
                task,
                header.reward,
                header.sampled_length,
                "",
                header.reward_parts,
                is_truncated=header.finish is Finish.LENGTH,
                metrics=header.metrics,
            )
        )
        self._due.set()

    def evaluated_sets(self, task: int, sets: list[EvaluatedSet], metrics: NamedNumbers = ()) -> None:
        """The result of a whole evaluation by a function."""
        self._next.evaluated.append(Evaluated(task, None, 0, "", sets=sets, metrics=metrics))
        self._due.set()

    def evaluation_failed(self, task: int, note: str) -> None:
        """The failure of an evaluation episode, and its reason."""
        self._next.evaluated.append(Evaluated(task, None, 0, as_note(note)))
        self._due.set()

    def _add(self, event: Event, chunk: bytes = b"") -> None:
        self._next.events.append(event)
        if chunk:
            self._payload.append(chunk)
            self._payload_bytes += len(chunk)
            self._bytes += len(chunk)
            if self._payload_bytes >= FRAME_BYTES:
                self._begin_message()
                self._due.set()

    def _begin_message(self) -> None:
        self._full.append((self._next, self._payload))
        self._next, self._payload, self._payload_bytes = Up(), [], 0
        self._answered.clear()

    def _taken(self) -> list[tuple[Up, list[bytes]]]:
        full, self._full = self._full, []
        return full


def _raw(header: PieceHeader | TrajectoryHeader) -> msgspec.Raw:
    return msgspec.Raw(encode(header))
