"""The inner process of a judge: constructs the reward, and asks it."""

import asyncio
import faulthandler
import gc
import inspect
import os
import resource
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from slipstream.rollout.reward.judge.asynchronous import answer_at_once
from slipstream.rollout.reward.judge.limits import Bounds, ForkGuard, MemoryWatch, Watchdog, WorkingDirectory
from slipstream.rollout.reward.judge.replies import group_scored, ruled, scored, traceback_of, unscored
from slipstream.rollout.reward.judge.wire import (
    CONNECTION_CLOSED,
    REQUEST,
    SETUP,
    JudgeReady,
    JudgeSetup,
    ModelSetup,
    Question,
    Reply,
    Retiring,
    StartFailure,
    framed,
)
from slipstream.rollout.reward.loading import (
    GROUPS,
    REWARDS,
    TURNS,
    JudgeKind,
    LoadedJudge,
    is_concurrent,
    load_judge,
)
from slipstream.rollout.system import plugins
from slipstream.rollout.system.stream import FrameReader, receive


def work(connection: socket.socket, crash: int) -> None:
    """Answer the questions that come over ``connection`` until it ends.

    ``crash``: descriptor for the tracebacks of a process that is about to die.
    """
    faulthandler.enable(crash)
    forks = ForkGuard(connection, crash)
    try:
        setup = _receive_setup(connection)
        judge = setup and _construct(connection, setup, Watchdog(crash), forks)
        if setup and judge:
            memory = MemoryWatch(setup.memory_mb)
            watchdog, home = Watchdog(crash), WorkingDirectory()
            bounds = Bounds(setup.timeout_s, watchdog, memory, forks, home, setup.section)
            _answer(connection, judge, bounds, setup)
    except OSError:  # user code has closed descriptors that are not its own
        with suppress(OSError):
            traceback.print_exc()
        os._exit(CONNECTION_CLOSED)
    finally:
        forks.leave_if_forked()


def _receive_setup(connection: socket.socket) -> JudgeSetup | None:
    """Return the first message of the pool. It sends no other before it has an answer. None: it has gone."""
    setup = receive(connection)
    return None if setup is None else SETUP.decode(setup)


def _construct(
    connection: socket.socket, setup: JudgeSetup, watchdog: Watchdog, forks: ForkGuard
) -> LoadedJudge | None:
    """Return the code that judges. Report to the pool and return None when there is none."""
    _limit_memory(setup.memory_mb)
    watchdog.arm(setup.start_timeout_s)
    try:
        kinds = (TURNS,) if setup.of_turns else REWARDS
        return load_judge(setup.path, setup.args, kinds, setup.model and partial(_model, setup.model))
    except BaseException as error:  # exits included: whatever user code raises is reported
        forks.leave_if_forked()
        connection.sendall(framed(StartFailure(_reason(error))))
        return None
    finally:
        watchdog.disarm()


def _model(setup: ModelSetup) -> object:
    """Return the value of the parameter ``judge_model`` of user code. Imports more than other judges need."""
    from slipstream.rollout.reward.model.judge_model import JudgeModel

    return JudgeModel.of(setup.settings, setup.policy, setup.template_args)


def _reason(error: BaseException) -> str:
    """Return the traceback of user code, or what a PluginError says if it is about the recipe alone."""
    if not isinstance(error, plugins.PluginError):
        return traceback_of(error)
    return f"{error}\n{traceback_of(error.__cause__)}" if error.__cause__ else str(error)


def _limit_memory(memory_mb: int | None) -> None:
    """Make allocations fail beyond a limit: the heap and private mappings count, mapped files do not."""
    if memory_mb is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_mb << 20 if hard == resource.RLIM_INFINITY else min(memory_mb << 20, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _answer(connection: socket.socket, judge: LoadedJudge, bounds: Bounds, setup: JudgeSetup) -> None:
    gc.collect()
    gc.freeze()  # what the imports made stays: no collection needs to look at it again
    concurrent = is_concurrent(judge.call)
    connection.sendall(framed(JudgeReady(os.getpid(), concurrent, judge.kind is GROUPS)))
    answer = answer_at_once if concurrent else answer_in_turn
    answer(connection, partial(_ask, judge.call), bounds, _replies(judge.kind, setup.reward_key))


def _ask(call: Callable[..., object], question: Question) -> object:
    if question.engines:
        from slipstream.rollout.engine.asked_engines import ENGINES

        ENGINES.follow(question.engines)
    return call(*question.arguments())


def _replies(kind: JudgeKind, key: str) -> Callable[[Question, object], Reply]:
    """Return a function that makes the reply to a question from the value that the user's code returned."""
    if kind is TURNS:
        return ruled
    return partial(group_scored if kind is GROUPS else scored, key=key)


def answer_in_turn(
    connection: socket.socket,
    score: Callable[[Question], object],
    bounds: Bounds,
    reply_with: Callable[[Question, object], Reply],
) -> None:
    """Answer questions until the connection ends, one at a time, in the main thread.

    ``reply_with``: makes a reply of what ``score`` returns. No event loop runs meanwhile, so that the reward
    may use one of its own. The watchdog keeps the time limit: nothing else can end a plain function.
    """
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
