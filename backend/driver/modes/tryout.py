"""A few episodes of a recipe on one engine: inputs, workflow and rewards of a run, without Ray or trainer.

inputs ──► engine (and the judge's own) ──► collector's parts ──► episodes, as they end
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slipstream.backend.driver.processes.engines import EngineLimits
from slipstream.backend.driver.start.engine_model import write_engine_model
from slipstream.backend.driver.start.hub_models import with_local_models
from slipstream.backend.driver.start.inputs import InputError, Inputs, read_inputs
from slipstream.backend.driver.start.prepare import prepare_inputs
from slipstream.backend.driver.start.run_folder import with_absolute_paths
from slipstream.backend.trainer.engine_checkpoint import COPY
from slipstream.configs.installed.environment import has_gpus
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import own_engines
from slipstream.rollout.collection.collector.parts import episode_parts, surroundings_of
from slipstream.rollout.collection.collector.trial import Trial, TriedEpisode
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.context import served_length
from slipstream.rollout.engine.engine_pool import EnginePool
from slipstream.rollout.engine.model_limits import context_of, vocabulary_of
from slipstream.rollout.engine.routing import Routing, ServingEngine
from slipstream.rollout.engine.server_process import (
    MEETING_PORTS,
    EngineStartError,
    MeetingPoint,
    ServerProcess,
    ServerSpec,
)
from slipstream.rollout.system import gpu_environment
from slipstream.rollout.system.network import LOOPBACK, hold_port, hold_ports, port_of
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.trajectory import Prompt

LOG_LINES = 25
"""Lines of an engine's log that are shown when it has ended."""


@asynccontextmanager
async def tryout(
    config: RunConfig, say: Callable[[str], None], *, evaluates: bool = False
) -> AsyncIterator["Tryout"]:
    """Give a way to try episodes of a recipe. Everything that is started ends with the block.

    ``say``: hears what is being done. ``evaluates``: sample as evaluations do; else as training does.

    Raises InputError, EngineStartError, PrepareFailed, PluginError and JudgeStartFailed.
    """
    config = with_absolute_paths(config)
    _engine_is_on_one_node(config)
    config = await with_local_models(config, say)
    await prepare_inputs(config, say)
    say("reading model and prompts")
    inputs = read_inputs(config, trains=False)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-try-")))
        model = inputs.engine_model
        if model.is_copy:  # a trial leaves no files
            model = replace(model, path=logs / COPY)
        await write_engine_model(config, model, say)
        say("starting an engine and the reward")
        servers = await stack.enter_async_context(_serving(config, inputs, model.path, logs))
        surroundings = await stack.enter_async_context(surroundings_of(config, logs, "try"))
        limit = TimeLimit(config.rollout.episode_timeout_s, "rollout.episode_timeout_s")
        pool = EnginePool(
            wait_timeout_s=config.rollout.engine.start_timeout_s,
            isolate_versions=False,
            most_requests=surroundings.most_requests,
        )
        stack.push_async_callback(pool.close)
        geometry = inputs.spec.geometry
        parts = await stack.enter_async_context(
            episode_parts(
                surroundings,
                config,
                pool,
                limit,
                vocab_size=geometry.vocab,
                context=served_length(geometry.max_positions, config.rollout.engine.args),
                give_up=_give_up,
            )
        )
        policy, judge = servers[0], servers[1:]
        routing = Routing(
            number=1,
            version=0,
            held=False,
            limit=config.rollout.max_concurrent,
            engines=(ServingEngine(policy.address, life=0),),
            judge=tuple(server.address for server in judge),
        )
        pool.follow(routing)
        surroundings.engines.follow(routing)
        trial = Trial(parts, pool, surroundings.judges, limit, evaluates=evaluates)
        yield Tryout(inputs, trial, servers, at_once=config.rollout.max_concurrent)


class Tryout:
    """A recipe of which episodes can be tried."""

    def __init__(self, inputs: Inputs, trial: Trial, servers: "Sequence[_Server]", *, at_once: int) -> None:
        """``at_once``: largest number of episodes that run at one time."""
        self.inputs = inputs
        self._trial = trial
        self._servers = servers
        self._places = asyncio.Semaphore(at_once)

    async def episodes(self, prompts: Sequence[Prompt]) -> AsyncIterator[TriedEpisode]:
        """Run an episode of each prompt, and give them in their order.

        Raises EngineStartError when an engine ends meanwhile, NoEngine and JudgeStartFailed.
        """
        running = [
            asyncio.create_task(self._episode(prompt), name=f"episode of prompt {prompt.id}")
            for prompt in prompts
        ]
        ends = [asyncio.ensure_future(server.process.wait_exit()) for server in self._servers]
        try:
            for each in running:
                await asyncio.wait({each, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not each.done():
                    raise EngineStartError(
                        "; ".join(
                            server.ended()
                            for server, end in zip(self._servers, ends, strict=True)
                            if end.done()
                        )
                    )
                yield each.result()
        finally:
            for task in (*running, *ends):
                task.cancel()
            await asyncio.gather(*running, *ends, return_exceptions=True)

    async def _episode(self, prompt: Prompt) -> TriedEpisode:
        async with self._places:
            return await self._trial.run(prompt)


def evenly(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """Return ``number`` prompts that lie evenly over all of them, or all if there are no more."""
    count = min(number, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]


class _Server(NamedTuple):
    process: ServerProcess
    address: EngineAddress
    log: Path

    def ended(self) -> str:
        """Return what its user is told when it has ended by itself."""
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"{self.address.name} has ended; the end of its log:", *tail])


@asynccontextmanager
async def _serving(
    config: RunConfig, inputs: Inputs, model: Path, logs: Path
) -> AsyncIterator[list[_Server]]:
    """Serve the policy, and the judge's own model if it has one, inside. Raises EngineStartError.

    ``model``: the HF checkpoint from which the policy's engine starts.
    """
    device, engine = config.cluster.device, config.rollout.engine
    on_gpus = device == "gpu" or (device == "auto" and has_gpus())
    limits = EngineLimits.of(config.rollout.engine, inputs.spec.geometry, config.run.step_timeout_s)
    servers: list[_Server] = []
    async with AsyncExitStack() as stack:

        def start(
            name: str,
            path: Path,
            dtype: str,
            tensor_parallel: int,
            args: Mapping[str, object],
            *,
            data_parallel: int = 1,
            expert_parallel: int = 1,
            pipeline_parallel: int = 1,
        ) -> None:
            port = port_of(stack.enter_context(hold_port(LOOPBACK)))
            meeting = None
            if data_parallel > 1:
                held = [stack.enter_context(each) for each in hold_ports(LOOPBACK, MEETING_PORTS)]
                meeting = MeetingPoint(LOOPBACK, port_of(held[0]))
            spec = ServerSpec(
                path,
                dtype,
                "cuda" if on_gpus else "cpu",
                tensor_parallel,
                LOOPBACK,
                port,
                version=0,
                seed=config.run.seed,
                data_parallel=data_parallel,
                expert_parallel=expert_parallel,
                pipeline_parallel=pipeline_parallel,
                meeting=meeting,
                args=args,
                environment=gpu_environment.environment(engine, config.actor.parallel, "engines")
                if on_gpus
                else {},
                label="try",
            )
            log = logs / f"{name}.log"
            process = ServerProcess(spec, log)
            stack.push_async_callback(asyncio.to_thread, process.stop)
            address = EngineAddress(
                name,
                process.access.url,
                spec.ranks,
                vocabulary_of(path),
                served_length(context_of(path), args),
                limits.request_timeout_s,
                limits.answer_timeout_s,
                limits.stream_interval,
                process.access.key,
            )
            servers.append(_Server(process, address, log))

        start(
            "engine-0",
            model,
            config.model.dtype,
            engine.tensor_parallel,
            engine.args,
            data_parallel=engine.data_parallel,
            expert_parallel=engine.expert_parallel,
            pipeline_parallel=engine.pipeline_parallel,
        )
        if (own := own_engines(config.judge)) is not None:
            start("judge-engine-0", own.path, own.dtype, own.tensor_parallel, own.args)
        await asyncio.gather(*(each.process.wait_healthy(engine.start_timeout_s) for each in servers))
        yield servers


def _engine_is_on_one_node(config: RunConfig) -> None:
    """Raise InputError for an engine that this machine alone cannot have."""
    nodes = config.rollout.engine.nodes
    if nodes > 1:
        raise InputError(
            f"rollout.engine.nodes: found {nodes}, expected 1: this command starts one engine, on this "
            "machine alone; replace the ranks of the engine by what fits here, such as "
            "rollout.engine.nodes=1 rollout.engine.tensor_parallel=8"
        )


def _give_up(reason: str) -> None:
    """End this process, which runs code that does not end by itself."""
    raise SystemExit(reason)
