"""A judge model as a server of chat completions that is down for a part of the time.

It says what the user's next words say: whether the answer was right, and the hint where they explain.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from benchmarks.judges.task import HINT
from benchmarks.quickstart_users import THANKS
from slipstream.rollout.tokens.trajectory import Messages

PERIOD_S, DOWN_S = 9.0, 3.0
"""Seconds between the beginnings of two outages, and seconds of an outage."""

AFTER = "# What came after the reply"
"""Heads the user's next words in a question."""


def is_down(seconds: float) -> bool:
    """Return whether the judge is down so many seconds after its start: at the end of each period."""
    return seconds % PERIOD_S >= PERIOD_S - DOWN_S


def vote_on(messages: Messages) -> str:
    """Return the answer to a question about a turn: a hint, or a score."""
    after = messages[-1]["content"].rpartition(AFTER)[2]
    if "[HINT_START]" in messages[0]["content"]:
        return rf"\boxed{{1}} [HINT_START]{HINT}[HINT_END]" if HINT in after else r"\boxed{-1}"
    return r"\boxed{1}" if THANKS in after else r"\boxed{-1}"


class JudgeServer:
    """Answers questions inside of ``serving``, except when it is down."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        self.answered = self.refused = 0
        """Number of questions."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the block, and give the URL with the version of the protocol."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._began = self._clock()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        question: dict[str, Any] = await request.json()
        if is_down(self._clock() - self._began):
            self.refused += 1
            return web.Response(status=503, text="the judge is down")
        self.answered += 1
        message = {"role": "assistant", "content": vote_on(question["messages"])}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
