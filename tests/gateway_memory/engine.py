"""An engine without a model: SGLang's /generate over HTTP, with random letters that come at once."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import orjson
from aiohttp import web

from tests.chat_model import END, build_tokenizer

PIECE = 8
"""Tokens of an event."""

PROMPTS = 100
"""Number of requests that are remembered."""


class ScriptedEngine:
    """Answers with 8 to 40 letters, and with the version that it was told last.

    With ``ignore_eos`` an answer is as long as it may be, and comes slowly, so that a user can leave before
    its end.
    """

    def __init__(self, seed: int = 0, slow_s: float = 0.2) -> None:
        """``slow_s``: time between the events of a slow answer, unless they are ``released``."""
        tokenizer = build_tokenizer()
        self.vocab = len(tokenizer)
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._letters = tokenizer.encode("abcdefghijklmnopqrstuvwxyz ")
        self._dice = random.Random(seed)
        self._slow_s = slow_s
        self.released = asyncio.Event()
        self.version = 0
        self.prompts: deque[list[int]] = deque(maxlen=PROMPTS)
        """Ids of the requests, the newest last."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen inside the block, and give the URL."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/version", self._take_version)
        app.router.add_post("/abort_request", self._done)
        app.router.add_get("/health", self._done)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
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
        sampling = body["sampling_params"]
        limit, is_slow = sampling["max_new_tokens"], bool(sampling.get("ignore_eos"))
        self.prompts.append(body["input_ids"])
        length = limit if is_slow else self._dice.randint(8, 40)
        ids = [*self._dice.choices(self._letters, k=length), self._end][:limit]
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        with suppress(ConnectionError):  # whoever has asked is gone
            for start in range(0, len(ids), PIECE):
                await reply.write(self._event(ids, start, min(start + PIECE, len(ids))))
                if is_slow:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.released.wait(), self._slow_s)
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
