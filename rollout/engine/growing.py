"""A completion that grows: tokens are appended, never copied. Pure.

    tokens      5  9  2 | 7  7 | 4          add(3, [5, 9, 2], ...); add(3, [7, 7], ...); add(4, [4], ...)
    runs        version 3 until 5, version 4 until 6
    reader      remembers how far it has read, and takes tokens[read:] and spans(read)

Growing by n tokens costs work for n tokens, however many there are already. Copies are made only where a
completion leaves the engines' side (``completion``), once.

Versions of tokens may change from lower bounds to the engine's own (``retag``); tokens and log-probs that
have been added stay, unless they are ``cut`` off the end.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.rollout.tokens.routes import Experts, Routes
from slipstream.rollout.tokens.trajectory import Completion, Finish, Span

Alternatives = tuple[tuple[float, int], ...]
"""(log-prob, token id) of the likeliest tokens at one position, the likeliest first."""


class GrowingCompletion:
    """The tokens of one completion so far, with the log-prob and the policy version of each.

    It may consist of the replies to several requests, each of which continues the ones before.
    """

    __slots__ = (
        "alternatives",
        "cached_tokens",
        "finish",
        "logprobs",
        "matched",
        "newest",
        "prompt_alternatives",
        "prompt_logprobs",
        "resumed",
        "retractions",
        "routes",
        "routes_from",
        "runs",
        "tokens",
        "wants_prompt",
    )

    def __init__(self) -> None:
        self.tokens = array("i")
        """Token ids, without those of the request."""
        self.logprobs = array("f")
        """Behaviour log-prob of each token."""
        self.runs: list[tuple[int, int]] = []
        """(version, end) of neighbouring tokens of one version, in order; ``end`` is the last index + 1."""
        self.finish = Finish.PARTIAL
        self.matched: int | str | None = None
        """The token id or the stop string that ended it; None: neither, or more tokens follow."""
        self.retractions = 0
        self.alternatives: list[Alternatives] = []
        """The likeliest tokens at each position, where they were asked for."""
        self.wants_prompt = False
        """The log-probs of the prompt are wanted, and have not come yet."""
        self.prompt_logprobs: list[float | None] = []
        """Log-prob of each prompt token, given those before it; None for the first. Empty: not wanted."""
        self.prompt_alternatives: list[Alternatives] = []
        """The likeliest tokens at each position of the prompt, where they were asked for."""
        self.cached_tokens = 0
        """Number of prompt tokens that the first engine had in its cache."""
        self.resumed = 0
        """Number of tokens after which the latest request goes on; 0: it is the first request."""
        self.routes_from: int | None = None
        """Place of the first token whose experts are wanted, from the beginning of the request; None: they
        are not wanted."""
        self.routes: Routes | None = None
        """Experts of the tokens from there on, as far as they have come. An engine that goes on with a
        completion computes what has no experts yet anew, and tells which it has taken then."""
        self.newest: int | None = None
        """No token of the latest request is of a later version; None: that is not known."""

    def add(self, version: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens of one version. Raises ValueError when there are not as many log-probs."""
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens but {len(logprobs)} log-probs")
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self._add_run(version, len(tokens))

    def take(self, other: "GrowingCompletion", budget: int) -> None:
        """Begin with the tokens of a completion of the same request, ``budget`` of them at the most.

        Where that one has ended for want of budget, and more is left here, this one goes on.
        """
        n = min(len(other.tokens), budget)
        start = 0
        for version, end in other.runs:
            self.add(version, other.tokens[start : min(end, n)], other.logprobs[start : min(end, n)])
            start = min(end, n)
        self.retractions = other.retractions
        if n < len(other.tokens) or (other.finish is Finish.LENGTH and n == budget):
            self.finish = Finish.LENGTH
        elif other.finish is Finish.STOP:
            self.finish, self.matched = other.finish, other.matched
        else:
            self.resumed = n

    def cut(self, n: int) -> None:
        """Keep the first ``n`` tokens, from which the completion may be continued."""
        del self.tokens[n:], self.logprobs[n:], self.alternatives[n:]
        self._cut_runs(n)
        self.finish, self.matched = Finish.PARTIAL, None
        if self.routes is not None:
            request, start, ids_RW = self.routes
            self.routes = Routes(request, start, ids_RW[: max(0, request + n - start)])

    def add_routes(self, request: int, ids_RW: Experts) -> None:
        """Append the experts of the next tokens. ``request``: number of token ids of the request."""
        assert self.routes_from is not None
        if self.routes is not None and len(self.routes.ids_RW):
            ids_RW = np.concatenate([self.routes.ids_RW, ids_RW])
        self.routes = Routes(request, self.routes_from, ids_RW)

    @property
    def routes_wanted(self) -> int | None:
        """Place of the first token whose experts are still wanted; None: they are not wanted."""
        return self.routes_from if self.routes is None else self.routes.end

    def retag(self, start: int, spans: Iterable[tuple[int, int]]) -> None:
        """Replace the versions of all tokens from ``start`` on by ``spans``: (version, tokens), in order.

        Raises ValueError, and changes nothing, when ``spans`` are not of exactly these tokens.
        """
        exact = list(spans)
        if sum(n for _, n in exact) != len(self.tokens) - start or any(n < 0 for _, n in exact):
            raise ValueError(f"version spans {exact} do not tile {len(self.tokens) - start} tokens")
        self._cut_runs(start)
        for version, n in exact:
            self._add_run(version, n)

    def spans(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """Return (version, tokens) of neighbouring tokens of one version, of the tokens [start, stop)."""
        spans: list[tuple[int, int]] = []
        stop = len(self.tokens) if stop is None else stop
        begin = 0
        for version, end in self.runs:
            if (n := min(end, stop) - max(begin, start)) > 0:
                spans.append((version, n))
            begin = end
        return spans

    def first_of(self, version: int, start: int = 0) -> int:
        """Return the index of the first token from ``start`` on whose version is ``version`` or later.

        The number of tokens if there is none.
        """
        begin = 0
        for run_version, end in self.runs:
            if end > start and run_version >= version:
                return max(begin, start)
            begin = end
        return len(self.tokens)

    def tokens_left(self, budget: int) -> int:
        """Return how many tokens of ``budget`` may still be generated; 0 when the completion has ended."""
        return max(0, budget - len(self.tokens)) if self.finish is Finish.PARTIAL else 0

    def is_due(self, budget: int) -> bool:
        """True if a request for it must be sent: there is something that is still to come."""
        return self.finish is Finish.PARTIAL and (self.wants_prompt or self.tokens_left(budget) > 0)

    def ended(self) -> None:
        """Note that nothing is added any more: a completion that is partial has used up its budget."""
        if self.finish is Finish.PARTIAL:
            self.finish = Finish.LENGTH

    def completion(self) -> Completion:
        """Return a copy as plain data."""
        spans: list[Span] = []
        start = 0
        for version, end in self.runs:
            spans.append(Span(version, start, end))
            start = end
        return Completion(
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(spans),
            self.finish,
            self.retractions,
            self.matched,
            self.routes,
        )

    def _add_run(self, version: int, n: int) -> None:
        if not n:
            return
        end = (self.runs[-1][1] if self.runs else 0) + n
        if self.runs and self.runs[-1][0] == version:
            self.runs[-1] = (version, end)
        else:
            self.runs.append((version, end))

    def _cut_runs(self, n: int) -> None:
        while self.runs and self.runs[-1][1] > n:
            version, _ = self.runs.pop()
            if (self.runs[-1][1] if self.runs else 0) < n:
                self.runs.append((version, n))
                return
