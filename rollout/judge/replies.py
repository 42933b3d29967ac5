"""Replies about one question: the number that a reward returned, or why there is none."""

import asyncio
import linecache
import math
import os
import reprlib
import traceback
from collections.abc import Iterator
from typing import Any, SupportsFloat, cast

import numpy as np
import numpy.typing as npt

from slipstream.rollout.judge.wire import Blame, Ruled, Scored, Unscored
from slipstream.rollout.reward.live import Verdict

LONGEST_TRACEBACK = 6000
"""Characters of a traceback in a reply. The middle of a longer one is left out."""

_HERE = os.path.dirname(__file__)


class NoNumber(ValueError):
    """A reward returned something else than a finite real number."""


def number_of(value: Any) -> float:
    """Return what a reward returned as a float. Raises NoNumber, and whatever a type of the user's raises."""
    if isinstance(value, np.ndarray | np.generic):
        array = cast("npt.NDArray[Any]", value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise NoNumber(_refusal(array))
        value = array.item()
    number = cast(object, value)
    if not isinstance(number, SupportsFloat):
        raise NoNumber(_refusal(number))
    try:
        result = float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise NoNumber(_refusal(number)) from error
    if not math.isfinite(result):
        raise NoNumber(_refusal(number))
    return result


def _refusal(value: object) -> str:
    try:
        shown = _repr.repr(value)
    except Exception:  # a repr of the user's, or an integer with more digits than Python prints
        shown = "something"
    return f"it returned {shown} of type {type(value).__name__}, expected a finite number"


_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 200


def scored(number: int, value: Any) -> Scored:
    """Return the reply with a reward. Raises what ``number_of`` raises."""
    return Scored(number, number_of(value))


LONGEST_HINT = 100_000
"""Characters of a hint in a reply. The middle of a longer one is left out."""


def ruled(number: int, value: Any) -> Ruled:
    """Return the reply with a verdict; None is one without a score. Raises what ``number_of`` raises."""
    if value is None:
        return Ruled(number, None)
    if not isinstance(value, Verdict):
        raise NoNumber(f"it returned something of type {type(value).__name__}, expected a Verdict or None")
    score, hint = cast(object, value.score), cast(object, value.hint)
    if hint is not None and not isinstance(hint, str):
        raise NoNumber(f"its hint is of type {type(hint).__name__}, expected a text or None")
    return Ruled(
        number,
        None if score is None else number_of(score),
        None if hint is None else shortened(hint, LONGEST_HINT),
    )


def unscored(number: int, error: BaseException) -> Unscored:
    """Return the reply about whatever the reward has raised, exits and cancellations included."""
    if isinstance(error, NoNumber):
        return Unscored(number, str(error))
    if isinstance(error, MemoryError):
        reason = "it ran out of memory (rollout.judging.memory_mb)"
        return Unscored(number, f"{reason}:\n{traceback_of(error)}", Blame.MEMORY)
    blame = Blame.CANCELLED if isinstance(error, asyncio.CancelledError) else Blame.QUESTION
    return Unscored(number, f"it raised {type(error).__name__}:\n{traceback_of(error)}", blame)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error from user code, without frames of ours at its top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except BaseException as second:
        text = f"{type(error).__name__}, which cannot be shown: {type(second).__name__}"
    return shortened(text)


def waiting_at(task: "asyncio.Task[Any]") -> str:
    """Return where a task awaits, in the form of a traceback without frames of ours at its top."""
    lines = [
        f'  File "{file}", line {line}, in {name}\n    {linecache.getline(file, line).strip()}\n'
        for file, line, name in _places(task.get_coro())
        if not _is_ours(file)
    ]
    return shortened("It was awaiting at (most recent call last):\n" + "".join(lines))


def _places(awaitable: Any) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and function of every frame between a coroutine and what it finally awaits."""
    while awaitable is not None:
        for kind, awaited in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            frame = getattr(awaitable, f"{kind}_frame", None)
            if frame is not None:
                yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
                awaitable = getattr(awaitable, awaited)
                break
        else:
            return


def shortened(text: str, longest: int = LONGEST_TRACEBACK) -> str:
    """Return ``text`` with the middle left out if it is longer than ``longest`` characters."""
    if len(text) <= longest:
        return text
    head = longest // 3
    return f"{text[:head]}\n[... {len(text) - longest} characters left out ...]\n{text[head - longest :]}"


def _is_ours(file: str) -> bool:
    return os.path.dirname(file) == _HERE
