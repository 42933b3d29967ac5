"""One time limit for many coroutines at once, at the price of one timer."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

_running: ContextVar["_Entry"] = ContextVar("time limit")
"""The limit around the running code."""


class TimeLimit:
    """A limit of one length for any number of tasks.

        limit = TimeLimit(600)
        with limit():               # TimeoutError unless the block ends within 600 seconds
            await something()

    ``asyncio.timeout`` sets and cancels a timer for each use, a good part of the driver's CPU time for an
    episode. Limits of one length run out in the order in which they were set, so that only the first one
    needs a timer. Single event loop.
    """

    def __init__(self, seconds: float, setting: str = "") -> None:
        """``setting``: the setting with the seconds, for the message of a TimeoutError."""
        self.seconds = seconds
        self.setting = setting
        self.entered: dict[_Entry, None] = {}
        """Running blocks, in the order in which their time runs out."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_s: float | None = None
        """When the clocks were stopped; None: they run."""

    def __call__(self) -> "_Entry":
        """Limit a block of the running task. Its time begins when the block does."""
        return _Entry(self)

    def stop(self, stops: bool) -> None:
        """Stop the clocks of all limits, or let them go on."""
        loop = asyncio.get_running_loop()
        if stops and self._stopped_s is None:
            self._stopped_s = loop.time()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif not stops and self._stopped_s is not None:
            began, self._stopped_s = self._stopped_s, None
            for entry in self.entered:
                entered = entry.due - self.seconds
                entry.due += loop.time() - max(began, entered)
            if self.entered:
                self._set_timer(loop)

    @contextmanager
    def suspended(self) -> Generator[None, None, None]:
        """Stop the clock of the limit around the running task, or around the task that has created it.

        After the block the limit begins anew, so that limits go on running out in the order of their begin.
        """
        entry = _running.get(None)
        if entry is None or entry.has_run_out:
            yield
            return
        entry.suspensions += 1
        self.entered.pop(entry, None)
        try:
            yield
        finally:
            entry.suspensions -= 1
            if not entry.suspensions and entry.is_inside:
                self.enter(entry, asyncio.get_running_loop())

    def enter(self, entry: "_Entry", loop: asyncio.AbstractEventLoop) -> None:
        """Let the time of a block begin."""
        entry.due = loop.time() + self.seconds
        self.entered[entry] = None
        if self._timer is None and self._stopped_s is None:
            self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(next(iter(self.entered)).due, self._run_out, loop)

    def _run_out(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        while self.entered:
            entry = next(iter(self.entered))
            if entry.due > now:
                self._set_timer(loop)
                return
            del self.entered[entry]
            entry.has_run_out = True
            entry.task.cancel()


class _Entry:
    __slots__ = (
        "_cancelling",
        "_limit",
        "_token",
        "due",
        "has_run_out",
        "is_inside",
        "suspensions",
        "task",
    )

    task: asyncio.Task[object]
    due: float

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self.has_run_out = False
        self.is_inside = False
        self.suspensions = 0
        """Number of blocks of ``suspended`` that the task, or tasks that it has created, are inside."""

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit is for the inside of a task")
        self.task = task
        self._cancelling = task.cancelling()
        self.is_inside = True
        self._token = _running.set(self)
        self._limit.enter(self, task.get_loop())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.is_inside = False
        _running.reset(self._token)
        del self._token  # it refers to the block around this one, which may be that of an earlier task
        task = self.task
        del self.task
        if not self.has_run_out:
            self._limit.entered.pop(self, None)
        # As in asyncio.timeout: a cancellation that others asked for as well goes on.
        elif task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            setting = f" ({self._limit.setting})" if self._limit.setting else ""
            raise TimeoutError(f"not done within {self._limit.seconds:g} s{setting}") from error
