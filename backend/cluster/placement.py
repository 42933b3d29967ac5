"""Places each trainer rank and each engine on a node. Pure: facts about nodes in, a placement out."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from slipstream.configs.schema import RunConfig
from slipstream.configs.schema.judge import own_engines


class PlacementError(ValueError):
    """The cluster is too small for the recipe; the message says what is needed and what there is."""


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster."""

    id: str
    address: str
    gpus: int


@dataclass(frozen=True)
class Placement:
    """The node of every trainer rank, engine and collector, and the device they compute on."""

    trainer: tuple[Node, ...]
    engines: tuple[Node, ...]
    device: str
    """``cuda`` or ``cpu``."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Trainer ranks whose GPUs each engine shares, by engine (``rollout.engine.colocated``)."""
    collectors: tuple[Node, ...] = ()
    judge: tuple[Node, ...] = ()
    """Nodes of the judge's own engines."""


def place(nodes: Sequence[Node], config: RunConfig, *, trains: bool = True) -> Placement:
    """Place trainer ranks on the first nodes and engines on the nodes after them; a single node is shared.

    A rank takes one GPU, an engine as many as its tensor-parallel size, on one node. Colocated engines share
    the GPUs of consecutive trainer ranks. The judge's own engines take GPUs that are left. CPUs are not
    counted. Without ``trains`` there are no ranks, and engines are on all nodes. Raises PlacementError.
    """
    nodes = sorted(nodes, key=_by_address)
    device = _device(nodes, config)
    if config.rollout.engine.colocated:
        return _colocated(nodes, config, device)
    if config.cluster.type == "slurm" and trains:
        first = config.cluster.trainer_nodes or 1
        if len(nodes) <= first:
            raise PlacementError(
                f"the job has {len(nodes)} nodes: cluster.trainer_nodes={first} leaves none for the engines; "
                "ask sbatch for more nodes"
            )
        trainer_nodes, engine_nodes = nodes[:first], nodes[first:]
    else:
        trainer_nodes = engine_nodes = list(nodes)
    free = {node.id: node.gpus for node in nodes}
    trainer = _ranks(trainer_nodes, free, config, device) if trains else ()
    engines, size = config.rollout.engine.count, config.rollout.engine.tensor_parallel
    if device == "cpu":
        on_nodes = tuple(engine_nodes[engine % len(engine_nodes)] for engine in range(engines))
    else:
        on_nodes = _take(engine_nodes, free, engines, size, "engines (rollout.engine)")
    judge = _judge(engine_nodes, free, config, device)
    return Placement(trainer, on_nodes, device, collectors=_collectors(nodes, config), judge=judge)


def place_engines(nodes: Sequence[Node], config: RunConfig) -> Placement:
    """Place engines alone, on all nodes. Raises PlacementError."""
    nodes = sorted(nodes, key=_by_address)
    device, count = _device(nodes, config), config.rollout.engine.count
    if device == "cpu":
        return Placement((), tuple(nodes[engine % len(nodes)] for engine in range(count)), device)
    free = {node.id: node.gpus for node in nodes}
    size = config.rollout.engine.tensor_parallel
    return Placement((), _take(nodes, free, count, size, "engines (rollout.engine)"), device)


def _collectors(nodes: Sequence[Node], config: RunConfig) -> tuple[Node, ...]:
    """Place collectors on all nodes in turn. They need no GPU. Without prompts there are none."""
    if not config.has_prompts and config.eval is None:
        return ()
    count = config.rollout.collectors or len(nodes)
    return tuple(nodes[number % len(nodes)] for number in range(count))


def _judge(nodes: Sequence[Node], free: dict[str, int], config: RunConfig, device: str) -> tuple[Node, ...]:
    """Place the judge's own engines on what trainer and engines leave ``free``."""
    judge = own_engines(config.judge)
    if judge is None:
        return ()
    if device == "cpu":
        return tuple(nodes[engine % len(nodes)] for engine in range(judge.count))
    return _take(nodes, free, judge.count, judge.tensor_parallel, "engines of the judge (judge.endpoint)")


def _colocated(nodes: Sequence[Node], config: RunConfig, device: str) -> Placement:
    free = {node.id: node.gpus for node in nodes}
    trainer = _ranks(nodes, free, config, device)
    count, size = config.rollout.engine.count, config.rollout.engine.tensor_parallel
    if device == "cpu":
        shared: list[tuple[int, ...]] = []
        engines = [trainer[engine % len(trainer)] for engine in range(count)]
    else:
        by_node = {node: [rank for rank, host in enumerate(trainer) if host == node] for node in nodes}
        shared = [
            tuple(ranks[first : first + size])
            for ranks in by_node.values()
            for first in range(0, len(ranks) - size + 1, size)
        ][:count]
        if len(shared) < count:
            by_address = ", ".join(f"{node.address}: {len(ranks)}" for node, ranks in by_node.items())
            raise PlacementError(
                f"{count} engines (rollout.engine) need the GPUs of {size} trainer ranks each, on one node; "
                f"there is room for {len(shared)} (trainer ranks by node: {by_address})"
            )
        engines = [trainer[ranks[0]] for ranks in shared]
    if config.weights.transport.type == "tensor" and set(engines) != {trainer[0]}:
        raise PlacementError(
            f"weights.transport.type is tensor, but not all engines are on {trainer[0].address}, the node of "
            "the trainer's first rank, whose memory they would share: use disk or delta"
        )
    judge = _judge(nodes, free, config, device)
    return Placement(trainer, tuple(engines), device, tuple(shared), _collectors(nodes, config), judge)


def place_trainer(nodes: Sequence[Node], config: RunConfig) -> Placement:
    """Place trainer ranks alone, on all nodes. Raises PlacementError."""
    nodes = sorted(nodes, key=_by_address)
    device = _device(nodes, config)
    return Placement(_ranks(nodes, {node.id: node.gpus for node in nodes}, config, device), (), device)


def _ranks(nodes: Sequence[Node], free: dict[str, int], config: RunConfig, device: str) -> tuple[Node, ...]:
    ranks = config.actor.parallel.world_size
    if device == "cpu":
        per_node = -(-ranks // len(nodes))
        return tuple(nodes[rank // per_node] for rank in range(ranks))
    return _take(nodes, free, ranks, 1, "trainer ranks (actor.parallel)")


def _by_address(node: Node) -> tuple[int, int, str]:
    """Return a key that orders IP addresses by number, and host names after them."""
    try:
        address = ip_address(node.address)
    except ValueError:
        return (99, 0, node.address)
    return (address.version, int(address), "")


def _device(nodes: Sequence[Node], config: RunConfig) -> str:
    device = config.cluster.device
    if device == "auto":
        return "cuda" if any(node.gpus for node in nodes) else "cpu"
    if device == "gpu" and not any(node.gpus for node in nodes):
        raise PlacementError("cluster.device is gpu, but no node of the cluster has one")
    return "cuda" if device == "gpu" else "cpu"


def _take(nodes: Sequence[Node], free: dict[str, int], count: int, gpus: int, what: str) -> tuple[Node, ...]:
    free_gpus = ", ".join(f"{node.address}: {free[node.id]}" for node in nodes)
    taken: list[Node] = []
    for node in nodes:
        while len(taken) < count and free[node.id] >= gpus:
            free[node.id] -= gpus
            taken.append(node)
    if len(taken) < count:
        raise PlacementError(
            f"{count} {what} need {gpus} GPUs each; there is room for {len(taken)} "
            f"(free GPUs by node: {free_gpus})"
        )
    return tuple(taken)
