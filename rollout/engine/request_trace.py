"""Records the times of every engine request, to which a simulator can be fitted."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slipstream.rollout.engine.growing import GrowingCompletion


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
    """Notes when the first token of a request arrives."""

    def __init__(self) -> None:
        self.first_token_s: float | None = None

    def grown(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()


@contextmanager
def watched(
    engine: str,
    prompt_tokens: int,
    completion: GrowingCompletion,
    trace: Callable[[RequestTrace], None] | None,
) -> Iterator[Watch]:
    """Surround one request, which adds to ``completion``, and give its times to ``trace`` however it ends."""
    watch, start_s = Watch(), time.monotonic()
    length, retractions = len(completion.tokens), completion.retractions
    interrupted = True
    try:
        yield watch
        interrupted = False
    finally:
        if trace is not None:
            new_tokens = len(completion.tokens) - length
            if new_tokens:  # they may have come with the end
                watch.grown()
            trace(
                RequestTrace(
                    engine,
                    start_s,
                    watch.first_token_s,
                    time.monotonic(),
                    prompt_tokens,
                    new_tokens=new_tokens,
                    retractions=completion.retractions - retractions,
                    interrupted=interrupted,
                )
            )
