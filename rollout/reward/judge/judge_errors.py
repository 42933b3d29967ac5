"""Errors of rewards, for the user: why a judge process ended, and what each attempt failed from."""

import os
import re
import signal
from dataclasses import dataclass

from slipstream.rollout.reward.judge.replies import shortened
from slipstream.rollout.reward.judge.wire import CONNECTION_CLOSED, QUESTION, JudgeSetup

NO_CONNECTION = "it has closed the connection of its judge process"

LONGEST_ERROR = 12_000
"""Characters of an error. Its middle is left out beyond it."""

_LONGEST_TEXT = 4000
_ADDRESS = re.compile(r"hread 0x[0-9a-f]+ ")
_SUSPECT = re.compile(rf"in {QUESTION}(\d+)$", re.MULTILINE)
_HERE = f'File "{os.path.dirname(__file__)}{os.sep}'


class JudgingFailed(RuntimeError):
    """No attempt at a question has given a reward. The completion is sound; only the judging has failed."""


class JudgeStartFailed(RuntimeError):
    """The reward cannot be imported or constructed, or its process ends before it is asked anything."""


class JudgesClosed(RuntimeError):
    """The judge pool was closed before the question was answered."""


@dataclass(frozen=True)
class Ending:
    """How a judge process ended."""

    status: int | None
    """Wait status; None: its keeper was killed and could not say."""
    crash: str = ""
    """Tracebacks of all threads, from a fatal signal or from the watchdog."""
    output: str = ""
    """The end of what the process printed."""
    killed_because: str | None = None
    """Reason why the pool has killed it; None: it has not."""

    @property
    def suspect(self) -> int | None:
        """Number of the overlapping question whose code ran when the process died; None: it is not known."""
        numbers = set(_SUSPECT.findall(self.crash))
        return int(numbers.pop()) if len(numbers) == 1 else None

    def cause(self, limit: str) -> str:
        """Return why the process ended. ``limit``: what its watchdog stands for."""
        how = f"it took longer than {limit}" if self.crash.startswith("Timeout (") else self._how()
        if self.crash:
            return f"{how}:\n{shortened(_frames_of_the_user(self.crash), _LONGEST_TEXT)}"
        if self.output:
            return f"{how}; the end of its output:\n{shortened(self.output, _LONGEST_TEXT)}"
        return how

    def _how(self) -> str:
        was_killed = self.status is None or os.WTERMSIG(self.status) == signal.SIGKILL
        if self.killed_because is not None and was_killed:
            return self.killed_because
        if self.status is None:
            return "the keeper of its judge process has ended, perhaps killed by the reward"
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            by = "; the kernel kills so when memory runs out" if number == signal.SIGKILL else ""
            return f"it ended its judge process by signal {_signal_name(number)}{by}"
        code = os.waitstatus_to_exitcode(self.status)
        if code == CONNECTION_CLOSED:
            return NO_CONNECTION
        return f"it ended its judge process with exit code {code}"


def _frames_of_the_user(crash: str) -> str:
    """Return a dump of tracebacks without the frames below the reward, and without addresses of threads."""
    lines: list[str] = []
    is_ours = False
    for line in crash.splitlines():
        if not line.startswith("  "):
            is_ours = False
            if not line.startswith("Timeout ("):
                lines.append(_ADDRESS.sub("hread ", line))
        elif not is_ours:
            is_ours = _HERE in line
            lines += [] if is_ours else [line]
    return "\n".join(lines).strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def failed_judging(setup: JudgeSetup, subject: str, causes: list[str]) -> JudgingFailed:
    """Return the error of a question, with the cause of each attempt. Equal causes are shown once."""
    lines: list[str] = []
    first = 0
    for number, cause in enumerate(causes):
        if number + 1 < len(causes) and causes[number + 1] == cause:
            continue
        attempts = f"attempt {number + 1}" if first == number else f"attempts {first + 1} to {number + 1}"
        lines.append(f"{attempts}: {cause.rstrip()}")
        first = number + 1
    setting = f"{setup.section}.attempts: {len(causes)}"
    what = "judge" if setup.of_turns else "reward"
    head = f"the {what} {setup.path} has failed for {subject} in every attempt ({setting})"
    return JudgingFailed(shortened("\n".join([head, *lines]), LONGEST_ERROR))
