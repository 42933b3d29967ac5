"""The judge's own engines: started, watched and ended with the run, beside those of the policy.

    supervisor ──add, remove──► serving list ──addresses──► roster ──► questions to judge processes

They are never given weights. One that is lost is started again, as often as it takes: an outage of the judge
stops nothing. Votes are missing meanwhile, and turns wait. Only an engine whose starts fail twice in a row in
the same way ends the run.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from slipstream.backend.cluster.actors import JudgeEngineActors
from slipstream.backend.cluster.placement import Placement
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.processes.engines import START_GRACE_S, EngineLimits, InitialWeights, RayEngine
from slipstream.backend.driver.processes.places import EnginePlaces
from slipstream.configs.schema import ModelJudge, RunConfig
from slipstream.configs.schema.judge import OwnEngines, own_engines
from slipstream.rollout.engine.client import EngineAddress, EngineClient
from slipstream.rollout.engine.context import served_length
from slipstream.rollout.engine.model_limits import context_of, vocabulary_of
from slipstream.rollout.engine.supervisor import EngineCounts, Supervisor
from slipstream.rollout.system.restarts import RestartLimit

RESTART_PAUSE_S = 5.0
"""Seconds before a restart. Nothing limits the number of restarts, and each one loads the model."""

Serving = Callable[[tuple[EngineAddress, ...]], None]
"""Hears of the engines that serve, whenever they change."""


class JudgeRoster:
    """The judge's engines that serve. Single event loop."""

    def __init__(self, changed: Serving) -> None:
        self.lost: asyncio.Queue[tuple[EngineClient, str]] = asyncio.Queue()
        self.outdated: asyncio.Queue[tuple[EngineClient, str]] = asyncio.Queue()
        self._clients: list[EngineClient] = []
        self._changed = changed

    def add(self, client: EngineClient) -> None:
        """Add an engine to those that serve."""
        self._clients.append(client)
        self._tell()

    def remove(self, client: EngineClient) -> None:
        """Remove an engine from those that serve."""
        if client in self._clients:
            self._clients.remove(client)
            self._tell()

    def awaited(self) -> AbstractContextManager[None]:
        """Do nothing inside the block: questions wait by themselves."""
        return nullcontext()

    async def suspects(self, name: str) -> list[str]:
        """Return nothing: users ask the policy's engines alone."""
        return []

    def _tell(self) -> None:
        self._changed(tuple(client.address for client in self._clients))


def judge_supervisor(
    config: RunConfig,
    placement: Placement,
    places: EnginePlaces,
    logs: Path,
    changed: Serving,
    note: Callable[[str], None],
) -> Supervisor | None:
    """Return the supervisor of the judge's own engines; None: it has none.

    ``changed`` hears of the engines that serve.
    """
    engines = own_engines(config.judge)
    if engines is None:
        return None
    assert isinstance(config.judge, ModelJudge)
    actors = JudgeEngineActors(config, engines, placement, logs)
    limits = limits_of(engines, config.judge.request_timeout_s)
    gpus = engines.tensor_parallel if placement.device == "cuda" else 0
    handles = [
        RayEngine(
            actors.name(number),
            lambda _, on, number=number: actors.create(number, on),
            limits,
            Separate(),
            places,
            gpus=gpus,
        )
        for number in range(engines.count)
    ]
    for number, node in enumerate(placement.judge):
        places.begin(actors.name(number), (node,), gpus)
    return Supervisor(
        handles,
        JudgeRoster(changed),
        InitialWeights(),
        # An outage of the judge stops nothing.
        limit=RestartLimit("", None, config.run.restart_window_s, "it has not served"),
        counts=EngineCounts(
            engines.count, 1, engines.count, config.rollout.engine.patience_s, "judge.endpoint"
        ),
        note=note,
        pause_s=RESTART_PAUSE_S,
    )


def limits_of(engines: OwnEngines, request_timeout_s: float) -> EngineLimits:
    """Return the limits of the judge's engines. Raises ValueError if its config.json does not say them."""
    return EngineLimits(
        ranks=engines.tensor_parallel,
        vocab_size=vocabulary_of(engines.path),
        max_length=served_length(context_of(engines.path), engines.args),
        request_timeout_s=request_timeout_s,
        answer_timeout_s=engines.answer_timeout_s,
        stream_interval=EngineAddress.stream_interval,
        start_timeout_s=engines.start_timeout_s + START_GRACE_S,
    )
