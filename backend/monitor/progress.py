"""Shows the progress of a run: a table that grows above a live line on a terminal, plain lines elsewhere."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from slipstream.backend.monitor import units
from slipstream.backend.monitor.units import clock_face, count, seconds
from slipstream.rollout.system.lines import LineFile
from slipstream.rollout.system.log_thread import LogThread, to_stderr

FIRST_SILENCE_S = 30.0
"""Silence after which a log gets a sign of life. Each further sign comes after twice as long a silence."""

ETA_STEPS = 20
"""Number of latest steps from which the time left is estimated: completions get longer as a policy learns."""

GAP, MIN_BAR, MAX_BAR = 2, 4, 30
"""Columns between the figures of the live line, and the smallest and largest width of its bar."""


DRIVER_LOG = "driver.log"

TICK_S = 0.02
"""Largest time by which what is written into a file is older than by the clock: a tick of the kernel."""

MOST_LINES = 10_000
"""Lines that may wait for the thread of ``driver.log``."""

HEADING_ROWS, CELL = 25, 11
"""Rows of the table between two headings, and the width of its cells."""


def _of(bound: int | None) -> str:
    return "" if bound is None else f"/{bound}"


def _rate(tokens_per_s: float) -> str:
    """Return the speed of generation; ``-`` in the last steps, for which everything is generated already."""
    return count(tokens_per_s) if tokens_per_s > 0 else "-"


def _columns(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>{CELL}}" for cell in cells)


class DriverLog:
    """``driver.log`` of a run folder: the lines of every start. Lines that come before the folder wait.

    A thread writes them, so that a disk that is full, fails or stalls holds up no line on the screen.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._file: LineFile | None = None
        self._thread = LogThread(DRIVER_LOG, MOST_LINES, "lines", _on_screen)

    def open(self, folder: Path) -> None:
        """Write into ``folder`` from now on. Raises OSError."""
        self._file = LineFile(folder / DRIVER_LOG, _on_screen)
        self.write(time.strftime("---- started %Y-%m-%d %H:%M:%S"))
        waiting, self._waiting = self._waiting, []
        for line in waiting:
            self.write(line)

    def write(self, line: str) -> None:
        """Add a line."""
        if self._file is None:
            self._waiting.append(line)
            return
        self._thread.offer(partial(_append, self._file, line))

    def close(self) -> None:
        if self._thread.flush() and self._file is not None:
            self._file.close()


def _append(file: LineFile, line: str) -> None:
    file.add(line.encode(errors="replace"))
    file.flush()


def _on_screen(text: str) -> None:
    """Tell of a log that cannot be written without that log."""
    to_stderr(f"note: {text}")


def append_to_log(folder: Path, text: str, since: float = 0.0) -> None:
    """Add what a start has come to to its log, if it has written one since ``since``, in Unix seconds."""
    path = folder / DRIVER_LOG
    if path.exists() and path.stat().st_mtime >= since - TICK_S:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


@dataclass(frozen=True)
class HeldOut:
    """Result of an evaluation: the mean reward of held-out prompts."""

    reward: float
    is_accuracy: bool

    @property
    def name(self) -> str:
        return "accuracy" if self.is_accuracy else "held-out"

    def __str__(self) -> str:
        return units.reward(self.reward, is_accuracy=self.is_accuracy)


class Progress(Protocol):
    """Tells the user what a run is doing. Its methods must be called from one thread."""

    def phase(self, text: str) -> None:
        """Announce what begins now, such as ``starting engine 1/1``. The display adds how long it takes."""

    def step(
        self, step: int, *, reward: float, head_lag: int, tokens_per_s: float, held_out: HeldOut | None = None
    ) -> None:
        """Report a finished training step.

        `reward` is the mean over the batch, `head_lag` the largest in versions, `tokens_per_s` counts
        generated tokens, and `held_out` is the evaluation since the last step, if there was one.
        """

    def note(self, text: str) -> None:
        """Show a warning or an event, which stays on the screen."""

    def keep_in(self, folder: Path) -> None:
        """Write a log into the run folder from now on, beginning with what was shown before."""

    def lasts(self, total_steps: int) -> None:
        """Set the number of training steps of a run that is known only once its data is counted."""

    def close(self) -> None:
        """End the display. The last line stays visible."""


def open_progress(
    total_steps: int,
    *,
    bound: int | None = None,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return the display that fits `stream` (default: stderr): live on a terminal, plain lines elsewhere.

    `total_steps`: 0 if it is not known yet; see `lasts`. `bound`: largest head lag that the recipe allows;
    None: it has no meaning here. `clock` gives seconds from any origin.
    """
    output: TextIO = stream or sys.stderr
    if output.isatty() and os.environ.get("TERM") != "dumb":
        return LiveProgress(total_steps, output, clock, bound=bound)
    return PlainProgress(total_steps, output, clock, bound=bound)


class StepTimer:
    """Estimates the time left from the intervals between finished steps."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._finished: deque[tuple[int, float]] = deque(maxlen=ETA_STEPS + 1)

    def finish(self, step: int, now: float) -> float | None:
        """Record that `step` finished at `now`; return the seconds left, or None after the first step."""
        self._finished.append((step, now))
        (first_step, first_time), steps = self._finished[0], step - self._finished[0][0]
        if steps <= 0:
            return None
        return (now - first_time) / steps * (self._total_steps - first_step - steps)


class PlainProgress:
    """Prints one line per phase, step and note, without control characters, for files and Slurm's output.

    A thread adds a line after `silence_s` seconds of silence, so that waiting and hanging look different.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        clock: Callable[[], float],
        *,
        bound: int | None = None,
        silence_s: float = FIRST_SILENCE_S,
    ) -> None:
        self._total_steps = total_steps
        self._bound = bound
        self._stream = stream
        self._log = DriverLog()
        self._clock = clock
        self._silence_s = silence_s
        self._timer = StepTimer(total_steps)
        self._start = self._waiting_since = clock()
        self._waiting_for = "starting"
        self._evaluation: str | None = None
        """Name of the column of evaluations; None before the first one."""
        self._lines = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._break_silence, name="progress", daemon=True)
        self._thread.start()

    def phase(self, text: str) -> None:
        self._say(text, waiting_for=text)

    def step(
        self, step: int, *, reward: float, head_lag: int, tokens_per_s: float, held_out: HeldOut | None = None
    ) -> None:
        left_s = self._timer.finish(step, self._clock())
        width = len(str(self._total_steps))
        figures = [f"step {step:{width}d}/{self._total_steps}", f"reward {units.reward(reward):>6}"]
        if held_out is not None:
            self._evaluation = held_out.name
        if self._evaluation is not None:
            figures.append(f"{self._evaluation} {'-' if held_out is None else str(held_out):>6}")
        figures += [
            f"lag {head_lag:2d}{_of(self._bound)}",
            f"{_rate(tokens_per_s):>6} tok/s",
            f"left {'-' if left_s is None else clock_face(left_s)}",
        ]
        is_last = step >= self._total_steps > 0
        self._say("  ".join(figures), waiting_for="the end" if is_last else f"step {step + 1}")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def keep_in(self, folder: Path) -> None:
        with self._changed:
            self._log.open(folder)

    def lasts(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._timer = StepTimer(total_steps)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._log.close()

    def _say(self, text: str, *, waiting_for: str | None = None) -> None:
        with self._changed:
            if waiting_for is not None:
                self._waiting_for, self._waiting_since = waiting_for, self._clock()
            self._lines += 1
            self._changed.notify_all()
            self._print(text)

    def _print(self, text: str) -> None:
        line = f"{clock_face(self._clock() - self._start):>8}  {text}"
        print(line, file=self._stream, flush=True)
        self._log.write(line)

    def _break_silence(self) -> None:
        with self._changed:
            silence_s = self._silence_s
            while not self._closed:
                lines = self._lines
                spoke = self._changed.wait_for(lambda n=lines: self._closed or self._lines != n, silence_s)
                if spoke:
                    silence_s = self._silence_s
                    continue
                silence_s *= 2
                waited = seconds(self._clock() - self._waiting_since)
                self._print(f"... {self._waiting_for} ({waited})")


@dataclass(frozen=True)
class _Shown:
    """Content of the live line. It is replaced as a whole, because another thread draws it."""

    step: int = 0
    reward: float = 0.0
    head_lag: int = 0
    tokens_per_s: float = 0.0
    held_out: HeldOut | None = None
    left_s: float | None = None
    phase: str | None = None
    since: float = 0.0


class LiveProgress:
    """Redraws one line in place: spinner, step, bar, figures, and the time left or the current phase.

    Above it a table grows by a row with each step. Notes and everything else that the process prints appear
    among its rows. On a narrow terminal the bar and some figures are left out.
    """

    def __init__(
        self, total_steps: int, stream: TextIO, clock: Callable[[], float], *, bound: int | None = None
    ) -> None:
        self._total_steps = total_steps
        self._bound = bound
        self._clock = clock
        self._start = self._last_step = clock()
        self._rows = 0
        self._log = DriverLog()
        self._timer = StepTimer(total_steps)
        self._shown = _Shown(phase="starting", since=clock())
        self._spinner: Spinner | Text = Spinner("dots", style="cyan")
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            self,
            console=self._console,
            refresh_per_second=8,
            # Output that the user redirects to a file must not appear on the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def phase(self, text: str) -> None:
        self._shown = replace(self._shown, phase=text, since=self._clock())
        self._write(text)

    def step(
        self, step: int, *, reward: float, head_lag: int, tokens_per_s: float, held_out: HeldOut | None = None
    ) -> None:
        now = self._clock()
        self._row(step, reward, head_lag, tokens_per_s, held_out, now)
        self._shown = _Shown(
            step=step,
            reward=reward,
            head_lag=head_lag,
            tokens_per_s=tokens_per_s,
            held_out=held_out or self._shown.held_out,
            left_s=self._timer.finish(step, now),
            since=now,
        )

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))
        self._write(f"note: {text}")

    def keep_in(self, folder: Path) -> None:
        self._log.open(folder)

    def lasts(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._timer = StepTimer(total_steps)

    def close(self) -> None:
        self._spinner = Text(" ")
        self._live.stop()
        self._log.close()

    def _row(
        self,
        step: int,
        reward: float,
        head_lag: int,
        tokens_per_s: float,
        held_out: HeldOut | None,
        now: float,
    ) -> None:
        """Print the row of a step, and the heading again after every HEADING_ROWS of them."""
        cells = {
            "step": f"{step}/{self._total_steps}",
            "reward": units.reward(reward),
            "held out": "-" if held_out is None else str(held_out),
            "lag": f"{head_lag}{_of(self._bound)}",
            "tok/s": _rate(tokens_per_s),
            "took": seconds(now - self._last_step),
            "at": clock_face(now - self._start),
        }
        self._last_step = now
        if self._rows % HEADING_ROWS == 0:
            self._console.print(Text(_columns(cells), style="dim"), overflow="crop", no_wrap=True)
        self._rows += 1
        row = _columns(cells.values())
        self._console.print(Text(row), overflow="crop", no_wrap=True)
        self._write("  ".join(f"{name} {value}" for name, value in cells.items()))

    def _write(self, text: str) -> None:
        self._log.write(f"{clock_face(self._clock() - self._start):>8}  {text}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._shown
        figures: list[Text] = []
        if shown.step:
            figures.append(Text(f"step {shown.step}/{self._total_steps}", style="bold"))
            figures.append(Text(f"reward {units.reward(shown.reward)}", style="green"))
            if shown.held_out is not None:
                figures.append(Text(f"{shown.held_out.name} {shown.held_out}", style="green"))
            figures.append(Text(f"lag {shown.head_lag}{_of(self._bound)}", style="magenta"))
            figures.append(Text(f"{_rate(shown.tokens_per_s)} tok/s"))
        waited_s = self._clock() - shown.since
        if shown.phase is not None:
            end = [Text(f"{shown.phase} {clock_face(waited_s)}", style="cyan")]
        elif shown.left_s is not None:
            end = [Text(f"{clock_face(max(0.0, shown.left_s - waited_s))} left", style="dim")]
        else:
            end = []

        def room() -> int:
            return options.max_width - 1 - sum(GAP + text.cell_len for text in figures + end)

        while len(figures) > 1 and room() < 0:
            figures.pop()
        cells: list[Spinner | ProgressBar | Text] = [self._spinner, *figures, *end]
        if figures and room() >= GAP + MIN_BAR:
            cells.insert(2, ProgressBar(self._total_steps, shown.step, width=min(MAX_BAR, room() - GAP)))
        line = Table.grid(padding=(0, GAP, 0, 0))
        for _ in cells:
            line.add_column(no_wrap=True)
        line.add_row(*cells)
        yield line
