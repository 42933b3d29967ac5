"""The journal of a gateway process, as its event loop sees it: entries go in, and a thread writes them.

    append ──► numbers at once ──► thread: one commit for all that has come ──► durable
                                                                                  │
    acknowledge ◄── driver ◄── read ◄── grown ◄───────────────────────────────────┘

Nobody waits for the disk but those who ask to (``durable``). Entries that come while the thread commits make
its next commit, so that each becomes cheaper the more there are. Only what is durable can be read, and only
what was read is sent: a number stands for the same entry forever.
"""

import asyncio
import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from sqlite3 import Error

from slipstream.rollout.gateway.conversations import UnknownTurn
from slipstream.rollout.gateway.journal_file import (
    READ_BYTES,
    DamagedJournal,
    JournalError,
    JournalFile,
    Row,
    explained,
)
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.disk import waits_for_disk
from slipstream.rollout.tokens.turn_entries import KINDS, Entry, Turn

TIDY_S = 1.0
"""Shortest time between two removals of what nobody needs."""

OUTCOME_S = 5.0
"""Longest time that a client waits for the outcome of its reward. The reward itself is recorded."""

MOST_OUTCOMES = 10_000
"""Outcomes that have not come yet, or that nobody has asked for again."""

CLOSE_TIMEOUT_S = 60.0


class _Read:
    """A question of the event loop to the thread."""

    def __init__(self, after: int, most_bytes: int) -> None:
        self.after = after
        self.most_bytes = most_bytes
        self.future: asyncio.Future[list[Row]] = asyncio.get_running_loop().create_future()


class _Tidy:
    """Remove what nobody needs."""


_Job = Entry | _Read | _Tidy | None
"""None: close the file."""


class TurnJournal:
    """An open journal. Use it from one event loop; ``close`` it at the end.

    When the disk fails, every method raises JournalError from then on, and ``failed`` does. Entries that are
    not durable are lost then, and nobody has been told otherwise.
    """

    def __init__(self, file: JournalFile) -> None:
        self.path = file.path
        self.identity = file.stamp.identity
        """Name under which the driver knows this journal."""
        self._file = file
        self._last = self._durable = file.stamp.last
        self._acknowledged = file.stamp.acknowledged
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        """Heap of (number, a tie-breaker, who waits for it)."""
        self._count = 0
        self._outcomes: dict[int, asyncio.Future[str]] = {}
        """Of the rewards that clients wait for."""
        self._changes = Changes()
        self._failure: JournalError | None = None
        self._tidying: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path, name: str) -> "TurnJournal":
        """Open the journal of the gateway called ``name``. Blocks while it is read. Raises JournalError."""
        return cls(JournalFile.open(path, name))

    @property
    def last(self) -> int:
        """Number of the last entry."""
        return self._last

    @property
    def durable_number(self) -> int:
        """Number of the last entry that survives a power cut."""
        return self._durable

    @property
    def acknowledged(self) -> int:
        """Number of the last entry that the driver has."""
        return self._acknowledged

    def retained(self) -> Iterator[Row]:
        """Yield all entries that are kept: those of sessions that go on, and those without acknowledgement.

        Must be used up before the first ``append``. Raises JournalError.
        """
        number = 0
        while rows := self._file.rows(number):
            yield from rows
            number = rows[-1].number

    def append(self, entries: Sequence[Entry]) -> list[int]:
        """Give entries their numbers, and begin to write them. Raises JournalError."""
        self._check()
        first = self._last + 1
        for entry in entries:
            self._jobs.put(entry)
        self._last += len(entries)
        return list(range(first, self._last + 1))

    async def durable(self, number: int) -> None:
        """Wait until all entries up to this number survive a power cut. Raises JournalError."""
        if number <= self._durable:
            return
        self._check()
        if number > self._last:
            raise ValueError(f"entry {number} is awaited, and the last one is {self._last}")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiters, (number, self._count, future))
        await future

    async def grown(self, after: int) -> None:
        """Wait until an entry after number ``after`` is durable. Raises JournalError."""
        await self._changes.first(lambda: True if self._durable > after or self._failure else None)
        self._check()

    async def read(self, after: int, most_bytes: int = READ_BYTES) -> list[Row]:
        """Return the durable entries after number ``after``, in order, about ``most_bytes`` of them.

        Raises JournalError.
        """
        self._check()
        job = _Read(after, most_bytes)
        self._jobs.put(job)
        return await job.future

    async def turns(self, numbers: Sequence[int]) -> list[Turn]:
        """Return the turns with these numbers.

        Raises UnknownTurn if one of them is not kept any more, and JournalError.
        """
        found = await asyncio.gather(*(self.read(number - 1, 1) for number in numbers))
        turns: list[Turn] = []
        for number, rows in zip(numbers, found, strict=True):
            entry = rows[0].entry() if rows and rows[0].number == number else None
            if not isinstance(entry, Turn):
                raise UnknownTurn(f"turn {number} is not kept any more")
            turns.append(entry)
        return turns

    async def outcomes(self, numbers: Sequence[int]) -> list[str]:
        """Return what the driver has made of the rewards with these numbers.

        An outcome is empty where the driver has not said so within ``OUTCOME_S``. One that comes later is
        kept for the next question.
        """
        loop = asyncio.get_running_loop()
        waiting = {number: self._outcomes.setdefault(number, loop.create_future()) for number in numbers}
        if waiting:
            await asyncio.wait(waiting.values(), timeout=OUTCOME_S)
        for number in [number for number, future in waiting.items() if future.done()]:
            self._outcomes.pop(number, None)
        while len(self._outcomes) > MOST_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]
        return [future.result() if future.done() else "" for future in waiting.values()]

    def rewarded(self, outcomes: Sequence[tuple[int, str]]) -> None:
        """Note what the driver has made of rewards. Those that nobody has asked for are passed over."""
        for number, outcome in outcomes:
            future = self._outcomes.get(number)
            if future is not None and not future.done():
                future.set_result(outcome)

    def acknowledge(self, number: int) -> None:
        """Note that the driver has all entries up to ``number``.

        Raises JournalError if there are not so many: then this file is older than the driver's ledger.
        """
        if number > self._durable:
            raise DamagedJournal(
                f"{self.path} ends with entry {self._durable}, and the driver has {number}: the file was "
                "replaced by an older copy. Move it away: the gateway then begins a new journal"
            )
        if number <= self._acknowledged:
            return
        self._acknowledged = number
        self._changes.notify()
        if self._tidying is None and not self._closed:
            self._tidying = asyncio.get_running_loop().call_later(TIDY_S, self._tidy)

    async def handed_over(self) -> None:
        """Wait until the driver has all entries so far. Raises JournalError."""
        await self._changes.first(lambda: True if self._acknowledged >= self._last or self._failure else None)
        self._check()

    async def failed(self) -> None:
        """Wait until the disk has failed. Raises JournalError."""
        await self._changes.first(lambda: True if self._failure else None)
        self._check()

    def close(self) -> None:
        """Write everything that is left and close the file. Raises JournalError."""
        if self._closed:
            return
        self._closed = True
        if self._tidying is not None:
            self._tidying.cancel()
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise JournalError(f"{self.path}: the last entries were not written in {CLOSE_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise JournalError(f"{self.path} is closed")
        if self._loop is None:
            with suppress(RuntimeError):
                self._loop = asyncio.get_running_loop()

    def _tidy(self) -> None:
        self._tidying = None
        self._jobs.put(_Tidy())

    def _committed(self, number: int) -> None:
        """Wake the tasks that wait for durable entries. Runs on the event loop."""
        self._durable = number
        while self._waiters and self._waiters[0][0] <= number:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)
        self._changes.notify()

    def _fail(self, jobs: list[_Job], failure: JournalError) -> None:
        waiters = [future for _, _, future in self._waiters]
        for future in [*waiters, *(job.future for job in jobs if isinstance(job, _Read))]:
            if not future.done():
                future.set_exception(failure)
        self._waiters.clear()
        self._changes.notify()

    # ---- the thread

    def _run(self) -> None:
        failure: JournalError | None = None
        is_open = True
        while is_open:
            jobs = self._next_jobs()
            is_open = jobs[-1] is not None
            try:
                if failure is None:
                    self._work(jobs)
            except JournalError as error:
                failure = error
            except (Error, OSError) as error:
                failure = explained(self.path, error)
            if failure is not None:
                self._failure = failure
                self._call(self._fail, jobs, failure)

    def _next_jobs(self) -> list[_Job]:
        """Wait for a job, and take all that there are, up to the end."""
        jobs = [self._jobs.get()]
        with suppress(Empty):
            while jobs[-1] is not None:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _work(self, jobs: list[_Job]) -> None:
        entries = [job for job in jobs if isinstance(job, KINDS)]
        if entries:
            first = self._file.stamp.last + 1
            with waits_for_disk(self.path.name):
                self._file.append(first, entries, self._acknowledged)
            self._call(self._committed, self._file.stamp.last)
        for job in jobs:
            if isinstance(job, _Read):
                self._call(_answer, job.future, self._file.rows(job.after, job.most_bytes))
        if any(isinstance(job, _Tidy) for job in jobs):
            self._file.tidy(self._acknowledged)
        if jobs[-1] is None:
            self._file.tidy(self._acknowledged)
            self._file.close()

    def _call(self, then: Callable[..., None], *arguments: object) -> None:
        """Call ``then`` on the event loop, if there is one."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(then, *arguments)


def _answer(future: asyncio.Future[list[Row]], rows: list[Row]) -> None:
    if not future.done():
        future.set_result(rows)
