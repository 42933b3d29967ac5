"""The engines of a run as the supervisor sees them: one handle each, with a Ray actor behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.backend.cluster.actors import EngineActors
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.handles import EngineServerActor, kill
from slipstream.backend.cluster.waits import within
from slipstream.backend.driver.devices import Devices
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import RunConfig
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.process import ServerAccess

STOP_TIMEOUT_S = 15.0
START_GRACE_S = 60.0
"""Seconds that an actor's start may take beyond its server's."""

INITIAL_VERSION = 0
"""Version of the weights in ``model.path``, with which every server starts."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the requests to an engine, and of its start."""

    ranks: int
    vocab_size: int
    max_length: int
    request_timeout_s: float
    answer_timeout_s: float
    stream_interval: int
    start_timeout_s: float

    @staticmethod
    def of(config: RunConfig, geometry: Geometry) -> "EngineLimits":
        engine = config.rollout.engine
        # A request stands still while a colocated trainer takes its turn.
        turn_s = config.run.step_timeout_s if engine.colocated else 0.0
        return EngineLimits(
            ranks=engine.tensor_parallel,
            vocab_size=geometry.vocab,
            max_length=geometry.max_positions,
            request_timeout_s=engine.request_timeout_s + turn_s,
            answer_timeout_s=engine.answer_timeout_s,
            stream_interval=engine.stream_interval,
            start_timeout_s=engine.start_timeout_s + START_GRACE_S,
        )


class TrainerGpus(Protocol):
    """The trainer whose GPUs a colocated engine shares."""

    @property
    def gpus(self) -> Sequence[Sequence[str]]:
        """Ids of each rank's GPUs."""
        ...


class NoTrainer:
    """Stands for the trainer of a run that trains nothing."""

    gpus: Sequence[Sequence[str]] = ()


class InitialWeights:
    """Every engine that has started holds the version that is served: the initial one."""

    async def bring_up_to_date(self, engine: EngineAddress, admit: Callable[[], None]) -> str | None:
        """Admit the engine."""
        admit()
        return None


class RayEngine:
    """An ``EngineHandle`` whose server is owned by a Ray actor. A lost actor is replaced."""

    def __init__(
        self,
        name: str,
        create: Callable[[], EngineServerActor],
        limits: EngineLimits,
        devices: Devices,
    ) -> None:
        """``create``: makes an actor for the engine. ``devices`` say when a server may start."""
        self.name = name
        self._create = create
        self._limits = limits
        self._devices = devices
        self._actor: EngineServerActor | None = None

    async def start(self) -> EngineAddress:
        async with self._devices.starting():
            if self._actor is None:
                self._actor = self._create()
            try:
                access = await self._start(self._actor)
            except ray.exceptions.RayActorError:
                self._actor = self._create()
                access = await self._start(self._actor)
        limits = self._limits
        return EngineAddress(
            self.name,
            access.url,
            ranks=limits.ranks,
            vocab_size=limits.vocab_size,
            max_length=limits.max_length,
            timeout_s=limits.request_timeout_s,
            answer_timeout_s=limits.answer_timeout_s,
            stream_interval=limits.stream_interval,
            key=access.key,
        )

    async def wait_exit(self) -> int:
        if self._actor is None:
            raise RuntimeError(f"{self.name} was never started")
        try:
            return await self._actor.wait_exit.remote()
        except ray.exceptions.RayActorError:
            return -1

    async def stop(self) -> None:
        if self._actor is None:
            return
        try:
            await within(STOP_TIMEOUT_S, f"stopping {self.name}", self._actor.stop.remote())
        finally:
            kill(self._actor)

    async def _start(self, actor: EngineServerActor) -> ServerAccess:
        started = actor.start.remote(INITIAL_VERSION)
        return await within(self._limits.start_timeout_s, f"starting {self.name}", started)


def policy_engines(
    config: RunConfig, actors: EngineActors, limits: EngineLimits, trainer: TrainerGpus, devices: Devices
) -> list[RayEngine]:
    """Return the handles of the policy's engines. ``trainer``: its GPUs are also a colocated engine's."""
    return [
        RayEngine(
            actors.name(number), lambda number=number: actors.create(number, trainer.gpus), limits, devices
        )
        for number in range(config.rollout.engine.count)
    ]
