"""The ledger of a running run, as the event loop sees it: events go in, and a thread writes them.

    event ──► transaction ──2 ms──► writer thread: payload on disk, then rows ──► when_durable, flushed

Callers never wait for the disk, unless they ask to with ``flushed``. Events that arrive while the thread
writes make its next transaction, so that each event becomes cheaper the more there are.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from struct import error as struct_error

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.reading.restart import Recovered
from slipstream.rollout.ledger.rows.samples import ANSWERED, GROWING, JUDGED, SAMPLES, WHOLE
from slipstream.rollout.ledger.rows.stored_turns import Gateway
from slipstream.rollout.ledger.rows.watermark import Watermark
from slipstream.rollout.ledger.storage.database import FAILURES, LedgerError, explained
from slipstream.rollout.ledger.storage.segments import Buffer, Part, Segments, checked
from slipstream.rollout.ledger.writing.store import Store
from slipstream.rollout.ledger.writing.transaction import LostRead, RestartRequest, Training, Transaction
from slipstream.rollout.ledger.writing.turn_log import TurnLog
from slipstream.rollout.system.disk import waits_for_disk
from slipstream.rollout.tokens.record import REF

__all__ = ["SAMPLES", "Ledger", "Training"]

COMMIT_DELAY_S = 0.002
"""Longest time that an event waits for others before the commit, which waits for the disk twice."""

CLOSE_TIMEOUT_S = 60.0

NOTE_LENGTH = 2000
"""Largest number of characters of a note or a reason."""


class Ledger:
    """The open ledger of a running run. Use it from one event loop; ``close`` it at the end.

    Trajectories are stored in two parts. Their chunks are appended as they come, many in one frame, and never
    looked at. Everything else about them is a row: a piece, a whole trajectory, its reward.

        segment, offset = ledger.append(frame)
        ledger.piece(key, 0, REF.pack(segment, offset, size, crc), header)

    The rows of a frame must be recorded before the event loop goes on. Rows of a group that was never
    admitted or has ended are ignored. Every method may raise LedgerError: then no event since the last
    ``flushed`` is certain to be in the ledger. ``read`` may be called in any thread.
    """

    def __init__(
        self,
        path: Path,
        epoch: int,
        store: Store,
        segments: Segments,
        new_segment: Callable[[], int],
        watermark: Watermark,
        segment_bytes: int,
        gateways: Iterable[Gateway] = (),
    ) -> None:
        """``new_segment``: gives the number of a new segment. ``watermark``: where this process begins.
        ``gateways``: those that the ledger knows.
        """
        self.path = path
        self.epoch = epoch
        self._store = store
        self._segments = segments
        self._new_segment = new_segment
        self._watermark = watermark
        self._segment_bytes = segment_bytes
        self._segment = new_segment()
        self._offset = 0
        """Where the next frame's part begins in the segment."""
        self._backlog = 0
        self._begun = watermark.begun
        self._trained = watermark.trained
        self._next = Transaction(watermark.sequence + 1)
        self._unwritten: tuple[Transaction, ...] = (self._next,)
        """Transactions that are not on disk. The tuple is replaced, never changed: other threads read it."""
        self.turns = TurnLog(lambda: self._events().turns, self.append, gateways)
        """Records the events of live users."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the events; None until the first event from within a loop."""
        self._is_due = False
        self._is_writing = False
        self._failure: Exception | None = None
        self._closed = False
        self._handed_over: SimpleQueue[Transaction | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    # ---- payload

    def append(self, payload: Buffer) -> tuple[int, int]:
        """Return segment and offset where the payload of a frame will stand. It is written with the next
        rows.

        The buffer must not change until then.
        """
        events = self._events()
        part = self._part(events)
        offset = part.add(payload)
        size = len(payload)
        self._backlog += size
        events.frame_bytes += size
        if part.stop >= self._segment_bytes:
            self._segment, self._offset = self._new_segment(), 0
        return part.segment, offset

    @property
    def backlog(self) -> int:
        """Bytes of payload that are not on disk yet."""
        return self._backlog

    def read(self, refs: bytes) -> bytes:
        """Return the chunks that ``refs`` points to, one after the other, on disk or not.

        ``refs``: packed ``record.REF``, one after the other. Raises LedgerError when a chunk is damaged.
        """
        unwritten = self._unwritten
        try:
            chunks = [self._chunk(unwritten, *ref) for ref in REF.iter_unpack(refs)]
        except struct_error:
            raise LedgerError(f"{len(refs)} bytes of references are not a multiple of {REF.size}") from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _chunk(
        self, unwritten: tuple[Transaction, ...], segment: int, offset: int, size: int, crc: int
    ) -> bytes:
        for transaction in unwritten:
            for part in transaction.parts:
                if part.segment == segment and (frame := part.find(offset, size)) is not None:
                    return checked(frame, crc)
        while True:
            place = self._store.moved.place(segment, offset)
            try:
                return self._segments.read(*place, size, crc)
            except LedgerError:
                if self._store.moved.place(segment, offset) == place:
                    raise  # else the chunk was moved meanwhile

    def _part(self, events: Transaction) -> Part:
        """Return the part of the newest segment, and have a new one begun where there is none."""
        if events.parts and events.parts[-1].segment == self._segment:
            return events.parts[-1]
        part = Part(self._segment, self._offset)
        events.parts.append(part)
        return part

    # ---- events of groups

    def admitted(self, ticket: Ticket, position: int) -> None:
        """Record that a group was admitted with the prompt at ``position``."""
        row = (ticket.id, position, ticket.requeued_from, ticket.version, self.epoch)
        self._events().groups.append(row)

    def piece(self, key: int, base: int, ref: bytes, header: bytes) -> None:
        """Record piece number ``base`` of an unfinished sample. Its pieces from this number on are void.

        ``ref``: one packed ``record.REF``. ``header``: an encoded ``PieceHeader``.
        """
        self._events().samples.append((key, GROWING, base, ref, header))

    def answered(self, key: int, refs: bytes, header: bytes) -> None:
        """Record a whole trajectory that is not judged yet. Its pieces are superseded.

        ``header``: the encoded ``TrajectoryHeader``, without a reward.
        """
        self._events().samples.append((key, ANSWERED, WHOLE, refs, header))

    def judged(self, key: int, refs: bytes | None, header: bytes) -> None:
        """Record a whole trajectory with its reward.

        ``refs``: None if the trajectory consists of the chunks recorded before.
        """
        self._events().samples.append((key, JUDGED, WHOLE, refs, header))

    def ready(self, id_: int, tokens: int) -> None:
        """Record that a group is to be trained. All of its trajectories have been recorded as judged.

        ``tokens``: number of their sampled tokens.
        """
        self._events().states[id_] = (id_, "ready", None, None, tokens, None)

    def read_lost(self, refs: Sequence[bytes], then: Callable[[Sequence[bytes | None]], None]) -> None:
        """Read chunks of a group that is about to be ``lost``, of which nothing can be read afterwards.

        ``refs``: packed ``record.REF`` of each part that is wanted. ``then`` is called on the event loop with
        the chunks of each part once all events so far are on disk; None stands for a damaged part.
        """
        read = LostRead(refs, then)
        events = self._events()
        events.reads.append(read)
        events.then.append(lambda: then(read.chunks))

    def lost(self, id_: int, loss: Loss, tokens: int = 0, note: str = "") -> None:
        """Record that a group will never be trained; everything that was generated for it is forgotten."""
        events = self._events()
        events.states[id_] = (id_, loss.end.value, loss.value, None, tokens, note[:NOTE_LENGTH] or None)
        events.ended.append(id_)

    def discarded(self, id_: int, tokens: int) -> None:
        """Record that an unfinished group starts again, and gives up its ``tokens`` sampled tokens."""
        events = self._events()
        events.states[id_] = (id_, "admitted", None, None, None, None)
        events.discards.append((id_, tokens, len(events.samples)))

    # ---- events of training

    def step_begins(self, version: int, parent: int, groups: Sequence[int]) -> None:
        """Record that an engine may hold ``version`` from now on. Wait for ``flushed`` before it can.

        ``parent``: version that the step starts from. ``groups``: ids of the groups of the batch, and of its
        turns.
        """
        self._begins(version, parent, tuple(groups))

    def copy_begins(self, version: int, parent: int) -> None:
        """Record that an engine may hold ``version``, the weights of ``parent``, from now on.

        Wait for ``flushed`` before it can.
        """
        self._begins(version, parent, None)

    def _begins(self, version: int, parent: int, groups: Sequence[int] | None) -> None:
        events = self._events()
        events.begun.append((version, parent, groups))
        self._part(events)  # the segment tells of the version, should the database lose this transaction
        self._begun = max(self._begun, version)

    def step_failed(self, version: int, reason: str) -> None:
        """Record that the trainer died or raised in the step that was to make ``version``."""
        self._events().failures.append((version, reason[:NOTE_LENGTH]))

    def published(self, version: int, trainings: Sequence[Training]) -> None:
        """Record that ``version`` is published, and which groups it was trained on."""
        self._events().published.append((version, trainings))
        self._trained += len(trainings)

    def release(self, version: int) -> None:
        """Forget the trajectories that were trained up to ``version``: no restart can need them any more.

        Call it when every checkpoint that is kept includes these trainings.
        """
        self._events().released = version

    def watermark(self) -> Watermark:
        """Return how far the ledger is, for the record of a checkpoint of the version published last.

        Wait for ``flushed`` before the checkpoint is committed.
        """
        sequence = self._events().sequence
        return Watermark(self._watermark.run, sequence, self._begun, self._trained)

    def checkpointed(self, version: int, digest: str) -> None:
        """Record that the checkpoint of ``version`` was committed. ``digest``: of its record."""
        self._events().checkpoints.append((version, digest))

    async def restarted(self, version: int, *, bound: int, n_samples: int) -> Recovered:
        """Go on from ``version``, which the trainer is restored from, and return the state of the run.

        An epoch begins, as if the run were resumed: trainings that are not on the line of ``version`` are
        undone, and damaged trajectories are generated again. Record nothing of any group meanwhile.
        ``bound``: ``rollout.max_head_offpolicyness``. ``n_samples``: number of trajectories of a group.
        Raises LedgerError.
        """
        events = self._events()
        request = events.restart = RestartRequest(version, bound, n_samples)
        await self.flushed()
        assert request.recovered is not None
        recovered = request.recovered
        self.epoch = recovered.epoch
        self._trained = recovered.counts.trained + recovered.live.counts.get("trained", 0)
        return recovered

    # ---- durability

    def when_durable(self, then: Callable[[], None]) -> None:
        """Call ``then`` on the event loop once all events so far are on disk; never after a failure."""
        self._events().then.append(then)

    async def flushed(self) -> None:
        """Wait until all events so far are on disk. Raises LedgerError."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events().waiters.append(future)
        await future

    def close(self) -> None:
        """Write all events that are left and close the files. Raises LedgerError."""
        if self._closed:
            return
        self._closed, self._is_due = True, False
        if self._failure is None:
            self._handed_over.put(self._next)
        self._handed_over.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise LedgerError(f"{self.path}: the last events were not written in {CLOSE_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _events(self) -> Transaction:
        """Return the transaction for the next event, and have it handed over after ``COMMIT_DELAY_S``."""
        if self._is_due:
            return self._next
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise LedgerError(f"{self.path} is closed")
        with suppress(RuntimeError):  # outside of a loop, the next event inside one sets the timer
            self._loop = asyncio.get_running_loop()
            self._loop.call_later(COMMIT_DELAY_S, self._hand_over)
            self._is_due = True
        return self._next

    def _hand_over(self) -> None:
        if self._is_writing or self._closed:
            return
        self._is_writing, self._is_due = True, False
        events = self._next
        if events.parts and events.parts[-1].segment == self._segment:
            self._offset = events.parts[-1].stop
        self._next = Transaction(events.sequence + 1)
        self._unwritten = (events, self._next)
        self._handed_over.put(events)

    def _committed(self, events: Transaction) -> None:
        """Wake the tasks that wait for a transaction that is on disk now. Runs on the event loop."""
        self._is_writing = False
        if self._failure is not None:
            self._is_due = False
            _fail(events.waiters + self._next.waiters, self._failure)
            return
        self._unwritten = (self._next,)
        self._backlog -= events.frame_bytes
        for future in events.waiters:
            if not future.done():
                future.set_result(None)
        for then in events.then:
            try:
                then()
            except Exception as error:  # must not keep the next events from being written
                context = {"message": "a callback of the ledger has failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        if self._is_due:  # the events that arrived meanwhile have waited long enough
            self._hand_over()

    # ---- the thread

    def _run(self) -> None:
        while (events := self._handed_over.get()) is not None:
            if self._failure is None:
                for read in events.reads:
                    read.chunks = [self._undamaged(refs) for refs in read.refs]
                with waits_for_disk(self.path.name):
                    self._attempt(lambda events=events: self._store.commit(events))
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._committed, events)
            if self._failure is None:
                self._attempt(self._store.tidy)
        self._attempt(self._store.close)

    def _undamaged(self, refs: bytes) -> bytes | None:
        try:
            return self.read(refs)
        except (LedgerError, OSError):
            return None

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except FAILURES as error:
            self._failure = self._failure or explained(self.path, error)
        except Exception as error:
            self._failure = self._failure or error


def _fail(waiters: Sequence[asyncio.Future[None]], failure: Exception) -> None:
    for future in waiters:
        if not future.done():
            future.set_exception(failure)
