"""Ends a run on request: Ctrl-C, SIGTERM, and the end of the job that it runs in."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from slipstream.backend.driver.loops.job_end import JobEnd, earlier_steps
from slipstream.backend.monitor.progress import Progress

T = TypeVar("T")


class Stopped(Exception):
    """The user or the scheduler asked the run to end."""


class JobEnds(Stopped):
    """The run has ended by itself because its job does: a further start of the job goes on with it."""


class Stop:
    """Ends a run after the present training step at the first request, at once at the second.

    Further requests are ignored, so that clean-up is not cut short. So is the first signal after the run's
    own request: Slurm warns of the end of the job that the run ends for (``--signal`` in slurm/train.sbatch).
    """

    def __init__(self, progress: Progress, job: JobEnd | None = None) -> None:
        """``job``: the end of the job, before which a run requests its own end; None: it has no limit."""
        self._progress = progress
        self._job = job
        self._timer: asyncio.TimerHandle | None = None
        """Rings when the job may be near its end; None outside of ``run``, and without a limit."""
        self._is_for_job = False
        self._ways: list[tuple[str, Callable[[], object]]] = []
        self._end: Callable[[Exception], object] | None = None
        """Ends the work of ``run`` with an error; None while there is none. Callable from any thread."""
        self._expects_warning = False
        """The next signal is the scheduler's warning of an end that the run knows."""
        self.asked = False

    @contextmanager
    def by(self, how: str, end: Callable[[], object]) -> Iterator[None]:
        """Let the next request inside the block call ``end``; ``how`` tells the user what happens."""
        way = (how, end)
        self._ways.append(way)
        try:
            yield
        finally:
            if way in self._ways:
                self._ways.remove(way)

    def ask(self) -> None:
        """Request the end."""
        if self._ways:
            self.asked = True
            how, end = self._ways.pop()
            self._progress.phase(how)
            end()

    def goes_on(self, folder: Path) -> None:
        """Begin with what the last steps of the run in ``folder`` took, in an earlier job."""
        for seconds in earlier_steps(folder) if self._job is not None else ():
            self.step_done(seconds)

    def step_done(self, seconds: float) -> None:
        """Correct the time of the run's own request by a training step of this length."""
        if self._job is not None:
            self._job.step_done(seconds)
            self._set_timer()

    def checkpoint_done(self, seconds: float) -> None:
        """Correct the time of the run's own request by a checkpoint that took this long."""
        if self._job is not None:
            self._job.checkpoint_done(seconds)
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None and self._job is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._job.left_s, self._time_is_up)

    def _time_is_up(self) -> None:
        if not self.asked:
            self._progress.phase("the time limit of the job is near")
            self._is_for_job = True
            self.ask()
            self._expects_warning = True

    def _signalled(self) -> None:
        if self._expects_warning:
            self._expects_warning = False
        else:
            self.ask()

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Request the end inside the block when the time for it has come."""
        if self._job is None:
            yield
            return
        self._timer = asyncio.get_running_loop().call_later(self._job.left_s, self._time_is_up)
        try:
            yield
        finally:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM request the end inside the block.

        Signals come to the main thread of a process. A run in another one is asked by its owner.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def fail(self, error: Exception) -> None:
        """Cancel the work of ``run``, which then raises ``error``. May be called from any thread."""
        if self._end is not None:
            self._end(error)

    async def run(self, work: Coroutine[None, None, T]) -> T:
        """Return the result of ``work``, which a request cancels. Raises Stopped then, and JobEnds if the
        request was the run's own."""
        task = asyncio.ensure_future(work)
        loop, errors = asyncio.get_running_loop(), list[Exception]()

        def fail(error: Exception) -> None:
            errors.append(error)
            task.cancel()

        self._end = lambda error: loop.call_soon_threadsafe(fail, error)
        with self.on_signals(), self.by("stopping", task.cancel), self._in_time():
            try:
                return await task
            except (asyncio.CancelledError, Stopped) as error:
                if errors:
                    raise errors[0] from None
                if self.asked or isinstance(error, Stopped):
                    raise (JobEnds if self._is_for_job else Stopped) from None
                raise
            finally:
                self._end = None
