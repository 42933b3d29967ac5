"""Which engine is on which nodes of the Ray cluster, and where one goes whose node is lost.

    node lost ──► given up ──► waits for room on any node ──► taken ──► the engine starts there
    node of the trainer lost ──► a node with room, or one on which engines give way ──► the ranks start there

Room is what trainer and engines leave of the nodes that Ray has: spare ones, those that return, those that
are added. Ray tells nobody of a new node, so it is asked every few seconds while an engine waits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from slipstream.backend.cluster.actors import check_nodes
from slipstream.backend.cluster.placement import (
    Held,
    Node,
    Placement,
    PlacementError,
    place_again,
    trainer_again,
)
from slipstream.backend.cluster.ray_cluster import alive_nodes
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.rollout.engine.supervisor import Supervisor

LOOK_S = 5.0
"""Seconds between two questions for nodes."""


class EnginePlaces:
    """The nodes of all engines of a run. Single event loop."""

    def __init__(self, placement: Placement, alive: Callable[[], Sequence[Node]] = alive_nodes) -> None:
        """``alive``: returns the nodes that there are, and may take a while."""
        self._placement = placement
        self._alive = alive
        self._held: dict[str, Held] = {}
        self._losses = Counter[str]()
        """Number of engines that were lost on a node, by its address."""
        self._unfit: set[str] = set()
        """Ids of nodes on which an engine did not start."""
        self._looking = asyncio.Lock()
        self._nodes: Sequence[Node] = ()
        self._looked: float | None = None
        """When Ray was asked last; None: its answer is out of date."""

    def begin(self, engine: str, nodes: tuple[Node, ...], gpus: int) -> None:
        """Note where an engine is placed at the start of the run."""
        self._held[engine] = Held(nodes, gpus)

    @property
    def placement(self) -> Placement:
        """The placement of the run, with the nodes that the trainer has now."""
        return self._placement

    def nodes_of(self, engine: str) -> tuple[Node, ...]:
        """Return the nodes that an engine has."""
        return self._held[engine].nodes

    def has(self, engine: str) -> bool:
        """True if an engine has nodes."""
        return engine in self._held

    def check(self, engine: str) -> None:
        """Raise NodeLost if an engine has lost one of its nodes."""
        check_nodes(self.nodes_of(engine))

    def give_up(self, engine: str, *, unfit: bool) -> None:
        """Take an engine off its nodes. ``unfit``: it does not start there, so that no other one is tried."""
        held, self._looked = self._held.pop(engine), None
        self._losses.update(node.address for node in held.nodes)
        if unfit:
            self._unfit.update(node.id for node in held.nodes)

    async def take(self, engine: str, *, spread: int, gpus: int, beyond: bool) -> None:
        """Wait until there is room for an engine, and take it. Arguments as of ``place_again``.

        ``beyond``: the run has not begun with this engine. Without GPUs it then needs nodes without engines,
        because a process more would find room on any node.
        """
        while True:
            nodes = await self._look()
            if (room := self._room(nodes, spread, gpus, alone=beyond and not gpus)) is not None:
                self._held[engine] = Held(room, gpus)  # no other engine has looked in between
                return
            await asyncio.sleep(LOOK_S)

    async def keep_trainer(self, engines: Supervisor) -> None:
        """Give the trainer other nodes in place of lost ones; ``engines`` give way where they have to.

        Ranks that share their GPUs with engines stay where those are. Raises TrainerFailed if there is no
        room.
        """
        if self._placement.shared:
            return
        self._looked = None
        nodes = await self._look()
        try:
            self._placement, leaving = trainer_again(
                nodes,
                self._placement,
                self._held,
                self._losses,
                movable=engines.where().keys(),
                most=engines.to_spare,
            )
        except PlacementError as error:
            raise TrainerFailed(str(error)) from error
        await engines.give_way(leaving, "it gives way to the trainer, which has lost a node")

    async def _look(self) -> Sequence[Node]:
        """Return the nodes that there are, as Ray has said within the last ``LOOK_S``."""
        clock = asyncio.get_running_loop().time
        async with self._looking:
            if self._looked is None or clock() - self._looked >= LOOK_S:
                self._looked = clock()
                self._nodes = await asyncio.to_thread(self._alive)
            return self._nodes

    def _room(self, nodes: Sequence[Node], spread: int, gpus: int, *, alone: bool) -> tuple[Node, ...] | None:
        held = list(self._held.values())
        apart = [node for each in held for node in each.nodes] if alone else []
        apart += [node for node in nodes if node.id in self._unfit]
        return place_again(nodes, self._placement, held, self._losses, spread=spread, gpus=gpus, apart=apart)
