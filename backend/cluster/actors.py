"""Makes the Ray actors of a run: one for each trainer rank, and one for each node of an engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, cast

from slipstream.backend.cluster.collector_actor import CollectorActor
from slipstream.backend.cluster.configured_ray import ray
from slipstream.backend.cluster.engine_spec import engine_spec, judge_engine_spec
from slipstream.backend.cluster.handles import CollectorActorHandle, EngineActorHandle, TrainerActorHandle
from slipstream.backend.cluster.placement import Node, Placement
from slipstream.backend.cluster.trainer_actor import TrainerActor
from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import OwnEngines
from slipstream.rollout.collection.collector.spec import CollectorSpec
from slipstream.rollout.engine.actor import EngineActor
from slipstream.rollout.engine.adapters import AdapterServing
from slipstream.rollout.system.restarts import NodeLost

MOST_STATIC = 0.8
"""Largest part of the free memory for an engine's weights and KV cache. SGLang itself chooses 0.8 to 0.9; the
rest is for its work and CUDA graphs."""

POLICY_RANK = "slipstream.backend.trainer.rank.TrainerRank"
"""Class of the ranks of a reinforcement learning run."""

CALLS_AT_ONCE = 8
"""Calls that an engine's actor runs at once: it awaits its server's end while it starts and stops it."""


class ActorOptions(TypedDict):
    num_cpus: int
    num_gpus: int
    scheduling_strategy: object
    max_restarts: int


def on_node(node: Node, gpus: int) -> ActorOptions:
    """Return the options that place an actor on ``node`` with ``gpus`` GPUs of its own.

    It takes none of the node's CPUs from Ray: where all are taken, Ray would let an actor wait for ever.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    return {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": strategy, "max_restarts": 0}


def check_nodes(nodes: Sequence[Node]) -> None:
    """Raise NodeLost if Ray has found one of the nodes dead. Ray takes some 15 s until it does."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if lost := dict.fromkeys(node.address for node in nodes if node.id not in alive):
        raise NodeLost(f"Ray has lost {', '.join(lost)}")


def create_ranks(
    config: RunConfig, placement: Placement, logs: Path, *, rank_class: str = POLICY_RANK
) -> list[TrainerActorHandle]:
    """Return one actor handle for each trainer rank. ``rank_class``: import path of what the actors hold."""
    gpus = int(placement.device == "cuda")
    remote = ray.remote(TrainerActor)
    actors = [
        remote.options(**on_node(node, gpus)).remote(config, rank, placement.device, str(logs), rank_class)
        for rank, node in enumerate(placement.trainer)
    ]
    return cast(list[TrainerActorHandle], actors)


class CollectorActors:
    """Makes the actor of any collector of a run, as often as it is needed."""

    def __init__(self, placement: Placement, config: RunConfig) -> None:
        self._nodes = placement.collectors
        self._config = config

    @property
    def count(self) -> int:
        """Number of collectors."""
        return len(self._nodes)

    def create(self, number: int) -> CollectorActorHandle:
        """Return the handle of a new actor for collector ``number``."""
        options = on_node(self._nodes[number], gpus=0)
        return cast(CollectorActorHandle, ray.remote(CollectorActor).options(**options).remote())

    def check_node(self, number: int) -> None:
        """Raise NodeLost if collector ``number`` has no node any more."""
        check_nodes([self._nodes[number]])

    async def collect(self, actor: CollectorActorHandle, spec: CollectorSpec) -> None:
        """Run a collector in an actor until its connection ends. Raises Ray's errors."""
        await actor.collect.remote(spec, self._config)


class EngineActors:
    """Makes the actors of any engine of a run, as often as they are needed."""

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        logs: Path,
        model: Path,
        *,
        adapters: AdapterServing | None = None,
    ) -> None:
        """``model``: the HF checkpoint from which the engines start. ``adapters``: what they can load; None:
        they get whole weights, or none.
        """
        self._config = config
        self._placement = placement
        self._logs = logs
        self._model = model
        self._adapters = adapters

    @staticmethod
    def name(number: int) -> str:
        return f"engine-{number}"

    def create(
        self,
        number: int,
        node: int,
        on: Node,
        trainer_gpus: Sequence[Sequence[str]],
        left: Sequence[tuple[int, int]] = (),
    ) -> EngineActorHandle:
        """Return the handle of a new actor for node ``node`` of engine ``number``, which is ``on``.

        ``trainer_gpus``: ids of each trainer rank's GPUs. A colocated engine has those and asks Ray for none.
        ``left``: bytes of each rank's GPU that are free at its peak, and all of them; empty on CPUs.
        """
        config, placement = self._config, self._placement
        engine = config.rollout.engine
        sharing = placement.shared[number][node] if placement.shared else ()
        shared_gpus = [gpu for rank in sharing for gpu in trainer_gpus[rank]]
        spec = engine_spec(config, self._model, placement.device, self._adapters)
        if engine.gpu_share is not None:
            free = [left[rank] for rank in sharing if left]
            fraction = static_fraction(engine.gpu_share, free)
            spec = replace(spec, args={"mem_fraction_static": fraction, **spec.args})
        gpus = engine.ranks_per_node if placement.device == "cuda" and not shared_gpus else 0
        actor = (
            ray.remote(EngineActor)
            .options(**on_node(on, gpus), max_concurrency=CALLS_AT_ONCE)
            .remote(
                replace(
                    spec,
                    node=node,
                    seed=spec.seed + number,
                    shared_gpus=tuple(shared_gpus),
                    rests=bool(shared_gpus) and engine.takes_turns,
                ),
                name=self.name(number),
                run=config.run.name,
                umask=config.run.umask,
                logs=self._logs,
                start_timeout_s=engine.start_timeout_s,
            )
        )
        return cast(EngineActorHandle, actor)


class JudgeEngineActors:
    """Makes the actor of any engine of the judge's own, as often as it is needed."""

    def __init__(self, config: RunConfig, engines: OwnEngines, placement: Placement, logs: Path) -> None:
        self._config = config
        self._engines = engines
        self._placement = placement
        self._logs = logs

    @staticmethod
    def name(number: int) -> str:
        return f"judge-engine-{number}"

    def create(self, number: int, on: Node) -> EngineActorHandle:
        """Return the handle of a new actor for engine ``number``, which is ``on`` a node."""
        config, engines, placement = self._config, self._engines, self._placement
        spec = judge_engine_spec(config, engines, placement.device)
        gpus = engines.tensor_parallel if placement.device == "cuda" else 0
        actor = (
            ray.remote(EngineActor)
            .options(**on_node(on, gpus), max_concurrency=CALLS_AT_ONCE)
            .remote(
                replace(spec, seed=spec.seed + number),
                name=self.name(number),
                run=config.run.name,
                umask=config.run.umask,
                logs=self._logs,
                start_timeout_s=engines.start_timeout_s,
            )
        )
        return cast(EngineActorHandle, actor)


def static_fraction(share: float, left: Sequence[tuple[int, int]]) -> float:
    """Return ``mem_fraction_static`` of engines with a ``share`` of GPUs. ``left``: as in ``create``.

    SGLang takes the fraction of what is free at its start, and the share is of the whole GPU. The fraction is
    never below the share.
    """
    wanted = [min(share * total / free, MOST_STATIC) for free, total in left]
    return max(share, min(wanted, default=share))
