"""One life of a collector: from its plug-ins to the end of its connection.

    tokenizer, workflow, filter, judges ──► connect ──► leases in, events out ──► end of the connection

When the connection ends, nothing that is left here counts any more: the driver has leased it to others, or is
gone. A further life begins anew, under another name.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import aiohttp

from slipstream.configs.schema import RunConfig, SamplingConfig
from slipstream.configs.schema.judge import asks_policy, own_engines
from slipstream.rollout import plugins
from slipstream.rollout.collector.episodes import Episodes, check
from slipstream.rollout.collector.evaluation import Evaluations, UnrecordedGenerator
from slipstream.rollout.collector.groups import GroupCollector, NamedFilter, WholeGroups
from slipstream.rollout.collector.judging import Judges, Judging, WorkflowReward
from slipstream.rollout.collector.outbox import Outbox
from slipstream.rollout.collector.recording import JOURNAL_EVERY_S, Recording
from slipstream.rollout.collector.spec import CollectorSpec
from slipstream.rollout.collector.time_limit import TimeLimit
from slipstream.rollout.collector.watchdog import end_process, watched
from slipstream.rollout.compat.slime.function_calls import CallSurroundings
from slipstream.rollout.compat.slime.parts import UNREWARDED, HookParts, hook_parts
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.endpoint.needed import needs_endpoint
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.descriptors import make_room
from slipstream.rollout.engine.pool import EnginePool, GeneratingClient
from slipstream.rollout.engine.serving import ServingAddresses
from slipstream.rollout.engine.trace import RequestTrace
from slipstream.rollout.garbage import OF_COLLECTED_EPISODE, expect_objects, look_seldom_for_garbage
from slipstream.rollout.judge.named_model import named_model
from slipstream.rollout.judge.pool import JudgePool, JudgeStatus
from slipstream.rollout.messages import DOWN, LONGEST_FRAME, SILENCE_S, Down, Status, Up, pack, split
from slipstream.rollout.teacher import TeacherNeeds
from slipstream.rollout.tokenizer import Tokenizer, load_tokenizer
from slipstream.rollout.workflow import Workflow, WorkflowContext

if TYPE_CHECKING:
    from slipstream.rollout.endpoint.serve import CollectorEndpoint

REPORT_TIMEOUT_S = 5.0

DESCRIPTORS = 3
"""Descriptors of a request of an agent: both ends of its connection, and the connection with the engine."""


class WatchedJudges(Judges, Protocol):
    """Judges that tell how busy they are: ``rollout.judge.pool.JudgePool``."""

    def status(self) -> JudgeStatus: ...


@dataclass(frozen=True)
class Surroundings:
    """Everything that a collector uses besides the recipe."""

    tokenizer: Tokenizer
    judges: WatchedJudges
    connect: Callable[[EngineAddress], GeneratingClient] = EngineClient
    """Makes the client of an engine."""
    engines: ServingAddresses = field(default_factory=ServingAddresses)
    """The engines that serve, for judges that ask them."""
    clock: Callable[[], float] = time.monotonic
    """Says in seconds when the record of an episode is due."""
    trace: Callable[[RequestTrace], None] | None = None
    most_requests: int | None = None
    """Number of requests that the process has descriptors for; None: as many as the driver allows."""
    serve_endpoint: "Callable[..., AbstractAsyncContextManager[CollectorEndpoint]] | None" = None
    """Serves the endpoint of agents inside a block; None: the workflow needs none."""


async def collect(
    spec: CollectorSpec, config: RunConfig, trace: Callable[[RequestTrace], None] | None = None
) -> None:
    """Collect for the driver until the connection ends.

    Raises PluginError, JudgeStartFailed and OSError when the collector cannot start.
    """
    rollout = config.rollout
    reward = rollout.reward or UNREWARDED  # without hooks there are no episodes without a reward
    serve_endpoint = None
    if needs_endpoint(config):
        from slipstream.rollout.endpoint.load import load

        serve_endpoint = load()  # before the tokenizer imports transformers
    most_requests = make_room(rollout.max_concurrent, each=DESCRIPTORS if serve_endpoint else 1)
    tokenizer = load_tokenizer(config.model.path)
    asks = asks_policy(config.judge)
    engines = ServingAddresses(asks_policy=asks)
    async with JudgePool(
        rollout.judging,
        reward,
        spec.logs,
        spec.name,
        reward_key=rollout.reward_key,
        model=named_model(config),
        engines=(lambda: engines.encoded) if asks or own_engines(config.judge) else bytes,
    ) as judges:
        surroundings = Surroundings(
            tokenizer,
            judges,
            engines=engines,
            trace=trace,
            most_requests=most_requests,
            serve_endpoint=serve_endpoint,
        )
        await collect_in(surroundings, spec, config)


async def collect_in(surroundings: Surroundings, spec: CollectorSpec, config: RunConfig) -> None:
    """Collect in given surroundings until the connection ends."""
    rollout, tokenizer, judges = config.rollout, surroundings.tokenizer, surroundings.judges
    limit, outbox = TimeLimit(rollout.episode_timeout_s), Outbox()
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
        endpoints = None
        if surroundings.serve_endpoint is not None:
            endpoints = await stack.enter_async_context(
                surroundings.serve_endpoint(
                    config, context=spec.context, version=lambda: pool.version, decode=tokenizer.decode
                )
            )
        engines, sampling = UnrecordedGenerator(pool, greedy=True), _evaluation_sampling(config)

        def around_calls() -> CallSurroundings:
            assert endpoints is not None
            sampled = UnrecordedGenerator(pool, greedy=False)
            return CallSurroundings(
                endpoints.of(sampled, rollout.sampling),
                endpoints.of(engines, sampling, is_trained=False),
                limit,
                lambda: pool.version,
                lambda reason: end_process(_reporter(spec), None, reason),
            )

        own_judging = Judging(judges, tokenizer)
        hooked = hook_parts(config, tokenizer, own_judging, lambda: pool.version, around_calls)
        workflow = hooked.workflow or cast(Workflow, plugins.build(rollout.workflow))
        group_filter = _filter(config, hooked)
        session = await stack.enter_async_context(aiohttp.ClientSession(spec.url, headers=spec.headers()))
        socket = await stack.enter_async_context(
            session.ws_connect(f"/collector/{spec.name}", max_msg_size=LONGEST_FRAME, compress=0)
        )

        source = rollout.workflow.path if hooked.workflow is None else "rollout.hooks"
        checking = partial(check, vocab_size=spec.vocab_size, workflow=source)
        episodes = Episodes(workflow, rollout, checking, limit, outbox)
        judging = hooked.reward or own_judging
        groups = GroupCollector(
            outbox=outbox,
            record=lambda group, lease, sample, attempt: Recording(
                pool, outbox, group, lease, sample, surroundings.clock
            ),
            context=lambda recording: WorkflowContext(
                recording,
                tokenizer,
                WorkflowReward(judges, limit, recording),
                rollout.sampling,
                endpoints and endpoints.of(recording, rollout.sampling),
                rollout.reward_key,
            ),
            episodes=episodes,
            judge=judging,
            samples=rollout.n_samples_per_prompt,
            group_filter=group_filter,
            needs=TeacherNeeds.of(config.actor),
        )
        greedy = WorkflowContext(
            engines,
            tokenizer,
            WorkflowReward(judges, limit),
            sampling,
            endpoints and endpoints.of(engines, sampling, is_trained=False),
            rollout.reward_key,
            is_evaluation=True,
        )
        evaluations = Evaluations(outbox, greedy, episodes, judging, hooked.evaluation)
        if (close := getattr(workflow, "close", None)) is not None:
            stack.push_async_callback(close)
        stack.push_async_callback(evaluations.close)
        stack.push_async_callback(groups.close)
        stack.enter_context(watched(rollout.collector_timeout_s, _reporter(spec)))
        connection = _Connection(socket, pool, judges, groups, evaluations, surroundings.engines)
        look_seldom_for_garbage()
        await _live(connection, outbox, groups)


class _ConnectionEnded(Exception):
    """The driver is gone, or has given this collector up."""


async def _live(connection: "_Connection", outbox: Outbox, groups: GroupCollector[Recording]) -> None:
    """Take in messages and send others until the connection ends."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(connection.receive(), name="receiving")
            tasks.create_task(outbox.run(connection.send, connection.status), name="sending")
            tasks.create_task(_write_ends(groups), name="writing ends")
    except* (_ConnectionEnded, ConnectionError):
        """This life of the collector is over."""


async def _write_ends(groups: GroupCollector[Recording]) -> None:
    while True:
        await asyncio.sleep(JOURNAL_EVERY_S / 2)
        groups.write_ends(JOURNAL_EVERY_S)


class _Connection:
    """The collector's end of its connection with the driver."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        pool: EnginePool,
        judges: WatchedJudges,
        groups: GroupCollector[Recording],
        evaluations: Evaluations,
        engines: ServingAddresses,
    ) -> None:
        self._engines = engines
        self._socket = socket
        self._pool = pool
        self._judges = judges
        self._groups = groups
        self._evaluations = evaluations

    def status(self) -> Status:
        judges = self._judges.status()
        return Status(self._pool.status(), judges.waiting + judges.running, judges.oldest_s)

    async def send(self, message: Up, chunks: Sequence[bytes]) -> None:
        await self._socket.send_bytes(pack(message, chunks))

    async def receive(self) -> None:
        """Do what the driver says. Raises _ConnectionEnded."""
        while True:
            try:
                message = await self._socket.receive(timeout=SILENCE_S)
            except TimeoutError:
                raise _ConnectionEnded from None
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise _ConnectionEnded
            self._take(*split(cast(bytes, message.data), DOWN))

    def _take(self, message: Down, chunks: memoryview) -> None:
        if message.routing is not None:
            self._pool.follow(message.routing)
            self._engines.follow(message.routing)
            expect_objects(OF_COLLECTED_EPISODE * message.routing.limit)
        start = 0
        for lease in message.leases:
            end = start + sum(size for sample in lease.prior for size, _ in sample.pieces)
            self._groups.start(lease, chunks[start:end])
            start = end
        for group, number in message.cancelled:
            self._groups.cancel(group, number)
        for question in message.questions:
            self._evaluations.start(question)
        for task in message.withdrawn:
            self._evaluations.withdraw(task)


def _evaluation_sampling(config: RunConfig) -> SamplingConfig:
    """Return the sampling of evaluations, whose completions may have a length of their own."""
    sampling = config.rollout.sampling
    if config.eval is None or config.eval.max_new_tokens is None:
        return sampling
    return sampling.model_copy(update={"max_new_tokens": config.eval.max_new_tokens})


def _filter(config: RunConfig, hooked: HookParts) -> NamedFilter | None:
    if hooked.filter is not None:
        return NamedFilter("rollout.hooks", hooked.filter)
    settings = config.rollout.group_filter
    if settings is None:
        return None
    return NamedFilter(settings.path, WholeGroups(cast(GroupFilter, plugins.build(settings))))


def _reporter(spec: CollectorSpec) -> Callable[[int | None, str], None]:
    """Return what tells the driver which group blocks this process."""

    def report(group: int | None, stack: str) -> None:
        request = urllib.request.Request(
            f"{spec.url}/collector/{spec.name}/blocked",
            json.dumps({"group": group, "traceback": stack}).encode(),
            {"Content-Type": "application/json"} | spec.headers(),
        )
        urllib.request.urlopen(request, timeout=REPORT_TIMEOUT_S).close()

    return report
