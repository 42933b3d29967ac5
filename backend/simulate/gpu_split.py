"""Splits the GPUs of the simulated cluster into GPUs that train and GPUs that generate."""

from dataclasses import dataclass
from math import lcm

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.simulate import ClusterLayout, SimulateConfig
from slipstream.configs.violations import Violation


@dataclass(frozen=True)
class GpuSplit:
    """GPUs of the trainer and of the engines."""

    gpus: int
    trainer_gpus: int
    engines: int
    gpus_per_engine: int
    shared: bool = False
    """Trainer and engines take turns on the same GPUs."""

    @property
    def engine_gpus(self) -> int:
        return self.engines * self.gpus_per_engine

    def __str__(self) -> str:
        if self.shared:
            return f"{self.gpus} GPUs: all train and generate in turn"
        return f"{self.gpus} GPUs: {self.trainer_gpus} train, {self.engine_gpus} generate"


def model_of(config: RunConfig) -> SimulateConfig:
    """Return the recipe's cost model, or the default one."""
    return config.simulate or SimulateConfig()


def trainer_unit(config: RunConfig) -> int:
    """Return the fewest GPUs that can hold the trainer's layout: its GPUs are a multiple of them."""
    parallel = config.actor.parallel
    replica = parallel.tensor * parallel.context
    each_expert = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
    experts = parallel.expert * each_expert if parallel.expert > 1 else 1
    return parallel.pipeline * lcm(replica, experts)


def layout_of(config: RunConfig) -> GpuSplit:
    """Return the recipe's split. Its settings must have passed ``layout_violations``."""
    model, engine = model_of(config), config.rollout.engine
    if isinstance(model.layout, ClusterLayout):
        gpus = model.layout.nodes * model.layout.gpus_per_node
        if engine.colocated:
            return GpuSplit(gpus, gpus, gpus // engine.ranks, engine.ranks, shared=True)
        return split(config, gpus, model.layout.trainer_share * gpus)
    trainer = config.actor.parallel.world_size
    if engine.colocated:
        return GpuSplit(trainer, trainer, engine.count, engine.ranks, shared=True)
    engines = engine.count * engine.ranks
    return GpuSplit(trainer + engines, trainer, engine.count, engine.ranks)


def split(config: RunConfig, gpus: int, trainer_gpus: float) -> GpuSplit:
    """Return the split with about ``trainer_gpus`` for training and at least one engine and one replica."""
    unit, per_engine = trainer_unit(config), config.rollout.engine.ranks
    most = (gpus - per_engine) // unit
    replicas = min(max(round(trainer_gpus / unit), 1), most)
    return GpuSplit(gpus, replicas * unit, (gpus - replicas * unit) // per_engine, per_engine)


def time_shared(layout: GpuSplit) -> GpuSplit:
    """Return the split where all GPUs generate, then all train: synchronous RL on a single set of GPUs."""
    engines = layout.gpus // layout.gpus_per_engine
    return GpuSplit(layout.gpus, layout.gpus, engines, layout.gpus_per_engine, shared=True)


def splits(config: RunConfig, gpus: int, most: int = 12) -> list[GpuSplit]:
    """Return about ``most`` feasible splits, evenly spread. Many nodes are split node by node."""
    model = model_of(config)
    unit = trainer_unit(config)
    if isinstance(model.layout, ClusterLayout) and gpus // model.layout.gpus_per_node > 2:
        unit = max(unit, model.layout.gpus_per_node)
    per_engine = config.rollout.engine.ranks
    counts = range(unit, gpus - per_engine + 1, unit)
    chosen = counts[:: -(-len(counts) // most)] if counts else counts
    by_trainer = {layout.trainer_gpus: layout for layout in (split(config, gpus, count) for count in chosen)}
    return [by_trainer[count] for count in sorted(by_trainer)]


def layout_violations(config: RunConfig) -> list[Violation]:
    """Return a violation if the cluster is too small for one engine and one replica of the trainer."""
    layout, engine = model_of(config).layout, config.rollout.engine
    if not isinstance(layout, ClusterLayout):
        return []
    gpus = layout.nodes * layout.gpus_per_node
    parts = (trainer_unit(config), engine.ranks)
    needed = max(parts) if engine.colocated else sum(parts)
    if gpus >= needed:
        return []
    reason = (
        f"{gpus} GPUs cannot hold an engine (the ranks of rollout.engine) beside a replica of the "
        f"trainer (actor.parallel): expected at least {needed}"
    )
    return [Violation("simulate.layout.nodes", layout.nodes, reason)]
