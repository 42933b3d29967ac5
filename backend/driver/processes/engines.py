"""The engines of a run as the supervisor sees them: one handle each, a Ray actor on each of its nodes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream.backend.cluster.actors import EngineActors
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.handles import EngineActorHandle, kill
from slipstream.backend.cluster.placement import Node, Placement
from slipstream.backend.cluster.waits import within
from slipstream.backend.driver.processes.devices import Devices
from slipstream.backend.driver.processes.places import EnginePlaces
from slipstream.bridge.model.geometry import Geometry
from slipstream.configs.schema import EngineConfig
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.context import served_length
from slipstream.rollout.engine.server_process import COMPILATION_S, ServerAccess

T = TypeVar("T")

STOP_TIMEOUT_S = 15.0
STACKS_S = 20.0
"""Longest wait for the stacks of an engine that is given up."""

START_GRACE_S = COMPILATION_S + 60.0
"""Seconds that an actor's start may take beyond its server's time-out, which the server keeps itself
unless it compiles kernels."""

LOST_ACTOR = -1
"""Exit code of a server whose actor was lost."""

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
    adapter: str | None = None
    """Name of the adapter that requests ask for; None: they use the weights as they are."""

    @staticmethod
    def of(
        engine: EngineConfig, geometry: Geometry, step_timeout_s: float, *, adapter: str | None = None
    ) -> "EngineLimits":
        """``step_timeout_s``: longest time of a training step."""
        # A request stands still while a trainer on the same GPUs takes its turn.
        turn_s = step_timeout_s if engine.takes_turns else 0.0
        return EngineLimits(
            ranks=engine.ranks,
            vocab_size=geometry.vocab,
            max_length=served_length(geometry.max_positions, engine.args),
            request_timeout_s=engine.request_timeout_s + turn_s,
            answer_timeout_s=engine.answer_timeout_s,
            stream_interval=engine.stream_interval,
            start_timeout_s=engine.start_timeout_s + START_GRACE_S,
            adapter=adapter,
        )

    def address(self, name: str, access: ServerAccess) -> EngineAddress:
        """Return the address of a server with these limits."""
        return EngineAddress(
            name,
            access.url,
            ranks=self.ranks,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            timeout_s=self.request_timeout_s,
            answer_timeout_s=self.answer_timeout_s,
            stream_interval=self.stream_interval,
            key=access.key,
            adapter=self.adapter,
        )


class InitialWeights:
    """Every engine that has started holds the version that is served: the initial one."""

    async def bring_up_to_date(self, engine: EngineAddress, admit: Callable[[], None]) -> str | None:
        """Admit the engine."""
        admit()
        return None


class RayEngine:
    """An ``EngineHandle`` with a Ray actor on each of the engine's nodes, which owns the server of that node.

    The servers start and end together: when one of them ends, or its actor is lost, the others are ended, and
    the next start is that of a whole engine. When an actor is lost, the next start makes new ones. When a
    node is lost, the next start is on other nodes.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[int, Node], EngineActorHandle],
        limits: EngineLimits,
        devices: Devices,
        places: EnginePlaces,
        *,
        nodes: int = 1,
        gpus: int = 0,
        meets: bool = False,
        moves: bool = True,
        beyond: bool = False,
    ) -> None:
        """``create``: makes the actor of a node, by its number. ``devices`` say when the servers may start.

        ``nodes``: of the engine. ``gpus``: of its own on each of them. ``meets``: the ranks need a meeting
        point on the first node. ``moves``: it can be placed on any node. ``beyond``: as in
        ``EnginePlaces.take``.
        """
        self.name = name
        self._create = create
        self._limits = limits
        self._devices = devices
        self._places = places
        self._nodes = nodes
        self._gpus = gpus
        self._meets = meets
        self._moves = moves
        self._beyond = beyond
        self._actors: list[EngineActorHandle] = []

    async def placed(self) -> str:
        if not self._places.has(self.name):
            if not self._moves:
                await asyncio.get_running_loop().create_future()  # for ever
            await self._places.take(self.name, spread=self._nodes, gpus=self._gpus, beyond=self._beyond)
        return ", ".join(node.address for node in self._places.nodes_of(self.name))

    def give_up_place(self, *, unfit: bool) -> None:
        if self._nodes > 1:
            self._end_servers()
        self._kill()
        self._places.give_up(self.name, unfit=unfit)

    async def start(self) -> EngineAddress:
        async with self._devices.starting():
            try:
                access = await self._start()
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
                access = await self._start_anew()
        return self._limits.address(self.name, access)

    async def wait_exit(self) -> int:
        """Wait until the server of any node has ended. The other servers are ended then. Raises NodeLost."""
        if not self._actors:
            raise RuntimeError(f"{self.name} was never started")
        exits = [asyncio.ensure_future(_exit_of(actor)) for actor in self._actors]
        try:
            done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in exits:
                each.cancel()
        if self._nodes > 1:
            self._end_servers()
        code = next(each for each in exits if each in done).result()
        if code == LOST_ACTOR:
            self._places.check(self.name)
        return code

    async def stands(self) -> str:
        nodes = self._places.nodes_of(self.name)
        asked = [asyncio.ensure_future(actor.write_stacks.remote()) for actor in self._actors]
        said, files = [], []
        if asked:
            await asyncio.wait(asked, timeout=STACKS_S)
        for node, answer in zip(nodes, asked, strict=False):
            if answer.cancel() or answer.exception() is not None:
                said.append(f"its actor on {node.address} does not answer")
                continue
            file, silent = answer.result()
            files.append(file)
            said += [f"{each} on {node.address}" for each in silent]
        return "".join(f"; {each}" for each in said) + (
            f" (stacks of its processes: {', '.join(files)})" if files else ""
        )

    async def stop(self) -> None:
        if not self._actors:
            return
        stopping = [actor.stop.remote() for actor in self._actors]
        try:
            await within(STOP_TIMEOUT_S, f"stopping {self.name}", asyncio.gather(*stopping))
        finally:
            self._kill()

    async def _start(self) -> ServerAccess:
        if not self._actors:
            nodes = self._places.nodes_of(self.name)
            self._actors = [self._create(number, node) for number, node in enumerate(nodes)]
        meeting = None
        if self._meets:
            meeting = await self._within("a meeting point of", self._actors[0].meeting_point.remote())
        starting = [actor.start.remote(INITIAL_VERSION, meeting) for actor in self._actors]
        try:
            # The first error counts: those of the other servers follow from it.
            first, *_ = await self._within("starting", asyncio.gather(*starting))
        except BaseException:
            if self._nodes > 1:
                self._end_servers()
            raise
        return first

    async def _start_anew(self) -> ServerAccess:
        """Start with new actors. Raises NodeLost."""
        self._kill()
        self._places.check(self.name)
        try:
            return await self._start()
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
            self._kill()
            self._places.check(self.name)  # Ray may have found out meanwhile
            raise

    async def _within(self, what: str, work: Awaitable[T]) -> T:
        return await within(self._limits.start_timeout_s, f"{what} {self.name}", work)

    def _end_servers(self) -> None:
        """End every server without waiting for any: an actor may be gone, or its node."""
        for actor in self._actors:
            actor.stop.remote()

    def _kill(self) -> None:
        for actor in self._actors:
            kill(actor)
        self._actors = []


async def _exit_of(actor: EngineActorHandle) -> int:
    try:
        return await actor.wait_exit.remote()
    except ray.exceptions.RayActorError:
        return LOST_ACTOR


def policy_engines(
    engine: EngineConfig,
    actors: EngineActors,
    limits: EngineLimits,
    devices: Devices,
    placement: Placement,
    places: EnginePlaces,
    *,
    trainer_gpus: Callable[[], Sequence[Sequence[str]]],
    left: Callable[[], Sequence[tuple[int, int]]] = tuple,
) -> list[RayEngine]:
    """Return the handles of the policy's engines, of which ``placement`` has the first ones.

    ``trainer_gpus`` returns the ids of each rank's GPUs, which a colocated engine shares, and ``left`` what
    the trainer leaves of their memory.
    """
    gpus = engine.ranks_per_node if placement.device == "cuda" and not engine.colocated else 0

    def handle(number: int) -> RayEngine:
        return RayEngine(
            actors.name(number),
            lambda node, on: actors.create(number, node, on, trainer_gpus(), left()),
            limits,
            devices,
            places,
            nodes=engine.nodes,
            gpus=gpus,
            meets=engine.nodes > 1 or engine.data_parallel > 1,
            moves=not engine.colocated,
            beyond=number >= engine.count,
        )

    for number, nodes in enumerate(placement.engines):
        places.begin(actors.name(number), nodes, gpus)
    return [handle(number) for number in range(engine.most)]
