"""The ledger while the run goes on: one writer thread, group commit.

Callers never wait for the disk, except where they ask to (``flushed``): events are collected, and the thread
writes all that have come meanwhile in one transaction. So the more there is to do, the cheaper each event
becomes. An event counts as acknowledged when ``flushed`` has returned after it.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout.control.core import Expired, Loss, Ticket
from rollout.ledger.database import LedgerError, explained
from rollout.ledger.records import encode_completion, encode_trajectory
from rollout.trajectory import Completion, Group, Trajectory

SAMPLES = 1 << 16
"""Keys of trajectories are group id * SAMPLES + sample."""

CLOSE_TIMEOUT_S = 60.0


@dataclass
class _Transaction:
    """Events that are committed together, by table; ``write`` gives their order."""

    groups: list[tuple] = field(default_factory=list)
    steps: list[tuple] = field(default_factory=list)
    published: list[tuple] = field(default_factory=list)
    trainings: list[tuple] = field(default_factory=list)
    trajectories: dict[int, tuple] = field(default_factory=dict)
    partials: dict[tuple[int, int], tuple] = field(default_factory=dict)
    states: list[tuple] = field(default_factory=list)
    discards: list[tuple] = field(default_factory=list)
    ended: list[tuple[int]] = field(default_factory=list)
    released: list[tuple[int]] = field(default_factory=list)
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list)

    def write(self, connection: sqlite3.Connection) -> None:
        many = connection.executemany
        many(
            "INSERT INTO groups (id, position, requeued_from, version, epoch, state) "
            "VALUES (?, ?, ?, ?, ?, 'admitted') ON CONFLICT (id) DO UPDATE SET "
            "version = excluded.version, epoch = excluded.epoch, state = 'admitted', tokens = NULL",
            self.groups,
        )
        many("INSERT INTO steps VALUES (?, ?, ?, 0)", self.steps)
        many("UPDATE steps SET published = 1 WHERE version = ?", self.published)
        many("INSERT INTO trainings VALUES (?, ?, ?, ?, ?)", self.trainings)
        many(
            "INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?, ?, ?, ?)",
            [row for (key, _), row in self.partials.items() if key not in self.trajectories],
        )
        many("INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?)", self.trajectories.values())
        many("DELETE FROM partials WHERE key = ?", [(key,) for key in self.trajectories])
        many("UPDATE groups SET state = ?, loss = ?, step = ?, tokens = ? WHERE id = ?", self.states)
        many("INSERT INTO discards VALUES (?, ?, ?)", self.discards)
        for (id_,) in self.ended:
            _forget(connection, id_)
        many(
            f"DELETE FROM trajectories WHERE key IN (SELECT g.id * {SAMPLES} + s.value FROM groups g, "
            "json_each(?) s WHERE g.state = 'trained' AND g.step > ? AND g.step <= ?)",
            self.released,
        )


def _forget(connection: sqlite3.Connection, id_: int) -> None:
    """Remove what was generated for a group."""
    bounds = (id_ * SAMPLES, (id_ + 1) * SAMPLES)
    connection.execute("DELETE FROM trajectories WHERE key >= ? AND key < ?", bounds)
    connection.execute("DELETE FROM partials WHERE key >= ? AND key < ?", bounds)


class Ledger:
    """The open ledger of a running run. Use it from one thread; ``close`` it at the end.

    Every method may raise LedgerError: what was given since the last ``flushed`` is then not in the ledger.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, epoch: int, n_samples: int) -> None:
        self.path = path
        self.epoch = epoch
        self._samples = "[" + ",".join(map(str, range(n_samples))) + "]"
        self._connection = connection
        self._released = -1
        self._wake = threading.Condition()
        self._next = _Transaction()
        self._has_events = False
        self._closing = False
        self._failure: LedgerError | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    # ---- events

    def admitted(self, ticket: Ticket, position: int) -> None:
        with self._events() as events:
            events.groups.append((ticket.id, position, ticket.requeued_from, ticket.version, self.epoch))

    def partial(
        self, group_id: int, sample: int, call: int, asked: bytes, answer: Completion, *, done: bool
    ) -> None:
        """What has been generated of the ``call``-th answer of an episode."""
        key = group_id * SAMPLES + sample
        row = (key, call, self.epoch, asked, done, len(answer.tokens), encode_completion(answer))
        with self._events() as events:
            events.partials[key, call] = row

    def trajectory(self, group_id: int, sample: int, trajectory: Trajectory) -> None:
        """The episode is complete and judged."""
        key = group_id * SAMPLES + sample
        row = (key, self.epoch, trajectory.response_length, encode_trajectory(trajectory))
        with self._events() as events:
            events.trajectories[key] = row

    def ready(self, group: Group) -> None:
        """All trajectories of the group have been given, and it is to be trained."""
        with self._events() as events:
            events.states.append(("ready", None, None, _tokens(group.trajectories), group.id))

    def lost(self, id_: int, loss: Loss, trajectories: Sequence[Trajectory] = ()) -> None:
        """The group will never be trained."""
        with self._events() as events:
            events.states.append((loss.end.value, loss.value, None, _tokens(trajectories), id_))
            events.ended.append((id_,))

    def expired(self, expired: Expired) -> None:
        self.lost(expired.id, expired.loss, expired.group.trajectories if expired.group else ())

    def discarded(self, id_: int, tokens: int) -> None:
        """What was generated for an unfinished group cannot be used; the group starts again.

        Wait for ``flushed`` before it does: a transaction forgets after it has written.
        """
        with self._events() as events:
            events.discards.append((id_, self.epoch, tokens))
            events.ended.append((id_,))

    def step_begins(self, version: int, step: int) -> None:
        """From now on an engine may hold ``version``. Wait for ``flushed`` before it can."""
        with self._events() as events:
            events.steps.append((version, self.epoch, step))

    def published(self, version: int, groups: Iterable[Group]) -> None:
        """``groups`` were trained, and what came of it is ``version``."""
        with self._events() as events:
            events.published.append((version,))
            for group in groups:
                sampled, trained, head_lag = _account(group, version - 1)
                events.trainings.append((version, group.id, head_lag, trained, sampled - trained))
                events.states.append(("trained", None, version, sampled, group.id))

    def release(self, version: int) -> None:
        """No checkpoint is left that lacks a training up to ``version``: forget what was trained by then."""
        with self._events() as events:
            events.released.append((self._samples, self._released, version))
        self._released = version

    # ---- durability

    async def flushed(self) -> None:
        """Returns when all events so far are on disk. Raises LedgerError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._events() as events:
            events.waiters.append((loop, future))
        await future

    def close(self) -> None:
        """Write what is left and close the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise LedgerError(f"{self.path}: the last events were not written in {CLOSE_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _events(self) -> "_Collecting":
        return _Collecting(self)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._has_events or self._closing):
                    self._wake.wait()
                if not self._has_events:
                    break
                transaction, self._next = self._next, _Transaction()
                self._has_events = False
            try:
                self._commit(transaction)
            except sqlite3.Error as error:
                with self._wake:
                    self._failure = explained(self.path, error)
                    transaction.waiters += self._next.waiters
                _answer(transaction.waiters, self._failure)
                break
            _answer(transaction.waiters, None)
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


class _Collecting:
    """``with`` this, events are added to the next transaction; the writer is woken after it."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> _Transaction:
        ledger = self._ledger
        ledger._wake.acquire()
        if ledger._failure is not None or ledger._closing:
            ledger._wake.release()
            raise ledger._failure or LedgerError(f"{ledger.path} is closed")
        return ledger._next

    def __exit__(self, *exc: object) -> None:
        ledger = self._ledger
        ledger._has_events = True
        ledger._wake.notify()
        ledger._wake.release()


def _answer(
    waiters: Iterable[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]], failure: LedgerError | None
) -> None:
    """Tell those who wait, each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in waiters:
        by_loop.setdefault(loop, []).append(future)

    def tell(futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            if not future.done():
                future.set_result(None) if failure is None else future.set_exception(failure)

    for loop, futures in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, futures)


def _tokens(trajectories: Iterable[Trajectory]) -> int:
    return sum(trajectory.sampled_length for trajectory in trajectories)


def _account(group: Group, version: int) -> tuple[int, int, int]:
    """Sampled tokens, those that carry loss, and the largest lag among these (-1: there are none)."""
    trained = [trajectory for trajectory in group.trajectories if trajectory.response_length]
    return (
        _tokens(group.trajectories),
        sum(trajectory.response_length for trajectory in trained),
        max((version - trajectory.oldest_version for trajectory in trained), default=-1),
    )
