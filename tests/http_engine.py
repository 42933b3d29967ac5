"""An engine without a model: SGLang's /generate over HTTP, with tokens that come at given times.

    python -m tests.http_engine '{"tokens": 32, "interval_s": 0.02}'

It is a process of its own, prints its port, and ends with its standard input. Every completion is the
alphabet, again and again: bytes are the tokens of ``tests.chat_model``.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import orjson
from aiohttp import web

from tests.environment import environment

START_TIMEOUT_S = 60
FIRST, LETTERS = 64, 26
"""Id of the token `a` in the vocabulary of ``tests.chat_model``; the other letters follow."""
VERSION = "0"


@dataclass(frozen=True)
class Pace:
    """What the engine answers, and when."""

    tokens: int = 32
    """Tokens of a completion, unless ``max_new_tokens`` is smaller. The last one ends it."""
    interval_s: float = 0.0
    """Time before each event; 0: all events come at once."""
    tokens_per_event: int = 1
    end: int = 258
    """Id of the token that ends a completion."""


class EngineProcess:
    """The process, as tests and benchmarks see it."""

    def __init__(self, pace: Pace) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.http_engine", json.dumps(asdict(pace))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert self.process.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            raise RuntimeError(f"the engine has not started within {START_TIMEOUT_S} s")
        self.url = f"http://127.0.0.1:{int(line)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


class _Engine:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._events: dict[tuple[int, int, int], bytes] = {}

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._done)
        app.router.add_get("/health", self._done)
        return app

    async def _done(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        pace = self._pace
        total = min(pace.tokens, body["sampling_params"].get("max_new_tokens", pace.tokens))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        clock = asyncio.get_running_loop().time
        await reply.prepare(request)
        due_s, prompt = clock(), len(body["input_ids"])
        for start in range(0, total, pace.tokens_per_event):
            due_s += pace.interval_s
            if (left_s := due_s - clock()) > 0:
                await asyncio.sleep(left_s)
            with suppress(ConnectionError):  # whoever has asked may be gone
                await reply.write(self._event(start, total, prompt))
        with suppress(ConnectionError):
            await reply.write(b"data: [DONE]\n\n")
        return reply

    def _event(self, start: int, total: int, prompt: int) -> bytes:
        """Return the event with the tokens from ``start`` on; each is encoded once."""
        if (event := self._events.get((start, total, prompt))) is None:
            event = self._events[start, total, prompt] = self._encoded(start, total, prompt)
        return event

    def _encoded(self, start: int, total: int, prompt: int) -> bytes:
        pace = self._pace
        end = min(start + pace.tokens_per_event, total)
        ids = [FIRST + place % LETTERS for place in range(start, end)]
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": None,
            "prompt_tokens": prompt,
            "weight_version": VERSION,
            "completion_tokens": end,
            "cached_tokens": 0,
        }
        if end == total:
            meta["finish_reason"] = {"type": "length", "length": total}
            if total == pace.tokens:
                ids[-1] = pace.end
                meta["finish_reason"] = {"type": "stop", "matched": pace.end}
            meta["weight_versions"] = [{"version": VERSION, "start": 0, "end": total}]
        meta["output_token_logprobs"] = [[-0.5 - place / 64, token, None] for place, token in enumerate(ids)]
        chunk = {"text": "", "output_ids": ids, "meta_info": meta}
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


async def _serve(pace: Pace) -> None:
    runner = web.AppRunner(_Engine(pace).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def end_with_owner() -> None:
    """End this process at once when the process that has started it closes its standard input."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, name="end-with-owner", daemon=True).start()


if __name__ == "__main__":
    import uvloop

    end_with_owner()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(_serve(Pace(**json.loads(sys.argv[1]))))
