"""Limits of requests: the rates of a key, the size of a body, the shape of a request. Pure.

Whatever is too much is refused before anything is generated, with an HTTP status that says which kind it is.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Refusal(Exception):
    """A request is not answered. The message and the status are for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """``param`` names the field of the body, ``code`` the situation among those of one status.

        ``facts``: what the words of a protocol name (``words.WORDS``).
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.facts = facts or {}
        self.in_stream = False
        """The client has asked for events."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


class Rates:
    """The rate of each key: a bucket of a minute's requests, or of its tokens, that fills evenly."""

    def __init__(
        self, per_minute: float | None, clock: Callable[[], float], *, unit: str = "requests"
    ) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._unit = unit
        self._buckets: dict[str, _Bucket] = {}
        """By the name of the key: as many as there are keys."""

    def take(self, key: str) -> None:
        """Count a request. Raises Refusal with 429 if the key has sent too many."""
        self.check(key, 1)
        self.charge(key, 1)

    def check(self, key: str, least: float = 0) -> None:
        """Raise Refusal with 429 unless a key has ``least`` left, or anything."""
        if self._per_minute is None:
            return
        missing = least - self._filled(key, self._per_minute).tokens
        if missing > 0 or (not least and not missing):
            raise Refusal(
                429,
                f"this key may use {self._per_minute:g} {self._unit} a minute",
                facts={"unit": self._unit},
                retry_after_s=max(1.0, missing * 60 / self._per_minute),
            )

    def charge(self, key: str, amount: int) -> None:
        """Count what a key has used. It may have used more than it had left, and then waits for longer."""
        if self._per_minute is not None:
            self._filled(key, self._per_minute).tokens -= amount

    def _filled(self, key: str, per_minute: float) -> _Bucket:
        size, now_s = max(1.0, per_minute), self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(size, now_s))
        bucket.tokens = min(size, bucket.tokens + (now_s - bucket.filled_s) * per_minute / 60)
        bucket.filled_s = now_s
        return bucket
