"""One life of a collector: from its plug-ins to the end of its connection.

    the parts of episodes ──► connect ──► assignments in, events out ──► end of the connection

When the connection ends, nothing that is left here counts any more: the driver has assigned it to others, or
is gone. A further life begins anew, under another name.

Workflows share the collector's loop. One that sleeps or computes without awaiting holds up all others, and no
time limit of asyncio can end it. A thread notices when the loop stands still, reports the group whose code
runs with its traceback, and ends the process: the driver gives its groups to others. Code that does not even
let threads run is ended by a timer in C, which writes the traceback to the log.
"""

import asyncio
import faulthandler
import json
import os
import sys
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import NoReturn

from slipstream.configs.schema import RunConfig
from slipstream.rollout.collection.collector.episodes import Episodes
from slipstream.rollout.collection.collector.evaluation import Evaluations
from slipstream.rollout.collection.collector.groups import TASK_NAME, GroupCollector
from slipstream.rollout.collection.collector.judging import Judges, WorkflowReward
from slipstream.rollout.collection.collector.outbox import Outbox
from slipstream.rollout.collection.collector.parts import (
    Surroundings,
    episode_parts,
    surroundings_of,
)
from slipstream.rollout.collection.collector.recording import RECORD_EVERY_S, Recording
from slipstream.rollout.collection.collector.seeded import seeded_engines
from slipstream.rollout.collection.collector.spec import CollectorSpec
from slipstream.rollout.collection.collector.untrained_log import UntrainedLog, open_untrained_log
from slipstream.rollout.collection.messages import DOWN, Down, Status
from slipstream.rollout.engine.asked_engines import ServingAddresses
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.request_trace import RequestTrace
from slipstream.rollout.system.garbage import OF_COLLECTED_EPISODE, expect_objects, look_seldom_for_garbage
from slipstream.rollout.system.link import LinkEnded, OutgoingLink, connected, until_one_ends
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.teacher import TeacherNeeds

REPORT_TIMEOUT_S = 5.0


async def collect(
    spec: CollectorSpec, config: RunConfig, trace: Callable[[RequestTrace], None] | None = None
) -> None:
    """Collect for the driver until the connection ends.

    Raises PluginError, JudgeStartFailed and OSError when the collector cannot start.
    """
    async with surroundings_of(config, spec.logs, spec.name, trace) as surroundings:
        await collect_in(surroundings, spec, config)


async def collect_in(surroundings: Surroundings, spec: CollectorSpec, config: RunConfig) -> None:
    """Collect in given surroundings until the connection ends."""
    rollout, judges = config.rollout, surroundings.judges
    limit, outbox = TimeLimit(rollout.episode_timeout_s, "rollout.episode_timeout_s"), Outbox()
    pool = EnginePool(
        wait_timeout_s=rollout.engine.start_timeout_s,
        isolate_versions=config.weights.interrupt == "in_place",
        most_requests=surroundings.most_requests,
        connect=surroundings.connect,
        report=outbox.flush,
        on_held=limit.stop,
        trace=surroundings.trace,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        parts = await stack.enter_async_context(
            episode_parts(
                surroundings,
                config,
                pool,
                limit,
                vocab_size=spec.vocab_size,
                context=spec.context,
                give_up=lambda reason: end_process(_reporter(spec), None, reason),
            )
        )
        link = await stack.enter_async_context(connected(spec.url, f"/collector/{spec.name}", spec.key))

        episodes = Episodes(parts.workflow, rollout, parts.check, limit, outbox.attempt_failed, parts.name)
        groups = GroupCollector(
            outbox=outbox,
            record=lambda group, assignment, sample, attempt: Recording(
                seeded_engines(pool, rollout.sampling.seed, group, sample, attempt),
                outbox,
                group,
                assignment,
                sample,
                surroundings.clock,
                wants_routes=config.actor.routing_replay == "rollout",
            ),
            context=lambda recording, place: parts.context(
                recording, WorkflowReward(judges, limit, recording), rollout.sampling, place
            ),
            episodes=episodes,
            judge=parts.judge,
            samples=rollout.n_samples_per_prompt,
            group_filter=parts.group_filter,
            needs=TeacherNeeds.of(config.actor),
        )
        log = open_untrained_log(config.log.episodes, config.run.folder, config.model.path, spec)
        if log is not None:
            stack.callback(log.flush)
        evaluations = Evaluations(
            outbox, parts.evaluation_context(), episodes, parts.judge, parts.evaluation, log
        )
        stack.push_async_callback(evaluations.close)
        stack.push_async_callback(groups.close)
        stack.enter_context(watched(rollout.collector_timeout_s, _reporter(spec)))
        work = _Work(link, pool, judges, groups, evaluations, surroundings.engines, outbox, log)
        look_seldom_for_garbage()
        await _live(work, link, outbox, groups)


async def _live(work: "_Work", link: OutgoingLink, outbox: Outbox, groups: GroupCollector[Recording]) -> None:
    """Take in messages and send others until the connection ends."""
    with suppress(LinkEnded, ConnectionError):  # this life of the collector is over
        await until_one_ends(
            {
                "receiving": work.receive(),
                "sending": outbox.run(link.send, work.status),
                "writing ends": _write_ends(groups),
            }
        )


async def _write_ends(groups: GroupCollector[Recording]) -> None:
    while True:
        await asyncio.sleep(RECORD_EVERY_S / 2)
        groups.write_ends(RECORD_EVERY_S)


class _Work:
    """The work that the driver gives the collector by the messages of one connection."""

    def __init__(
        self,
        link: OutgoingLink,
        pool: EnginePool,
        judges: Judges,
        groups: GroupCollector[Recording],
        evaluations: Evaluations,
        engines: ServingAddresses,
        outbox: Outbox,
        log: UntrainedLog | None,
    ) -> None:
        self._outbox = outbox
        self._log = log
        self._flushes: set[asyncio.Task[None]] = set()
        self._engines = engines
        self._link = link
        self._pool = pool
        self._judges = judges
        self._groups = groups
        self._evaluations = evaluations

    def status(self) -> Status:
        judges = self._judges.status()
        return Status(self._pool.status(), judges.waiting + judges.running, judges.oldest_s)

    async def receive(self) -> None:
        """Do what the driver says. Raises LinkEnded and MalformedFrame."""
        while True:
            self._take(*await self._link.receive(DOWN))

    def _take(self, message: Down, chunks: memoryview) -> None:
        if message.routing is not None:
            self._pool.follow(message.routing)
            self._engines.follow(message.routing)
            expect_objects(OF_COLLECTED_EPISODE * message.routing.limit)
        start = 0
        for assignment in message.assignments:
            end = start + sum(size for sample in assignment.prior for size, _ in sample.pieces)
            self._groups.start(assignment, chunks[start:end])
            start = end
        self._take_log(message, chunks[start:])
        for group, number in message.cancelled:
            self._groups.cancel(group, number)
        for question in message.questions:
            self._evaluations.start(question)
        for task in message.withdrawn:
            self._evaluations.withdraw(task)

    def _take_log(self, message: Down, chunks: memoryview) -> None:
        """Write what is to be in the episode log. ``chunks``: those of the lost groups."""
        if self._log is not None:
            if message.evaluates_from is not None:
                self._log.evaluates_from(message.evaluates_from)
            start = 0
            for group in message.lost:
                end = start + sum(size for sample in group.recorded for size, _ in sample.pieces)
                self._log.lost(group, chunks[start:end])
                start = end
        if message.flush is not None:
            task = asyncio.create_task(self._flush(message.flush), name="flushing the episode log")
            self._flushes.add(task)
            task.add_done_callback(self._flushes.discard)

    async def _flush(self, number: int) -> None:
        if self._log is not None:
            await asyncio.to_thread(self._log.flush)
        self._outbox.flushed(number)


def _reporter(spec: CollectorSpec) -> Callable[[int | None, str], None]:
    """Return a function that reports to the driver which group blocks this process."""

    def report(group: int | None, stack: str) -> None:
        request = urllib.request.Request(
            f"{spec.url}/collector/{spec.name}/blocked",
            json.dumps({"group": group, "traceback": stack}).encode(),
            {"Content-Type": "application/json"} | spec.headers(),
        )
        urllib.request.urlopen(request, timeout=REPORT_TIMEOUT_S).close()

    return report


BLOCKED = 70
"""Exit code of a collector that ended itself."""

PATIENCE = 1.5
"""Time limits after which the timer in C ends a process whose threads do not run."""

Report = Callable[[int | None, str], None]
"""Tells the driver: number of the group, if it is known, and the traceback. Runs in the watchdog's thread."""


@contextmanager
def watched(limit_s: float, report: Report) -> Iterator[None]:
    """End the process when the running loop stands still for ``limit_s`` seconds inside the block."""
    loop = asyncio.get_running_loop()
    watchdog = _Watchdog(loop, limit_s, report)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, report: Report) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._report = report
        self._loop_thread = threading.get_ident()
        self._beaten = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        self._beaten.set()
        self._thread.join()

    def _beat(self) -> None:
        """Show that the loop runs, again and again."""
        self._beaten.set()
        faulthandler.dump_traceback_later(PATIENCE * self._limit_s, exit=True)
        self._timer = self._loop.call_later(self._limit_s / 4, self._beat)

    def _watch(self) -> None:
        while not self._ended:
            # A process that was suspended as a whole gets a second chance.
            if not self._beaten.wait(self._limit_s) and not self._beaten.wait(self._limit_s / 4):
                self._bite()
            self._beaten.clear()

    def _bite(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "no traceback"
        task = asyncio.current_task(self._loop)
        name = task.get_name() if task is not None else ""
        group = int(name.removeprefix(TASK_NAME)) if name.startswith(TASK_NAME) else None
        reason = f"the event loop has stood still for {self._limit_s:g} s in {name or 'no task'}"
        end_process(self._report, group, stack, reason)


def end_process(report: Report, group: int | None, stack: str, reason: str = "") -> NoReturn:
    """End this process, whose user code cannot be ended otherwise, after the driver has heard why."""
    print(f"{reason}:\n{stack}" if reason else stack, file=sys.stderr, flush=True)
    try:
        report(group, stack)
    finally:
        os._exit(BLOCKED)
