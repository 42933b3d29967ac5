"""Limits of requests: the rate of a key, the size of a body, the shape of a request. Pure.

Whatever is too much is refused before anything is generated, with an HTTP status that says which kind it is.
"""

import math
from collections.abc import Callable
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
    ) -> None:
        """``param`` names the field of the body, ``code`` the kind of error in OpenAI's words."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

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
    """The rate of each key: a bucket of a minute's requests that fills evenly."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        """By the name of the key: as many as there are keys."""

    def take(self, key: str) -> None:
        """Count a request. Raises Refusal with 429 if the key has sent too many."""
        if self._per_minute is None:
            return
        size, per_second = max(1.0, self._per_minute), self._per_minute / 60
        now_s = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(size, now_s))
        bucket.tokens = min(size, bucket.tokens + (now_s - bucket.filled_s) * per_second)
        bucket.filled_s = now_s
        if bucket.tokens < 1:
            raise Refusal(
                429,
                f"this key may send {self._per_minute:g} requests a minute; wait for the next one",
                retry_after_s=max(1.0, (1 - bucket.tokens) / per_second),
            )
        bucket.tokens -= 1
