"""Writes the ledger while the run goes on: one writer thread, group commit.

Callers never wait for the disk, unless they ask to with ``flushed``. Events are collected on the event loop.
Those that arrive while the thread writes make its next transaction, so that each event becomes cheaper the
more there are. An event is *acknowledged* when a later call of ``flushed`` has returned.
"""

import asyncio
import ctypes
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue

from slipstream.rollout.control.core import Expired, Loss, Ticket
from slipstream.rollout.ledger.database import LedgerError, explained
from slipstream.rollout.ledger.records import digest, encode_completion, encode_trajectory
from slipstream.rollout.trajectory import Completion, Group, Trajectory

SAMPLES = 1 << 16
"""Largest number of samples of a group. Keys of trajectories are group id * SAMPLES + sample."""

COMMIT_DELAY_S = 0.002
"""Longest time that an event waits for others before the commit, which costs one fsync for all of them."""

CLOSE_TIMEOUT_S = 60.0

Row = tuple[int | float | str | bytes | None, ...]
"""Values of one row of any table."""

GroupRow = tuple[int, int, int | None, int, int]
"""id, position, requeued_from, version, epoch"""
StepRow = tuple[int, int, int]
"""version, epoch, step"""
TrainingRow = tuple[int, int, int, int, int]
"""version, group_id, head_lag, tokens, masked"""
TrajectoryRow = tuple[int, int, int, bytes]
"""key, epoch, tokens, payload"""
PartialRow = tuple[int, int, int, bytes, bool, int, bytes]
"""key, call, epoch, input, done, tokens, payload"""
StateRow = tuple[int, str, str | None, int | None, int | None]
"""id, state, loss, step, tokens"""
DiscardRow = tuple[int, int, int]
"""group_id, epoch, tokens"""


class _Transaction:
    """Events that are committed together, by table. ``write`` decides their order."""

    def __init__(self) -> None:
        self.groups: list[GroupRow] = []
        self.steps: list[StepRow] = []
        self.published: list[tuple[int]] = []
        """Versions."""
        self.trainings: list[TrainingRow] = []
        self.trajectories: dict[int, TrajectoryRow] = {}
        """By key."""
        self.partials: dict[tuple[int, int], PartialRow] = {}
        """By key and call."""
        self.superseded: list[tuple[int]] = []
        """Keys whose completions are part of a trajectory now."""
        self.states: dict[int, StateRow] = {}
        """By group id."""
        self.discards: list[DiscardRow] = []
        self.ended: list[int] = []
        """Ids of groups whose tokens are removed."""
        self.released: list[tuple[str, int, int]] = []
        """Samples as a JSON list, and versions (after, up to) whose trajectories are removed."""
        self.waiters: list[asyncio.Future[None]] = []

    def write(self, connection: sqlite3.Connection) -> None:
        write = partial(_write_rows, connection)
        write(
            "INSERT INTO groups (id, position, requeued_from, version, epoch, state) VALUES {rows} "
            "ON CONFLICT (id) DO UPDATE SET "
            "version = excluded.version, epoch = excluded.epoch, state = 'admitted', tokens = NULL",
            "(?, ?, ?, ?, ?, 'admitted')",
            self.groups,
        )
        write("INSERT INTO steps VALUES {rows}", "(?, ?, ?, 0)", self.steps)
        write("UPDATE steps SET published = 1 WHERE version IN (VALUES {rows})", "(?)", self.published)
        write("INSERT INTO trainings VALUES {rows}", "(?, ?, ?, ?, ?)", self.trainings)
        write(
            "INSERT OR REPLACE INTO partials VALUES {rows}",
            "(?, ?, ?, ?, ?, ?, ?)",
            [row for (key, _), row in self.partials.items() if key not in self.trajectories],
        )
        write("INSERT OR REPLACE INTO trajectories VALUES {rows}", "(?, ?, ?, ?)", self.trajectories.values())
        write("DELETE FROM partials WHERE key IN (VALUES {rows})", "(?)", self.superseded)
        write(
            "UPDATE groups SET state = v.column2, loss = v.column3, step = v.column4, tokens = v.column5 "
            "FROM (VALUES {rows}) AS v WHERE groups.id = v.column1",
            "(?, ?, ?, ?, ?)",
            self.states.values(),
        )
        write("INSERT INTO discards VALUES {rows}", "(?, ?, ?)", self.discards)
        for id_ in self.ended:
            _forget(connection, id_)
        for bounds in self.released:
            connection.execute(
                f"DELETE FROM trajectories WHERE key IN (SELECT g.id * {SAMPLES} + s.value FROM groups g, "
                "json_each(?) s WHERE g.state = 'trained' AND g.step > ? AND g.step <= ?)",
                bounds,
            )


CHUNKS = (128, 16, 1)
"""Rows per statement. SQLite releases the interpreter lock once per statement, and gets it back only when the
event loop gives it up: with one row per statement it would wait as often as there are rows."""


def _write_rows(connection: sqlite3.Connection, statement: str, row: str, rows: Iterable[Row]) -> None:
    """Execute ``statement`` for all rows, with its ``{rows}`` replaced by one ``row`` for each."""
    left = list(rows)
    for size in CHUNKS:
        while len(left) >= size:
            sql = statement.format(rows=", ".join([row] * size))
            connection.execute(sql, list(chain.from_iterable(left[:size])))
            del left[:size]


def _forget(connection: sqlite3.Connection, id_: int) -> None:
    """Remove everything that was generated for a group."""
    bounds = (id_ * SAMPLES, (id_ + 1) * SAMPLES)
    connection.execute("DELETE FROM trajectories WHERE key >= ? AND key < ?", bounds)
    connection.execute("DELETE FROM partials WHERE key >= ? AND key < ?", bounds)


class Ledger:
    """The open ledger of a running run. Use it from one event loop; ``close`` it at the end.

    Every method may raise LedgerError: then no event since the last ``flushed`` is certain to be in the
    ledger.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        epoch: int,
        n_samples: int,
        with_partials: set[int],
        fence: Callable[[], None],
    ) -> None:
        """``with_partials``: keys of trajectories of which the ledger already has completions. ``fence``:
        raises Fenced when this process may no longer write (``Lease.check``).
        """
        self.path = path
        self.epoch = epoch
        self._samples = "[" + ",".join(map(str, range(n_samples))) + "]"
        self._connection = connection
        self._released = -1
        self._with_partials = with_partials
        self._fence = fence
        self._next = _Transaction()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the events; None until the first event from within a loop."""
        self._is_due = False
        self._is_writing = False
        self._failure: LedgerError | None = None
        self._closed = False
        self._handed_over: SimpleQueue[_Transaction | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    # ---- events

    def admitted(self, ticket: Ticket, position: int) -> None:
        """Record that a group was admitted with the prompt at ``position``."""
        events = self._events()
        events.groups.append((ticket.id, position, ticket.requeued_from, ticket.version, self.epoch))

    def partial(
        self,
        group_id: int,
        sample: int,
        call: int,
        input_ids: Sequence[int],
        completion: Completion,
        *,
        done: bool,
    ) -> None:
        """Record the completion so far of request number ``call`` of an episode, with its input."""
        key = group_id * SAMPLES + sample
        tokens, payload = len(completion.tokens), encode_completion(completion)
        row = (key, call, self.epoch, digest(input_ids), done, tokens, payload)
        events = self._events()
        events.partials[key, call] = row
        self._with_partials.add(key)

    def trajectory(self, group_id: int, sample: int, trajectory: Trajectory) -> None:
        """Record that an episode is complete and judged."""
        key = group_id * SAMPLES + sample
        row = (key, self.epoch, trajectory.response_length, encode_trajectory(trajectory))
        events = self._events()
        events.trajectories[key] = row
        if key in self._with_partials:
            events.superseded.append((key,))
            self._with_partials.remove(key)

    def ready(self, group: Group) -> None:
        """Record that the group shall be trained. All of its trajectories have been recorded."""
        events = self._events()
        events.states[group.id] = (group.id, "ready", None, None, _tokens(group.trajectories))

    def lost(self, id_: int, loss: Loss, trajectories: Sequence[Trajectory] = ()) -> None:
        """Record that the group will never be trained."""
        events = self._events()
        events.states[id_] = (id_, loss.end.value, loss.value, None, _tokens(trajectories))
        events.ended.append(id_)

    def expired(self, expired: Expired) -> None:
        self.lost(expired.id, expired.loss, expired.group.trajectories if expired.group else ())

    def discarded(self, id_: int, tokens: int) -> None:
        """Record that an unfinished group starts again, and that its ``tokens`` sampled tokens are given up.

        Wait for ``flushed`` before it starts: a transaction removes the old tokens after it has written.
        """
        events = self._events()
        events.states[id_] = (id_, "admitted", None, None, None)
        events.discards.append((id_, self.epoch, tokens))
        events.ended.append(id_)

    def step_begins(self, version: int, step: int) -> None:
        """Record that an engine may hold ``version`` from now on. Wait for ``flushed`` before it can."""
        events = self._events()
        events.steps.append((version, self.epoch, step))

    def published(self, version: int, groups: Iterable[Group]) -> None:
        """Record that ``version`` was trained on ``groups`` and is published."""
        events = self._events()
        events.published.append((version,))
        for group in groups:
            sampled, trained, head_lag = _account(group, version - 1)
            events.trainings.append((version, group.id, head_lag, trained, sampled - trained))
            events.states[group.id] = (group.id, "trained", None, version, sampled)

    def release(self, version: int) -> None:
        """Remove the trajectories that were trained up to ``version``: no restart can need them any more.

        Call it when every checkpoint has these trainings behind it.
        """
        events = self._events()
        events.released.append((self._samples, self._released, version))
        self._released = version

    # ---- durability

    async def flushed(self) -> None:
        """Wait until all events so far are on disk. Raises LedgerError."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events().waiters.append(future)
        await future

    def close(self) -> None:
        """Write all events that are left and close the file. Raises LedgerError."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._handed_over.put(self._next)
        self._handed_over.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise LedgerError(f"{self.path}: the last events were not written in {CLOSE_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _events(self) -> _Transaction:
        """Return the transaction for the next event, and have it handed over after ``COMMIT_DELAY_S``."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise LedgerError(f"{self.path} is closed")
        if not self._is_due:
            with suppress(RuntimeError):  # outside of a loop, the next event inside one sets the timer
                self._loop = asyncio.get_running_loop()
                self._loop.call_later(COMMIT_DELAY_S, self._hand_over)
                self._is_due = True
        return self._next

    def _hand_over(self) -> None:
        if self._is_writing or self._closed:
            return
        self._is_writing, self._is_due = True, False
        transaction, self._next = self._next, _Transaction()
        self._handed_over.put(transaction)

    def _committed(self, transaction: _Transaction) -> None:
        """Wake the waiters of a transaction. Runs on the event loop."""
        self._is_writing = False
        for future in transaction.waiters + (self._next.waiters if self._failure else []):
            if not future.done():
                if self._failure is None:
                    future.set_result(None)
                else:
                    future.set_exception(self._failure)
        if self._is_due:  # the events that arrived meanwhile have waited long enough
            self._hand_over()

    # ---- the thread

    def _run(self) -> None:
        while (transaction := self._handed_over.get()) is not None:
            if self._failure is None:
                try:
                    self._fence()
                    self._commit(transaction)
                except LedgerError as error:
                    self._failure = error
                except sqlite3.Error as error:
                    self._failure = explained(self.path, error)
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._committed, transaction)
        try:
            self._fence()
        except LedgerError:
            _leave_open(self._connection)
        else:
            self._connection.close()

    def _commit(self, transaction: _Transaction) -> None:
        self._connection.execute("BEGIN")
        try:
            transaction.write(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _leave_open(connection: sqlite3.Connection) -> None:
    """Keep the connection open until the process ends.

    SQLite writes when it closes a file: it would copy an outdated write-ahead log over the pages of the
    driver that has the run now. The reference that is added here is never given back.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _tokens(trajectories: Iterable[Trajectory]) -> int:
    return sum(trajectory.sampled_length for trajectory in trajectories)


def _account(group: Group, version: int) -> tuple[int, int, int]:
    """Return numbers of sampled tokens and of tokens with loss, and the head lag at ``version``.

    The head lag is -1 if no token carries loss.
    """
    trained = [trajectory for trajectory in group.trajectories if trajectory.response_length]
    return (
        _tokens(group.trajectories),
        sum(trajectory.response_length for trajectory in trained),
        max((version - trajectory.oldest_version for trajectory in trained), default=-1),
    )
