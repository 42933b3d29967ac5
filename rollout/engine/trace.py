"""The times of every engine request, for fitting a simulator to a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.rollout.engine.answer import Aborted
from slipstream.rollout.engine.client import EngineLost
from slipstream.rollout.trajectory import Completion


@dataclass(frozen=True)
class RequestTrace:
    """One request to one engine, from its sending to its end. An interrupted answer takes several.

    Times are in seconds of ``time.monotonic``.
    """

    engine: str
    start_s: float
    first_token_s: float | None
    """None when no token arrived."""
    end_s: float
    prompt_tokens: int
    """Those of the answer that is gone on with included."""
    new_tokens: int
    retractions: int
    interrupted: bool
    """Ended without a finish: aborted, lost, refused or cancelled."""


class Watch:
    """Sees the answer to one request grow."""

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.answer: Completion | None = None
        self.whole = False

    def saw(self, answer: Completion | None) -> None:
        if answer is not None and answer.tokens:
            self.answer = answer
            if self.first_token_s is None:
                self.first_token_s = time.monotonic()


@contextmanager
def watched(engine: str, prompt_tokens: int, trace: Callable[[RequestTrace], None] | None) -> Iterator[Watch]:
    """Around one request: tells ``trace`` of it however it ends."""
    watch, start_s = Watch(), time.monotonic()
    try:
        yield watch
        watch.whole = True
    except (EngineLost, Aborted) as cut:
        watch.saw(cut.partial)
        raise
    finally:
        if trace is not None:
            seen = watch.answer
            trace(
                RequestTrace(
                    engine,
                    start_s,
                    watch.first_token_s,
                    time.monotonic(),
                    prompt_tokens,
                    new_tokens=len(seen.tokens) if seen else 0,
                    retractions=seen.retractions if seen else 0,
                    interrupted=not watch.whole,
                )
            )
