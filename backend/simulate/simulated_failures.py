"""What fails in a simulated run, and what becomes of it: supervisor, places and checkpoints of a real one.

engine dies ──► restarted ──► brought up to date ──► serves
node with engines lost ──► elastic: room on any node │ fixed: the same node, repaired ──► restarted ...
trainer rank dies ──► Revival: newest checkpoint, Rewind, copy published      engines go on meanwhile
node of the trainer lost ──► as above, on a spare node or on one whose engines give way
first node lost, or no room ──► the job starts again: as above, and every engine is restarted
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from numpy.random import Generator

from slipstream.backend.driver.ports import CheckpointRecord, FoundCheckpoint, RunPosition
from slipstream.backend.driver.processes.places import (
    Held,
    Node,
    Placement,
    PlacementError,
    place_again,
    trainer_again,
)
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.simulate.gpu_split import GpuSplit, model_of
from slipstream.backend.simulate.simulated_engine import Engine
from slipstream.backend.simulate.simulated_ledger import SimulatedLedger
from slipstream.backend.simulate.simulated_pool import SimulatedPool
from slipstream.backend.simulate.simulated_trainer import SimulatedTrainer
from slipstream.backend.simulate.workload import FAILING, Workload
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import ClusterLayout, FailureModel
from slipstream.rollout.system.changes import Changes

GPUS_PER_NODE = 8
"""GPUs of a node where the layout does not say so."""

ENGINE, ENGINE_NODE, TRAINER, TRAINER_NODE, FIRST_NODE = FAILING


class Failures:
    """Stands for the supervisor of the engines, and makes them, their nodes and the trainer fail."""

    def __init__(
        self,
        config: RunConfig,
        split: GpuSplit,
        pool: SimulatedPool,
        trainer: SimulatedTrainer,
        weights: ServedWeights[Engine],
        workload: Workload,
    ) -> None:
        self._model: FailureModel = model_of(config).failures
        self._pool = pool
        self._trainer = trainer
        self._weights = weights
        self._workload = workload
        self._nodes = _Nodes(config, split, self._model)
        self.counts = Counter[str]()
        """Failures by kind. One of a part that was down already changes nothing, and is not counted."""

    async def run(self) -> None:
        """Make parts fail until this task is cancelled."""
        model = self._model
        async with asyncio.TaskGroup() as tasks:
            if model.engine_mean_time_s is not None:
                for engine in self._pool.engines:
                    tasks.create_task(self._engine(engine, model.engine_mean_time_s))
            if model.node_mean_time_s is not None:
                for number in range(len(self._nodes.of_engines)):
                    tasks.create_task(self._engine_node(number, model.node_mean_time_s, tasks))
                mean_s = model.node_mean_time_s
                tasks.create_task(self._trainer_fails(FIRST_NODE, mean_s, model.job_restart_s, tasks))
                if others := self._nodes.of_trainer - 1:
                    mean_s, back_s = mean_s / others, model.trainer_node_restart_s
                    tasks.create_task(self._trainer_fails(TRAINER_NODE, mean_s, back_s, tasks))
            if model.trainer_mean_time_s is not None:
                mean_s, back_s = model.trainer_mean_time_s, model.trainer_restart_s
                tasks.create_task(self._trainer_fails(TRAINER, mean_s, back_s, tasks))

    async def _engine(self, engine: Engine, mean_time_s: float) -> None:
        random = self._workload.failures(ENGINE, engine.index)
        while True:
            await asyncio.sleep(random.exponential(mean_time_s))
            if self._pool.serves(engine):
                self.counts[ENGINE] += 1
                self._pool.remove(engine)
                await self._return(engine)

    async def _engine_node(self, number: int, mean_time_s: float, tasks: asyncio.TaskGroup) -> None:
        random, node = self._workload.failures(ENGINE_NODE, number), self._nodes.of_engines[number]
        while True:
            await asyncio.sleep(random.exponential(mean_time_s))
            if not self._nodes.has_engines(node):
                continue  # the trainer has it, whose nodes fail by themselves
            self.counts[ENGINE_NODE] += 1
            lost = self._nodes.lose(node)
            for engine in map(self._pool.engines.__getitem__, lost):
                if self._pool.serves(engine):
                    self._pool.remove(engine)
                    tasks.create_task(self._replace(engine, node))
                else:  # it is on its way, and is taken to have come up elsewhere
                    self._nodes.hold(engine.index, node)
            await asyncio.sleep(self._model.node_repair_s)
            self._nodes.repaired(node)

    async def _replace(self, engine: Engine, node: Node) -> None:
        await self._nodes.take(engine.index, node)
        await self._return(engine)

    async def _trainer_fails(
        self, kind: str, mean_time_s: float, back_s: float, tasks: asyncio.TaskGroup
    ) -> None:
        random = self._workload.failures(kind, 0)
        while True:
            await asyncio.sleep(random.exponential(mean_time_s))
            if not self._trainer.is_alive:
                continue
            self.counts[kind] += 1
            after_s, ends_job = back_s, kind == FIRST_NODE
            if kind == TRAINER_NODE and not self._moves(random, tasks):
                after_s, ends_job = self._model.job_restart_s, True
            self._trainer.fail(f"{kind} at second {asyncio.get_running_loop().time():.0f}", after_s)
            if ends_job:
                for engine in list(self._pool.clients):
                    self._pool.remove(engine)
                    tasks.create_task(self._return(engine, after_s))

    def _moves(self, random: Generator, tasks: asyncio.TaskGroup) -> bool:
        """One of the trainer's nodes is gone, not the first. Return False if its ranks have no other."""
        try:
            lost, leaving = self._nodes.lose_of_trainer(random, len(self._pool.clients) - 1)
        except PlacementError:
            return False
        for engine, node in leaving:
            if self._pool.serves(self._pool.engines[engine]):
                self._pool.remove(self._pool.engines[engine])
                tasks.create_task(self._replace(self._pool.engines[engine], node))
            else:  # as above
                self._nodes.hold(engine, node)
        tasks.create_task(self._repair(lost))
        return True

    async def _repair(self, node: Node) -> None:
        await asyncio.sleep(self._model.node_repair_s)
        self._nodes.repaired(node)

    async def _return(self, engine: Engine, after_s: float | None = None) -> None:
        await asyncio.sleep(self._model.engine_restart_s if after_s is None else after_s)
        engine.restart()
        admit = partial(self._pool.add, engine)
        if reason := await self._weights.bring_up_to_date(engine.address, admit):
            raise AssertionError(f"a simulated publication cannot fail: {reason}")


class _Nodes:
    """The nodes of the cluster: which engine is where, and where one goes whose node is lost."""

    def __init__(self, config: RunConfig, split: GpuSplit, model: FailureModel) -> None:
        layout = model_of(config).layout
        per_node = layout.gpus_per_node if isinstance(layout, ClusterLayout) else GPUS_PER_NODE
        self._gpus = split.gpus_per_engine
        self._is_elastic = model.engine_placement == "elastic"
        engines_on_node = max(per_node // self._gpus, 1)
        engine_nodes = -(-split.engines // engines_on_node)
        self.of_trainer = -(-split.trainer_gpus // per_node)
        room = max(per_node, self._gpus)
        self.of_engines = [
            Node(f"node-{n}", f"node-{n}", room) for n in range(engine_nodes + model.spare_nodes)
        ]
        self._alive = dict.fromkeys(self.of_engines)
        self._held = {
            engine: Held((self.of_engines[engine // engines_on_node],), self._gpus)
            for engine in range(split.engines)
        }
        self._losses = Counter[str]()
        trainers = [Node(f"trainer-{n}", f"trainer-{n}", per_node) for n in range(self.of_trainer)]
        ranks = tuple(node for node in trainers for _ in range(per_node))[: split.trainer_gpus]
        own = frozenset(node.id for node in trainers)
        self._placement = Placement(ranks, (), "cuda", trainers_own=own)
        self._changes = Changes()

    def has_engines(self, node: Node) -> bool:
        """True if a node is there for engines: the trainer does not have it, and it has not failed."""
        return node in self._alive and node.id not in self._placement.trainers_own

    def lose_of_trainer(self, random: Generator, most: int) -> tuple[Node, list[tuple[int, Node]]]:
        """One of the trainer's nodes but the first is gone. Return it, and the engines that give way to its
        ranks, ``most`` of them, with their nodes. Raises PlacementError.
        """
        first, *others = dict.fromkeys(self._placement.trainer)
        lost = others[random.integers(len(others))]
        held = {str(engine): each for engine, each in self._held.items()}
        there = [node for node in (*self._alive, first, *others) if node != lost]
        self._placement, leaving = trainer_again(
            there, self._placement, held, self._losses, movable=held, most=most
        )
        self._alive.pop(lost, None)
        return lost, [(int(engine), self._held.pop(int(engine)).nodes[0]) for engine in leaving]

    def lose(self, node: Node) -> list[int]:
        """The node is gone. Return the engines that were on it."""
        del self._alive[node]
        lost = [engine for engine, held in self._held.items() if held.nodes[0] == node]
        for engine in lost:
            del self._held[engine]
        self._losses[node.address] += len(lost)
        return lost

    def hold(self, engine: int, node: Node) -> None:
        """Put an engine on a node."""
        self._held[engine] = Held((node,), self._gpus)

    def repaired(self, node: Node) -> None:
        """The node is there again."""
        self._alive[node] = None
        self._changes.notify()

    async def take(self, engine: int, before: Node) -> None:
        """Wait until there is room for an engine that was on node ``before``, and take it."""
        find: Callable[[], tuple[Node, ...] | None] = self._room
        if not self._is_elastic:
            find = lambda: self._back_on(before)  # noqa: E731
        self.hold(engine, (await self._changes.first(find))[0])

    def _back_on(self, node: Node) -> tuple[Node, ...] | None:
        if node.id in self._placement.trainers_own:
            return self._room()
        return (node,) if node in self._alive else None

    def _room(self) -> tuple[Node, ...] | None:
        return place_again(
            list(self._alive), self._placement, self._held.values(), self._losses, spread=1, gpus=self._gpus
        )


class SimulatedCheckpoints:
    """Checkpoints of a simulated trainer: when each falls due, and from when on it can be restored."""

    def __init__(self, config: RunConfig, ledger: SimulatedLedger) -> None:
        self._every = config.checkpoint.every
        self._model = model_of(config).trainer
        self._ledger = ledger
        self._last_step = 0
        self._writing: tuple[float, FoundCheckpoint] | None = None
        """When it can be restored, and the checkpoint."""
        self._newest: FoundCheckpoint | None = None

    async def step_done(self, run: RunPosition) -> None:
        self._commit()
        if not self._every or self._writing is not None or run.step - self._last_step < self._every:
            return
        self._last_step = run.step
        await asyncio.sleep(self._model.checkpoint_stall_s)
        record = CheckpointRecord(run.version, run.step, 0, run.position, {})
        written = asyncio.get_running_loop().time() + self._model.checkpoint_write_s
        self._writing = (written, FoundCheckpoint(Path(str(run.step)), record, ()))

    async def settled(self) -> None:
        """Give up the checkpoint that is being written: its ranks are gone."""
        self._commit()
        self._writing = None

    async def newest(self, is_behind: Callable[[int], bool]) -> FoundCheckpoint | None:
        assert self._newest is None or is_behind(self._newest.record.version)
        return self._newest

    def on_nodes(self) -> Mapping[int, str]:
        return {}

    def forget_on_nodes(self) -> None: ...

    def restored(self, step: int) -> None:
        self._last_step = step

    def _commit(self) -> None:
        if self._writing is not None and self._writing[0] <= asyncio.get_running_loop().time():
            self._newest, self._writing = self._writing[1], None
            self._ledger.release(self._newest.record.version)
