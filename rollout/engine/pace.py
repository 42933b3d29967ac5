"""Estimates the time of an engine for a token from the requests of one process. Pure.

The least loaded engine is not the best one if it is slow: an engine that takes ten times as long would have
as many requests as the others, and each of those would take ten times as long. Small differences come from
lengths and from chance. So only an engine that is several times slower than the fastest one gets less.
"""

from collections.abc import Sequence

SLOW = 3.0
"""An engine is slow if a token takes at least this many times as long as on the fastest engine."""

LEAST_S = 1e-3
"""An engine that takes less than this for a token is never slow: such differences are chance."""

KEPT = 0.8
"""Factor of the weight of all earlier requests at each further one: mostly the last five requests count."""

REQUESTS = 3
"""Requests from which on an engine's time for a token is known."""

FORGET_S = 30.0
"""Seconds without a request after which the pace of an engine is unknown: it may have changed."""


class Pace:
    """The pace of one engine."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._requests = 0
        self._per_token_s: float | None = None
        self._last_s = 0.0

    def took(self, seconds: float, tokens: int, now_s: float) -> None:
        """Take in a request that is done, and how long it took for so many tokens."""
        self._seconds = self._seconds * KEPT + seconds
        self._tokens = self._tokens * KEPT + tokens
        self._requests += 1
        if self._requests >= REQUESTS and self._tokens:
            self._per_token_s = self._seconds / self._tokens
        self._last_s = now_s

    def per_token_s(self, now_s: float) -> float | None:
        """Return the seconds that a token takes; None: that is not known."""
        return None if now_s - self._last_s > FORGET_S else self._per_token_s


def weights(paces: Sequence[Pace], now_s: float) -> list[float]:
    """Return, for each engine, how many requests of another one a request of this one stands for."""
    times = [pace.per_token_s(now_s) for pace in paces]
    known = [each for each in times if each]
    fastest = min(known, default=0.0)
    slow_s = max(SLOW * fastest, LEAST_S)
    if not known or max(known) < slow_s:  # as a rule, and this is asked for every request
        return [1.0] * len(times)
    return [each / fastest if each and each >= slow_s else 1.0 for each in times]
