"""An engine without a model: SGLang's /generate over HTTP, with random letters that come at once."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

from tests.chat_model import END, build_tokenizer

PIECE = 8
"""Tokens of an event."""

SLOW = 41
"""``max_new_tokens`` with which events come one by one, so that a user can leave before the end."""
SLOW_S = 0.2


class ScriptedEngine:
    """Answers with 8 to 40 letters, and with the version that it was told last."""

    def __init__(self, seed: int = 0) -> None:
        tokenizer = build_tokenizer()
        self.vocab = len(tokenizer)
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz ")
        self._dice = random.Random(seed)
        self.version = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen inside the block, and give the URL."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/version", self._take_version)
        app.router.add_post("/abort_request", self._done)
        app.router.add_get("/health", self._done)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _done(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _take_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["version"]
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        limit = body["sampling_params"]["max_new_tokens"]
        ids = [*self._dice.choices(self._letters, k=self._dice.randint(8, 40)), self._end][:limit]
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for start in range(0, len(ids), PIECE):
            await reply.write(self._event(ids, start, min(start + PIECE, len(ids))))
            if limit == SLOW:
                await asyncio.sleep(SLOW_S)
        await reply.write(b"data: [DONE]\n\n")
        return reply

    def _event(self, ids: list[int], start: int, end: int) -> bytes:
        version = str(self.version)
        meta: dict[str, object] = {
            "finish_reason": None,
            "weight_version": version,
            "completion_tokens": end,
            "output_token_logprobs": [[-1.5, token, None] for token in ids[start:end]],
        }
        if end == len(ids):
            is_stopped = ids[-1] == self._end
            stop = {"type": "stop", "matched": self._end}
            meta["finish_reason"] = stop if is_stopped else {"type": "length", "length": end}
            meta["weight_versions"] = [{"version": version, "start": 0, "end": end}]
        return (
            b"data: " + orjson.dumps({"text": "", "output_ids": ids[start:end], "meta_info": meta}) + b"\n\n"
        )
