"""Makes the applications of a gateway process from its finished parts. Imports SGLang.

    serving = assemble(model, limits=..., source=..., conversations=..., entries=..., keys=...)
    uvicorn: serving.app on gateway.host:port, serving.admin on 127.0.0.1:admin_port
    await serving.close()       # at the end, while the journal still takes entries

The process needs the environment variables of ``rollout.engine.server_process.environment_without_gpu``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI

from slipstream.configs.schema import (
    DialectConfig,
    LimitsConfig,
    ModelConfig,
    SamplingConfig,
    TracesConfig,
)
from slipstream.rollout.gateway.conversations import EntryLog, KeyRing
from slipstream.rollout.gateway.helpers import TurnTypes
from slipstream.rollout.gateway.serving.app import ModelCard, create_admin_app, create_app
from slipstream.rollout.gateway.serving.call import SharedParts
from slipstream.rollout.gateway.serving.contents import AnswerContents
from slipstream.rollout.gateway.serving.endpoints import Endpoints
from slipstream.rollout.gateway.serving.handling import RequestHandler
from slipstream.rollout.gateway.serving.metrics import ServingMetrics
from slipstream.rollout.gateway.serving.running import Conversations, RunningTurns
from slipstream.rollout.gateway.serving.session_routes import SessionRoutes
from slipstream.rollout.gateway.serving.stand_in import ServedModel, StandIn
from slipstream.rollout.gateway.serving.traces import Traces
from slipstream.rollout.gateway.serving.workers import Workers
from slipstream.rollout.gateway.source import TokenSource
from slipstream.rollout.system.steady_clock import steady_s


@dataclass(frozen=True)
class Serving:
    """The applications that a gateway process serves."""

    app: FastAPI
    admin: FastAPI
    metrics: ServingMetrics
    turns: RunningTurns
    workers: Workers
    traces: Traces | None

    async def close(self) -> None:
        """Cancel all turns that run, and wait until they are recorded."""
        await self.turns.close()
        self.workers.close()
        if self.traces is not None:
            await self.traces.export.close()


def assemble(
    model: ServedModel,
    *,
    limits: LimitsConfig,
    source: TokenSource,
    conversations: Conversations,
    entries: EntryLog,
    keys: KeyRing,
    mint: Callable[[], str],
    types: TurnTypes | None = None,
    log_content: bool = False,
    aborts_all: bool = False,
    traces: TracesConfig | None = None,
    instance: str = "",
) -> Serving:
    """Make both applications. Once in a process: SGLang's settings belong to the whole process.

    ``mint`` returns ids of requests, which nobody can guess. ``types``: gives types to turns whose requests
    do not say. ``log_content``: write requests into the log.
    ``aborts_all``: a key names one client, which may abort all of its requests at once.
    ``traces``: where spans go; None: nowhere. ``instance``: name of the process in them.

    Raises ValueError if the environment lacks what ``traces`` needs.
    """
    spans = None if traces is None else Traces(traces, model=model.name, instance=instance)
    stand_in = StandIn(model)
    turns = RunningTurns(source, conversations, entries)
    workers = Workers()
    shared = SharedParts(
        turns=turns,
        conversations=conversations,
        tokenizer=stand_in.tokenizer,  # pyright: ignore[reportArgumentType]
        limits=limits,
        context=model.context,
        defaults=stand_in.model_config.get_default_sampling_params(),
        check_sampling=stand_in.check_sampling,
        end_tokens=frozenset(stand_in.tokenizer.all_special_ids),
        contents=AnswerContents(stand_in.tokenizer, lambda: source.version),  # pyright: ignore[reportArgumentType]
        entries=entries,
        workers=workers,
        vocab_size=stand_in.vocab_size,
        longest_token=stand_in.longest_token,
        mint=mint,
    )

    metrics = ServingMetrics()
    handler = RequestHandler(
        shared=shared,
        source=source,
        keys=keys,
        limits=limits,
        metrics=metrics,
        types=types,
        log_content=log_content,
        aborts_all=aborts_all,
        traces=spans,
    )
    if spans is not None:
        metrics.follow_export(spans.export)
    card = ModelCard(model.name, str(model.path), model.context, int(time.time()))
    app = create_app(
        handler,
        SessionRoutes(handler, conversations, entries, steady_s, spans),
        Endpoints(stand_in).all(),
        card,
        source=source,
        metrics=metrics,
        answers=lambda: turns.answers,
    )
    admin = create_admin_app(source, metrics, lambda: turns.answers)
    return Serving(app, admin, metrics, turns, workers, spans)


def served_model(
    policy: ModelConfig, *, name: str, context: int, dialect: DialectConfig, sampling: SamplingConfig
) -> ServedModel:
    """Return the model of a recipe as clients see it. ``context``: largest length of prompt and answer."""
    return ServedModel(
        path=policy.path,
        name=name,
        context=context,
        sampling=sampling,
        chat_template=dialect.chat_template,
        tool_parser=dialect.tool_parser,
        reasoning_parser=dialect.reasoning_parser,
        hosted_tools=dialect.hosted_tools,
        contents=dialect.contents,
        template_args=policy.template_args,
    )
