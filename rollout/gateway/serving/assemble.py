"""Makes the applications of a gateway process from its finished parts. Imports SGLang.

    serving = assemble(model, gateway=..., source=..., conversations=..., entries=..., keys=...)
    uvicorn: serving.app on gateway.host:port, serving.admin on 127.0.0.1:admin_port
    await serving.close()       # at the end, while the journal still takes entries

The process needs the environment variables of ``engine.process.environment_without_gpu``.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from slipstream.configs.schema import GatewayConfig, SamplingConfig
from slipstream.rollout.gateway.conversations import Conversations, EntryLog, KeyRing, User
from slipstream.rollout.gateway.serving.app import ModelCard, create_admin_app, create_app
from slipstream.rollout.gateway.serving.call import SharedParts
from slipstream.rollout.gateway.serving.endpoints import Endpoints
from slipstream.rollout.gateway.serving.handling import RequestHandler
from slipstream.rollout.gateway.serving.metrics import ServingMetrics
from slipstream.rollout.gateway.serving.running import RunningTurns
from slipstream.rollout.gateway.serving.stand_in import ServedModel, StandIn
from slipstream.rollout.gateway.source import TokenSource


@dataclass(frozen=True)
class Serving:
    """What a gateway process serves."""

    app: FastAPI
    admin: FastAPI
    metrics: ServingMetrics
    turns: RunningTurns

    async def close(self) -> None:
        """Cancel all turns that run, and wait until they are recorded."""
        await self.turns.close()


def assemble(
    model: ServedModel,
    *,
    gateway: GatewayConfig,
    source: TokenSource,
    conversations: Conversations,
    entries: EntryLog,
    keys: KeyRing,
    mint: Callable[[], str],
) -> Serving:
    """Make both applications. Once in a process: SGLang's settings belong to the whole process.

    ``mint`` returns ids of requests, which nobody can guess.
    """
    stand_in = StandIn(model)
    turns = RunningTurns(source, conversations, entries)
    shared = SharedParts(
        turns=turns,
        conversations=conversations,
        tokenizer=stand_in.tokenizer,  # pyright: ignore[reportArgumentType]
        limits=gateway.limits,
        context=model.context,
        defaults=stand_in.model_config.get_default_sampling_params(),
        check_sampling=stand_in.check_sampling,
        end_tokens=frozenset(stand_in.tokenizer.all_special_ids),
        version=lambda: source.version,
        entries=entries,
        mint=mint,
    )

    def record_reward(user: User, session: str, reward: float, turn: int | None) -> None:
        entries.append(conversations.reward(user, session, reward, turn))

    metrics = ServingMetrics()
    handler = RequestHandler(
        shared=shared,
        source=source,
        keys=keys,
        limits=gateway.limits,
        metrics=metrics,
        record_reward=record_reward,
        log_content=gateway.log_content,
    )
    card = ModelCard(model.name, str(model.path), model.context, int(time.time()))
    app = create_app(
        handler,
        Endpoints(stand_in).all(),
        card,
        source=source,
        metrics=metrics,
        answers=lambda: turns.answers,
    )
    admin = create_admin_app(source, metrics, lambda: turns.answers)
    return Serving(app, admin, metrics, turns)


def served_model(
    path: Path, *, name: str, context: int, gateway: GatewayConfig, sampling: SamplingConfig
) -> ServedModel:
    """Return the model of a recipe as clients see it. ``context``: the engines' own limit."""
    return ServedModel(
        path=path,
        name=gateway.served_model_name or name,
        context=min(context, gateway.limits.context or context),
        sampling=sampling,
        chat_template=gateway.chat_template,
        tool_parser=gateway.tool_parser,
        reasoning_parser=gateway.reasoning_parser,
    )
