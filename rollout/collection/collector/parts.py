"""The parts of a recipe's episodes in one process, for collectors and for all others that run episodes.

tokenizer, judges ──► Surroundings ──► workflow, filter, judging, endpoint of agents ──► EpisodeParts
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from slipstream.configs.schema import (
    EvalConfig,
    EvalSamplingConfig,
    PluginConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from slipstream.configs.schema.judge import asks_policy, own_engines
from slipstream.rollout.collection.collector.episodes import check
from slipstream.rollout.collection.collector.evaluation import UnrecordedGenerator
from slipstream.rollout.collection.collector.groups import NamedFilter, WholeGroups
from slipstream.rollout.collection.collector.judging import Judges, Judging, WorkflowReward
from slipstream.rollout.collection.collector.recording import Recording
from slipstream.rollout.collection.collector.seeded import seeded_engines
from slipstream.rollout.compat.hooks import (
    UNREWARDED,
    CallSurroundings,
    EvaluateSets,
    HookParts,
    hook_parts,
)
from slipstream.rollout.control.filters import GroupFilter
from slipstream.rollout.engine.asked_engines import ServingAddresses
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.connection import EngineAddress
from slipstream.rollout.engine.descriptors import make_room
from slipstream.rollout.engine.engine_pool import EnginePool, GeneratingClient
from slipstream.rollout.engine.request_trace import RequestTrace
from slipstream.rollout.gateway.endpoint.needed import load_endpoint, needs_endpoint
from slipstream.rollout.reward.judge.judge_pool import JudgePool
from slipstream.rollout.reward.judge.named_model import named_model
from slipstream.rollout.reward.reasoning import reads_reasoning
from slipstream.rollout.reward.value import EpisodeJudge
from slipstream.rollout.system import plugins
from slipstream.rollout.system.time_limit import TimeLimit
from slipstream.rollout.tokens.tokenizer import Tokenizer, load_tokenizer
from slipstream.rollout.tokens.trajectory import Trajectory
from slipstream.rollout.workflow import EpisodePlace, Judge, Workflow, WorkflowContext

if TYPE_CHECKING:
    from slipstream.rollout.gateway.endpoint.collector_endpoint import CollectorEndpoint

DESCRIPTORS = 3
"""Descriptors of a request of an agent: both ends of its connection, and the connection with the engine."""


@dataclass(frozen=True)
class Surroundings:
    """Everything that a collector uses besides the recipe."""

    tokenizer: Tokenizer
    judges: Judges
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


@asynccontextmanager
async def surroundings_of(
    config: RunConfig, logs: Path, name: str, trace: Callable[[RequestTrace], None] | None = None
) -> AsyncIterator[Surroundings]:
    """Give what a collector of a recipe uses, its judges started. ``name``: in the names of their logs.

    Raises PluginError, JudgeStartFailed and OSError.
    """
    rollout = config.rollout
    reward = rollout.reward or UNREWARDED  # hooks and some workflows reward by themselves
    serve_endpoint = None
    if needs_endpoint(rollout):
        serve_endpoint = load_endpoint()  # before the tokenizer imports transformers
    most_requests = make_room(rollout.max_concurrent, each=DESCRIPTORS if serve_endpoint else 1)
    tokenizer = load_tokenizer(config.model.path, config.model.template_args)
    asks = asks_policy(config.judge)
    engines = ServingAddresses(asks_policy=asks)
    async with JudgePool(
        rollout.judging,
        reward,
        logs,
        name,
        reward_key=rollout.reward_key,
        model=named_model(config.judge, config.model),
        engines=(lambda: engines.encoded) if asks or own_engines(config.judge) else bytes,
    ) as judges:
        yield Surroundings(
            tokenizer,
            judges,
            engines=engines,
            trace=trace,
            most_requests=most_requests,
            serve_endpoint=serve_endpoint,
        )


@dataclass(frozen=True)
class EpisodeParts:
    """The parts that run episodes."""

    rollout: RolloutConfig
    tokenizer: Tokenizer
    name: str
    """The workflow, as messages name it."""
    workflow: Workflow
    check: Callable[[object], Trajectory]
    """Returns a trajectory as it is to be trained. Raises ValueError."""
    judge: EpisodeJudge
    group_filter: NamedFilter | None
    evaluation: EvaluateSets | None
    """Evaluates whole sets; None: evaluations are episodes."""
    endpoints: "CollectorEndpoint | None"
    evaluated: tuple[UnrecordedGenerator, Judge, SamplingConfig]
    """The generator, the judge and the sampling of evaluations."""

    def context(
        self,
        generator: Recording | UnrecordedGenerator,
        reward: Judge,
        sampling: SamplingConfig,
        place: EpisodePlace | None = None,
    ) -> WorkflowContext:
        """Return what a workflow may use in an episode that is trained."""
        endpoint = self.endpoints and self.endpoints.of(generator, sampling)
        return WorkflowContext(
            generator,
            self.tokenizer,
            reward,
            sampling,
            endpoint,
            self.rollout.reward_key,
            place=place,
        )

    def evaluation_context(self) -> WorkflowContext:
        """Return what a workflow may use in an evaluation."""
        generator, reward, sampling = self.evaluated
        endpoint = self.endpoints and self.endpoints.of(generator, sampling, is_trained=False)
        key = self.rollout.reward_key
        return WorkflowContext(generator, self.tokenizer, reward, sampling, endpoint, key, is_evaluation=True)


@asynccontextmanager
async def episode_parts(
    surroundings: Surroundings,
    config: RunConfig,
    pool: EnginePool,
    limit: TimeLimit,
    *,
    vocab_size: int,
    context: int,
    give_up: Callable[[str], None],
) -> AsyncIterator[EpisodeParts]:
    """Give the parts of episodes that ask the engines of ``pool``.

    ``limit``: of an episode. ``vocab_size`` and ``context``: of the model, in tokens. ``give_up``: ends the
    process, given the reason.

    Raises PluginError, and ValueError and OSError for files that the recipe's hooks name.
    """
    rollout, tokenizer, judges = config.rollout, surroundings.tokenizer, surroundings.judges
    async with AsyncExitStack() as stack:
        endpoints = None
        if surroundings.serve_endpoint is not None:
            endpoints = await stack.enter_async_context(
                surroundings.serve_endpoint(
                    config, context=context, version=lambda: pool.version, decode=tokenizer.decode
                )
            )
        unrecorded = seeded_engines(pool, rollout.sampling.seed, "unrecorded")
        greedy = config.eval is None or config.eval.sampling.is_greedy
        evaluating = UnrecordedGenerator(unrecorded, greedy=greedy)
        sampling = evaluation_sampling(config.eval, rollout.sampling)

        def around_calls() -> CallSurroundings:
            assert endpoints is not None
            sampled = UnrecordedGenerator(unrecorded, greedy=False)
            return CallSurroundings(
                endpoints.of(sampled, rollout.sampling),
                endpoints.of(evaluating, sampling, is_trained=False),
                limit,
                lambda: pool.version,
                give_up,
            )

        reward = rollout.reward
        reads_all = reward is None or reads_reasoning(rollout.judging.reasoning, reward.path, reward.args)
        stops = (*rollout.sampling.stop, *sampling.stop)
        judging = Judging(judges, tokenizer, reads_reasoning=reads_all, stops=stops)
        hooked = hook_parts(config, tokenizer, judging, lambda: pool.version, around_calls)
        workflow = hooked.workflow or cast(Workflow, plugins.build(rollout.workflow))
        if (close := getattr(workflow, "close", None)) is not None:
            stack.push_async_callback(close)
        source = rollout.workflow.path if hooked.workflow is None else "rollout.hooks"
        yield EpisodeParts(
            rollout,
            tokenizer,
            f"the workflow {source}",
            workflow,
            partial(check, vocab_size=vocab_size, workflow=source),
            hooked.reward or judging,
            _filter(rollout.group_filter, hooked),
            hooked.evaluation,
            endpoints,
            (evaluating, WorkflowReward(judges, limit), sampling),
        )


def evaluation_sampling(settings: EvalConfig | None, sampling: SamplingConfig) -> SamplingConfig:
    """Return the sampling of evaluations. ``sampling``: that of training."""
    return (EvalSamplingConfig() if settings is None else settings.sampling).over(sampling)


def _filter(settings: PluginConfig | None, hooked: HookParts) -> NamedFilter | None:
    if hooked.filter is not None:
        return NamedFilter("rollout.hooks", hooked.filter)
    if settings is None:
        return None
    return NamedFilter(settings.path, WholeGroups(cast(GroupFilter, plugins.build(settings))))
