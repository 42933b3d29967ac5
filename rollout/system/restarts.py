"""Whether a part of a run that has failed is started again. Pure: the clock comes in.

    failure ──► the same as the last one, and no progress in between ──► ends the run
            ──► one more than `allowed` within `window_s` ─────────────► ends the run
            ──► any other ─────────────────────────────────────────────► the part is started again

A failure that repeats would be there at every start, and each start loads a model. Failures with progress in
between are counted within a window, so that a run of weeks outlives what breaks now and then.

A part whose node is lost (``NodeLost``) is not started again. The run goes on without it while another part
of its kind is left.
"""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SAME = 2
"""Number of equal failures in a row that end the run: the second one shows that a start changes nothing."""

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+, in (?P<function>.+)$')
_ERROR = re.compile(r"^(?:\[[^\]]*\] *)?(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Failed)\b.*)$")
_EXIT_CODE = re.compile(r"\b(code|signal) (-?\d+)")
_VARIABLE = (
    (re.compile(r"\x1b\[[\d;]*m"), ""),
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b"), "#"),
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{12,}\b"), "#"),
    (re.compile(r"(?<![\w.])~?(?:/[\w.@+=-]+)+/?"), "PATH"),
    (re.compile(r"\d+(?:[.:]\d+)*(?: ?(?:bytes|[KMGT]i?B)\b)?"), "#"),
)
"""Parts of a message that differ between two failures for one reason: colors, addresses, ids, paths, and
numbers with their ports or units."""


class NodeLost(RuntimeError):
    """The node of a part has left the cluster: the part has no place for a further start."""


@dataclass(frozen=True)
class RestartLimit:
    """Limits of the restarts of one part of a run."""

    setting: str
    """Setting that ``allowed`` is from, for messages."""
    allowed: int | None
    """Number of restarts within the window; None: no limit."""
    window_s: float
    """``run.restart_window_s``."""
    progress: str
    """What counts as progress, for messages: ``it has not SERVED in between``."""
    same: int | None = SAME
    """Number of equal failures without progress that end the run; None: they are counted like others."""


class Restarts:
    """Failures and restarts of one part of a run. Single event loop."""

    def __init__(self, limit: RestartLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._times: deque[float] = deque()
        """Times of the failures within the window."""
        self._first = ""
        """First of the equal failures in a row; empty after progress."""
        self._sameness: tuple[str, ...] = ()
        self._repeats = 0
        self.count = 0
        """Number of restarts so far."""

    def progressed(self) -> None:
        """Note that the part has done what it is for since its last failure."""
        self._first, self._sameness, self._repeats = "", (), 0

    def excused(self) -> None:
        """Count a restart after a failure that says nothing about the part."""
        self.count += 1

    def refused(self, failure: str) -> str | None:
        """Take note of a failure. Return why the part must not be started again; None: it is, and is counted.

        ``failure``: a sentence, followed by a traceback or the end of a log where there is one.
        """
        self._note(failure)
        limit = self._limit
        if limit.same is not None and self._repeats >= limit.same:
            return (
                f"has failed {_times(self._repeats)} in the same way, and {limit.progress} in between: a "
                f"further start would end so, too. The first failure: {self._first}"
            )
        if limit.allowed is not None and len(self._times) > limit.allowed:
            return (
                f"has failed {_times(len(self._times))} within {limit.window_s / 3600:g} h "
                f"(run.restart_window_s), and {limit.setting} allows {limit.allowed} "
                f"restart{'' if limit.allowed == 1 else 's'} in that time; the last time: {failure}"
            )
        self.count += 1
        return None

    def _note(self, failure: str) -> None:
        now_s = self._clock()
        self._times.append(now_s)
        while now_s - self._times[0] > self._limit.window_s:
            self._times.popleft()
        if (sameness := sameness_of(failure)) == self._sameness:
            self._repeats += 1
        else:
            self._first, self._sameness, self._repeats = failure, sameness, 1


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def sameness_of(failure: str) -> tuple[str, ...]:
    """Return what two failures for one reason have in common.

    With a traceback: the innermost frame and the error of the first one, which is the original error of a
    chain. Otherwise the first line, and the first error that the end of a log names. Numbers, addresses and
    paths in messages count for nothing, exit codes do.
    """
    lines = failure.splitlines() or [""]
    start = next((number for number, line in enumerate(lines) if _HEADER in line), None)
    if start is not None:
        place = ""
        for line in lines[start + 1 :]:
            if (frame := _FRAME.match(line)) is not None:
                place = f"{_module(frame['file'])}:{frame['function']}"
            elif line.strip() and not line.startswith((" ", "\t")):
                return place, normalized(line)
        return place, normalized(lines[0])
    head, _, _ = lines[0].partition("; the end of ")
    errors = (match["error"] for line in lines[1:] if (match := _ERROR.match(line)) is not None)
    return normalized(head), normalized(next(errors, ""))


def normalized(message: str) -> str:
    """Return a message without what differs between two failures for one reason."""
    codes: list[str] = []

    def kept(match: re.Match[str]) -> str:
        codes.append(match[2])
        return f"{match[1]} \0"

    message = _EXIT_CODE.sub(kept, message)
    for pattern, stands_for in _VARIABLE:
        message = pattern.sub(stands_for, message)
    for code in codes:
        message = message.replace("\0", code, 1)
    return message.strip()


def _module(file: str) -> str:
    """Return the last parts of a source file's path. The folder of an installation may be a temporary one."""
    return "/".join(file.rsplit("/", 3)[-3:])
