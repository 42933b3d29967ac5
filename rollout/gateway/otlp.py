"""Sends what a process tells of itself to an OpenTelemetry collector: OTLP over HTTP, in its JSON form.

    put ──► queue of MOST_BYTES ──► task: one POST for all that has come ──► ENDPOINT/v1/traces, /v1/logs
             └─ full: dropped        └─ unreachable or overloaded: it waits, and tries again

``put`` never waits. The JSON form needs nothing beyond aiohttp, by which the gateway reaches its peers;
OpenTelemetry's own SDK would add packages and a thread to the process, for the same bytes.

Source: https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import asyncio
import logging
import os
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import unquote

import aiohttp
import orjson

from slipstream.rollout.system.changes import Changes

log = logging.getLogger(__name__)

Attribute = str | bool | int | float | Sequence[str] | Sequence[int]

MOST_BYTES = 16 << 20
"""JSON that waits to be sent. What comes beyond it is dropped."""

POST_BYTES = 1 << 20
"""JSON of one POST, or one item that is longer. Collectors take 20 MiB at least."""

GATHER_S = 1.0
"""Time for others to come that leave in the same POST."""

POST_S = 10.0
"""Longest time of one POST."""

LONGEST_PAUSE_S = 60.0
"""Longest time until a POST that has failed is sent again."""

FLUSH_S = 1.0
"""Time for what is left when the process ends."""

LONGEST_TEXT = 1024
"""Characters of an attribute that has no length of its own."""

LONGEST_REPLY = 65_536

HEADERS = "gateway.traces.headers_env"
"""Setting of the variable with the headers of the collector."""

AGAIN = frozenset({429, 502, 503, 504})
"""Statuses after which the same POST may be sent again; after all others it must not be."""

PATHS = {"resourceSpans": "/v1/traces", "resourceLogs": "/v1/logs"}
"""By signal: where it goes below the address of the collector."""

_INNER = {"resourceSpans": ("scopeSpans", "spans"), "resourceLogs": ("scopeLogs", "logRecords")}


def attributes(
    values: Mapping[str, Attribute], *, longest: int | None = LONGEST_TEXT
) -> list[dict[str, object]]:
    """Return attributes in OTLP's form. A text beyond ``longest`` characters is cut; None: no text is."""
    return [{"key": name, "value": _value(value, longest)} for name, value in values.items()]


def _value(value: Attribute, longest: int | None) -> dict[str, object]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value[:longest].encode(errors="replace").decode()}
    return {"arrayValue": {"values": [_value(one, longest) for one in value]}}


def headers_of(variable: str | None, setting: str) -> dict[str, str]:
    """Return the headers in an environment variable, as ``NAME=VALUE,NAME=VALUE`` with percent-encoding.

    Raises ValueError, which shows no value, if the variable is missing or cannot be read.
    """
    if variable is None:
        return {}
    text = os.environ.get(variable, "")
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    headers = {name.strip().lower(): unquote(value.strip()) for name, _, value in pairs}
    if not headers or not all(_is_header(name, value) for name, value in headers.items()):
        found = "nothing" if not text.strip() else "something else"
        raise ValueError(
            f"{setting}: the environment variable {variable} must hold headers as NAME=VALUE,NAME=VALUE, and "
            f"holds {found}: set it, or leave the setting out"
        )
    return headers


def _is_header(name: str, value: str) -> bool:
    is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return is_name and bool(value) and value.isprintable()


class OtlpExport:
    """The queue and the task that empties it. Use it on one event loop, and ``close`` it at the end."""

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        resource: Mapping[str, Attribute],
        *,
        scope: str,
        gather_s: float = GATHER_S,
        pause_s: float = 1.0,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """``resource``: attributes of the process. ``scope``: name of the code that tells.

        ``gather_s``: seconds for others to come. ``pause_s``: seconds after the first failure; each further
        one doubles them.
        """
        self.sent = 0
        self.dropped: Counter[str] = Counter()
        """What was dropped, by the reason: ``full``, ``refused`` by the collector, ``ended`` process."""
        self._endpoint = endpoint.rstrip("/")
        self._headers = {**headers, "content-type": "application/json"}
        self._resource = orjson.dumps({"attributes": attributes(resource)})
        self._scope = orjson.dumps({"name": scope})
        self._gather_s = gather_s
        self._pause_s = pause_s
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._size = 0
        """Bytes of what waits."""
        self._changes = Changes()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        """POSTs that have failed since the last one that was taken."""

    def put(self, signal: str, item: Mapping[str, object]) -> None:
        """Queue a span or a log record, or drop it if the queue is full."""
        data = orjson.dumps(item)
        if self._is_closing or self._size + len(data) > self._most_bytes:
            self.dropped["ended" if self._is_closing else "full"] += 1
            return
        self._waiting.append((signal, data))
        self._size += len(data)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="sending traces")
            self._task.add_done_callback(_told)
        self._changes.notify()

    async def close(self) -> None:
        """Send what is left, for ``FLUSH_S`` at most. The rest is dropped."""
        self._is_closing = True
        self._changes.notify()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=FLUSH_S)
            self._task.cancel()
            await asyncio.wait({self._task})
        self.dropped["ended"] += len(self._waiting)
        self._waiting.clear()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=POST_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            while True:
                await self._changes.first(lambda: bool(self._waiting) or self._is_closing or None)
                if not self._waiting:
                    return
                await self._rest(self._gather_s)
                pause_s = await self._post(session, *self._next())
                if pause_s and self._is_closing:
                    return
                await self._rest(pause_s)

    async def _rest(self, seconds: float) -> None:
        """Wait, but not while the process ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changes.first(lambda: self._is_closing or None)

    def _next(self) -> tuple[str, list[bytes]]:
        """Return what leaves next: the first that waits, and those of the same signal after it."""
        signal, size = self._waiting[0][0], 0
        items: list[bytes] = []
        for kind, data in self._waiting:
            size += len(data)
            if kind != signal or (items and size > POST_BYTES):
                break
            items.append(data)
        return signal, items

    async def _post(self, session: aiohttp.ClientSession, signal: str, items: Sequence[bytes]) -> float:
        """Send items, which wait in the queue until the collector has answered. Return the seconds until the
        next POST: 0, unless it must be the same.
        """
        try:
            status, retry_after, rejected = await self._reply(session, signal, items)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return self._failed(f"{type(error).__name__}: {error}", None)
        if status in AGAIN:
            return self._failed(f"status {status}", retry_after)
        refused = min(rejected, len(items)) if status == HTTPStatus.OK else len(items)
        if refused:
            log.warning("%s%s refuses %d of %d", self._endpoint, PATHS[signal], refused, len(items))
        self._failures = 0
        self.dropped["refused"] += refused
        self.sent += len(items) - refused
        for _ in items:
            self._size -= len(self._waiting.popleft()[1])
        return 0.0

    async def _reply(
        self, session: aiohttp.ClientSession, signal: str, items: Sequence[bytes]
    ) -> tuple[int, str | None, int]:
        """Return the status of a POST, its ``Retry-After`` and the number of items that were rejected."""
        scoped, listed = _INNER[signal]
        body = b'{"%b":[{"resource":%b,"%b":[{"scope":%b,"%b":[%b]}]}]}' % (
            signal.encode(),
            self._resource,
            scoped.encode(),
            self._scope,
            listed.encode(),
            b",".join(items),
        )
        url = f"{self._endpoint}{PATHS[signal]}"
        async with session.post(url, data=body, allow_redirects=False) as reply:
            content = await reply.content.read(LONGEST_REPLY)
            return reply.status, reply.headers.get("retry-after"), _rejected(content)

    def _failed(self, why: str, retry_after: str | None) -> float:
        """Return the seconds after which to try again."""
        if not self._failures:
            log.warning("traces wait for %s: %s", self._endpoint, why)
        pause_s = self._pause_s * 2 ** min(self._failures, 10)
        self._failures += 1
        if retry_after is not None and retry_after.isdecimal():
            pause_s = max(pause_s, int(retry_after[:9]))
        return min(pause_s, LONGEST_PAUSE_S) * random.uniform(0.8, 1.0)


def _rejected(content: bytes) -> int:
    """Return how many items of a POST were rejected, by the body of its reply."""
    try:
        partial = orjson.loads(content)["partialSuccess"]
        return max(0, int(partial.get("rejectedSpans") or partial.get("rejectedLogRecords") or 0))
    except (ValueError, TypeError, LookupError, AttributeError):
        return 0


def _told(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("%s has failed", task.get_name(), exc_info=error)
