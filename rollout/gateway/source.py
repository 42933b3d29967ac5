"""The source of the gateway's tokens: ids in; ids, log-probs and version spans out. No HTTP, no text.

    async for delta in source.generate(request):
        delta.tokens, delta.logprobs      # new since the delta before
        delta.spans                       # of all tokens so far; lower bounds until the last delta
        delta.finish                      # of the last delta only

The gateway wraps an engine pool in one of these; tests and benchmarks have one that follows a script.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.rollout.engine.growing import Alternatives
from slipstream.rollout.tokens.trajectory import Finish

LIVE_PRIORITY = 100
"""Priority of live requests in the engines' queue. Rollouts have 0, so that users never wait for them."""


class Rejected(ValueError):
    """The engine refuses a request, for example because of a grammar that it cannot compile. The client is to
    blame; the message is shown to it."""


class Exhausted(RuntimeError):
    """No engine can take a request for now. Nothing is wrong with the request."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Interrupted(RuntimeError):
    """A request has failed after it began, through no fault of the client."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One completion that is to be generated."""

    input_ids: Sequence[int]
    sampling: Mapping[str, object]
    """Sampling parameters under SGLang's names (``SamplingParams``), without ``n``. ``max_new_tokens`` is
    always given, and fits into the context."""
    priority: int = LIVE_PRIORITY
    """Engines take waiting requests in the order of falling priority."""
    top_logprobs: int = 0
    """Number of alternatives to report for each token."""
    scores_prompt: bool = False
    """The log-probs of the prompt's tokens are wanted, too."""
    key: str = ""
    """Name of the client's API key."""
    id: str = ""
    """Id of the client's request, which messages to the user name."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a completion."""

    finish: Finish
    """STOP or LENGTH."""
    matched: int | str | None = None
    """The token id or the stop string that ended it; None: neither."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The tokens of a completion that have come since the delta before."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """The engine's own log-prob of each token."""
    spans: Sequence[tuple[int, int]]
    """(version, tokens) of all tokens so far, in order: they tile them. Before the last delta a version may
    be a lower bound."""
    top_logprobs: Sequence[Alternatives] = ()
    """For each of the tokens, if the request has asked for them."""
    cached_tokens: int = 0
    """Number of prompt tokens that the engine had in its cache."""
    finish: Finished | None = None
    prompt_logprobs: Sequence[float | None] = ()
    """In the first delta, if the request has asked for them: of each prompt token, given those before it."""
    prompt_top_logprobs: Sequence[Alternatives] = ()
    """The likeliest tokens at the same positions, if the request has asked for alternatives."""


class TokenSource(Protocol):
    """Generates completions."""

    def generate(self, request: TokenRequest) -> AsyncGenerator[TokenDelta]:
        """Yield the completion of a request as it grows; the last delta has ``finish``.

        A delta may be empty, the last one included: the token that ends the completion need not come with
        ``finish``. Updates of the weights and lost engines show as pauses only. Closing the generator, or
        cancelling the task that waits for it, aborts the request on the engine.

        Raises Rejected, and Exhausted before the first delta only; Interrupted at any time.
        """
        ...

    @property
    def version(self) -> int:
        """Policy version that a new request gets."""
        ...

    def retry_after_s(self) -> float | None:
        """Return in how many seconds to try again, if no request can be taken now; None if one can.

        Decided at once. An update of the weights is no reason: requests wait for its end.
        """
        ...
