"""Asks a reward whose ``score`` is a plain function: one question at a time, in the main thread.

No event loop runs meanwhile, so that the reward may use one of its own. The watchdog keeps the time limit by
itself: nothing else can end a plain function.
"""

import asyncio
import inspect
import socket
from collections.abc import Callable

from slipstream.rollout.reward.judge.limits import Bounds
from slipstream.rollout.reward.judge.replies import unscored
from slipstream.rollout.reward.judge.wire import REQUEST, Question, Reply, Retiring, framed
from slipstream.rollout.system.stream import FrameReader


def answer_in_turn(
    connection: socket.socket,
    score: Callable[[Question], object],
    bounds: Bounds,
    reply_with: Callable[[Question, object], Reply],
) -> None:
    """Answer questions until the connection ends. ``reply_with``: makes a reply of what ``score`` returns."""
    judge = _OneByOne(score, bounds, reply_with)
    reader = FrameReader()
    while data := connection.recv(1 << 18):
        for frame in reader.feed(data):
            request = REQUEST.decode(frame)
            if isinstance(request, Question):  # a question that is withdrawn cannot be interrupted
                connection.sendall(b"".join(map(framed, judge.answer(request))))


class _OneByOne:
    def __init__(
        self,
        score: Callable[[Question], object],
        bounds: Bounds,
        reply_with: Callable[[Question, object], Reply],
    ) -> None:
        self._score = score
        self._reply_with = reply_with
        self._bounds = bounds
        self._runner: asyncio.Runner | None = None

    def answer(self, question: Question) -> list[Reply]:
        """Return the reply to a question, and a notice before it if the process should be replaced."""
        bounds = self._bounds
        bounds.home.restore()
        bounds.watchdog.arm(bounds.timeout_s)
        try:
            value = self._result(self._score(question))
            reply = self._reply_with(question, value)
            del value
        except BaseException as error:  # exits and cancellations included: none of them is meant for us
            reply = unscored(question.number, error)
        finally:
            bounds.forks.leave_if_forked()
        reason = bounds.memory.verdict()
        bounds.watchdog.disarm()
        return [reply] if reason is None else [Retiring(reason), reply]

    def _result(self, value: object) -> object:
        """Return ``value``, or what it becomes if a plain function has returned an awaitable."""
        if not inspect.isawaitable(value):
            return value
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def result() -> object:
            return await value

        return self._runner.run(result())
