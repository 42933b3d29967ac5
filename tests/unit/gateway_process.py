"""A gateway process with endpoints of its own, for tests of what surrounds endpoints.

    python -m tests.unit.gateway_process SPECIFICATION [forks]

Prints a line when users can reach it.

    POST /...          records a turn, and answers with where it was served and what it was asked
    POST /slow         the same, a byte at a time, until the client has gone or the turn is cancelled
    GET  /...          answers with the numbers of all entries
"""

import asyncio
import json
import sys
from collections.abc import Sequence

from slipstream.rollout.gateway.gateway_process import run
from slipstream.rollout.gateway.spec import GatewaySpec, GatewaySurroundings
from slipstream.rollout.tokens.turn_entries import Entry, Forgotten
from tests.unit.gateway_entries import turn


class Endpoints:
    """What a process serves, without SGLang."""

    def __init__(self, surroundings: GatewaySurroundings) -> None:
        self._journal = surroundings.journal
        self._keys = surroundings.keys
        self._number = surroundings.spec.number
        self.restored = [(number, type(r).__name__) for number, r in surroundings.retained]
        self._closing = asyncio.Event()
        self._running = 0

    async def figures(self, scope, receive, send) -> None:
        await self._reply(send, {"restored": self.restored, "last": self._journal.last})

    async def app(self, scope, receive, send) -> None:
        if scope["method"] == "GET":
            await self._reply(send, {"last": self._journal.last, "number": self._number})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if scope["path"] == "/slow":
            await self._slow(receive, send)
            return
        session = headers.get("x-session-id", "none")
        numbers = self._journal.append([turn(session, "ann")])
        await self._journal.durable(numbers[-1])
        query = scope["query_string"].decode()
        path = (scope.get("raw_path") or b"").decode()
        await self._reply(
            send,
            {
                "number": self._number,
                "entry": numbers[-1],
                "path": path,
                "query": query,
                "body": body.decode(),
                "header": headers.get("x-other"),
                "secret": headers.get("x-slipstream-peer"),
            },
        )

    async def _slow(self, receive, send) -> None:
        self._running += 1
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while not self._closing.is_set() and not gone.done():
                await send({"type": "http.response.body", "body": b".", "more_body": True})
                await asyncio.sleep(0.01)
        finally:
            gone.cancel()
            self._running -= 1
            self._journal.append([turn("cancelled", "ann", cancelled=True)])

    async def _reply(self, send, values) -> None:
        body = json.dumps(values).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def sweep(self, now_s: float) -> Sequence[Entry]:
        return ()

    def forget(self, session: str | None, key: str | None) -> Sequence[Entry]:
        return [Forgotten(session, key)]

    async def close(self) -> None:
        self._closing.set()
        while self._running:
            await asyncio.sleep(0.01)


def parts(spec: GatewaySpec):
    return Endpoints, lambda tokens: " ".join(map(str, tokens))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], GatewaySpec.read, parts, forks="forks" in sys.argv[2:]))
