"""A server of OpenAI's chat completions that answers as a test says, and remembers what it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = str | tuple[int, str] | dict[str, Any]
"""The text of an answer, a status with a body, or a whole reply. ``hang`` and ``cut`` are no answers."""


class ChatServer:
    """Answers each request with the next of ``answers``; a function is called with the request's messages."""

    def __init__(self, answers: Sequence[Answer] | Callable[[list[dict]], Answer]) -> None:
        self._answers = answers if callable(answers) else list(answers)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the block, and give the URL with the version of the protocol."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    def _next(self, messages: list[dict]) -> Answer:
        if callable(self._answers):
            return self._answers(messages)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        answer = self._next(body["messages"])
        if answer == "hang":
            await asyncio.sleep(60)
        if answer == "cut":
            reply = web.StreamResponse(headers={"Content-Length": "10000"})
            await reply.prepare(request)
            await reply.write(b'{"choices": [{"message": {"content": "half an ans')
            assert request.transport is not None
            request.transport.abort()
            return reply
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        if isinstance(answer, dict):
            return web.json_response(answer)
        return web.Response(text=json.dumps(completion(answer)), content_type="application/json")


def completion(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """Return a chat completion."""
    content = {"role": "assistant", "content": text, **message}
    return {"choices": [{"index": 0, "message": content, "finish_reason": finish}]}
