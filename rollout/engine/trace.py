"""Records the times of every engine request, to which a simulator can be fitted."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.rollout.engine.client import EngineLost
from slipstream.rollout.engine.completion import Aborted
from slipstream.rollout.trajectory import Completion


@dataclass(frozen=True)
class RequestTrace:
    """One request to one engine, from its sending to its end. An interrupted completion takes several.

    Times are in seconds of ``time.monotonic``.
    """

    engine: str
    start_s: float
    first_token_s: float | None
    """None when no token arrived."""
    end_s: float
    prompt_tokens: int
    """Input tokens: those of the prompt, and those of a partial completion that is continued."""
    new_tokens: int
    retractions: int
    interrupted: bool
    """The request was aborted, lost, refused or cancelled."""


class Watch:
    """Observes the completion of one request as it grows."""

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.completion: Completion | None = None
        self.whole = False

    def saw(self, completion: Completion | None) -> None:
        if completion is not None and completion.tokens:
            self.completion = completion
            if self.first_token_s is None:
                self.first_token_s = time.monotonic()


@contextmanager
def watched(engine: str, prompt_tokens: int, trace: Callable[[RequestTrace], None] | None) -> Iterator[Watch]:
    """Surround one request, and give its times to ``trace`` however it ends."""
    watch, start_s = Watch(), time.monotonic()
    try:
        yield watch
        watch.whole = True
    except (EngineLost, Aborted) as cut:
        watch.saw(cut.partial)
        raise
    finally:
        if trace is not None:
            seen = watch.completion
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
