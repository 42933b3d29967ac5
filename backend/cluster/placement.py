"""Places each trainer rank and each engine on a node. Pure: facts about nodes in, a placement out."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    engines: tuple[tuple[Node, ...], ...]
    """Nodes of each engine, in the order of its ranks."""
    device: str
    """``cuda`` or ``cpu``."""
    shared: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Trainer ranks whose GPUs each engine shares, by engine and node (``rollout.engine.colocated``)."""
    collectors: tuple[Node, ...] = ()
    judge: tuple[Node, ...] = ()
    """Nodes of the judge's own engines."""
    trainers_own: frozenset[str] = frozenset()
    """Ids of the nodes that have no engines (``cluster.trainer_nodes``)."""


@dataclass(frozen=True)
class Held:
    """What one engine has of the cluster."""

    nodes: tuple[Node, ...]
    """In the order of its ranks."""
    gpus: int
    """On each of the nodes; 0 without GPUs, and where the GPUs are the trainer's."""


def actor_count(config: RunConfig) -> int:
    """Return the largest number of trainer ranks and engines, those of the judge included."""
    judge = own_engines(config.judge)
    return config.actor.parallel.world_size + config.rollout.engine.most + (judge.count if judge else 0)


def place(nodes: Sequence[Node], config: RunConfig, *, trains: bool = True) -> Placement:
    """Place trainer ranks on the first nodes and engines on the nodes after them. A single node is shared,
    unless the recipe has ``cluster.trainer_nodes``.

    A rank takes one GPU, an engine as many as it has ranks: equally many on each of ``rollout.engine.nodes``
    nodes. Colocated engines share the GPUs of consecutive trainer ranks of a node. The judge's own engines
    take GPUs that are left. CPUs are not counted. Without ``trains`` there are no ranks, and engines are on
    all nodes. If nodes are missing, there are fewer engines than ``rollout.engine.count``, down to
    ``min_count``. Raises PlacementError.
    """
    return _with_room(config, lambda fewer: _place(nodes, fewer, trains))


def _with_room(config: RunConfig, place_all: Callable[[RunConfig], Placement]) -> Placement:
    """Return the first placement for which there is room, with fewer and fewer engines."""
    rollout = config.rollout
    for count in range(rollout.engine.count, rollout.engine.fewest - 1, -1):
        engine = rollout.engine.model_copy(update={"count": count})
        fewer = config.model_copy(update={"rollout": rollout.model_copy(update={"engine": engine})})
        try:
            return place_all(fewer)
        except PlacementError:
            if count == rollout.engine.fewest:
                raise
    raise AssertionError("rollout.engine.min_count is above count")


def _place(nodes: Sequence[Node], config: RunConfig, trains: bool) -> Placement:
    nodes = sorted(nodes, key=_by_address)
    device = _device(nodes, config)
    if config.rollout.engine.colocated:
        return _colocated(nodes, config, device)
    own: frozenset[str] = frozenset()
    is_shared = len(nodes) == 1 and (config.cluster.type == "local" or config.cluster.trainer_nodes is None)
    if config.cluster.type != "local" and trains and not is_shared:
        first = config.cluster.trainer_nodes or 1
        if len(nodes) <= first:
            raise PlacementError(
                f"the cluster has {len(nodes)} nodes: cluster.trainer_nodes={first} leaves none for the "
                "engines; use more nodes"
            )
        trainer_nodes, engine_nodes = nodes[:first], nodes[first:]
        own = frozenset(node.id for node in trainer_nodes)
    else:
        trainer_nodes = engine_nodes = list(nodes)
    free = {node.id: node.gpus for node in nodes}
    trainer = _ranks(trainer_nodes, free, config, device) if trains else ()
    engines = _engines(engine_nodes, free, config, device)
    judge = _judge(engine_nodes, free, config, device)
    collectors = _collectors(nodes, config)
    return Placement(trainer, engines, device, collectors=collectors, judge=judge, trainers_own=own)


def place_engines(nodes: Sequence[Node], config: RunConfig) -> Placement:
    """Place engines alone, on all nodes, as ``place`` does. Raises PlacementError."""
    nodes = sorted(nodes, key=_by_address)
    device = _device(nodes, config)
    free = {node.id: node.gpus for node in nodes}
    return _with_room(config, lambda fewer: Placement((), _engines(nodes, dict(free), fewer, device), device))


def _engines(
    nodes: Sequence[Node], free: dict[str, int], config: RunConfig, device: str
) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes of each engine. On GPUs those that it takes are no longer ``free``."""
    engine = config.rollout.engine
    if device == "cuda":
        return _take(
            nodes, free, engine.count, engine.ranks_per_node, "engines (rollout.engine)", spread=engine.nodes
        )
    if len(nodes) < engine.nodes:
        addresses = ", ".join(node.address for node in nodes)
        raise PlacementError(
            f"each engine is spread over {engine.nodes} nodes (rollout.engine.nodes), and engines have "
            f"{len(nodes)} ({addresses}): ask sbatch for more nodes, or use fewer for an engine"
        )
    return tuple(
        tuple(nodes[(number * engine.nodes + part) % len(nodes)] for part in range(engine.nodes))
        for number in range(engine.count)
    )


def place_again(
    nodes: Sequence[Node],
    placement: Placement,
    held: Iterable[Held],
    losses: Mapping[str, int],
    *,
    spread: int,
    gpus: int,
    apart: Iterable[Node] = (),
) -> tuple[Node, ...] | None:
    """Return the nodes of an engine that needs ``gpus`` GPUs on each of ``spread``; None: there is no room.

    ``held``: what all other engines have. ``losses``: number of engines that were lost on a node, by its
    address: such nodes come last. ``apart``: nodes that the engine must not be on. Without GPUs, the nodes
    with the fewest engines come first.
    """
    free = Counter({node.id: node.gpus for node in nodes})
    if placement.device == "cuda":
        free.subtract(node.id for node in placement.trainer)
    engines = Counter[str]()
    for each in held:
        for node in each.nodes:
            free[node.id] -= each.gpus
            engines[node.id] += 1
    without = placement.trainers_own.union(node.id for node in apart)
    with_room = [node for node in nodes if node.id not in without and (not gpus or free[node.id] >= gpus)]

    def rank(node: Node) -> tuple[int, int, tuple[int, int, str]]:
        return losses.get(node.address, 0), 0 if gpus else engines[node.id], _by_address(node)

    chosen = sorted(with_room, key=rank)[:spread]
    return tuple(chosen) if len(chosen) == spread else None


def trainer_again(
    nodes: Sequence[Node],
    placement: Placement,
    held: Mapping[str, Held],
    losses: Mapping[str, int],
    *,
    movable: Collection[str],
    most: int,
) -> tuple[Placement, list[str]]:
    """Return a placement with other nodes in place of those of the trainer that are lost, and the engines
    that must give way to it.

    The ranks of a node stay together. ``nodes``: those that there are. ``held``: what each engine has.
    ``losses``: as in ``place_again``. ``movable``: engines that may give way, ``most`` of them. Nodes with
    free GPUs come first. Raises PlacementError.
    """
    alive = {node.id for node in nodes}
    trainer, own, held, leaving = placement.trainer, placement.trainers_own, dict(held), list[str]()
    for lost in [node for node in dict.fromkeys(trainer) if node.id not in alive]:
        trainers = {node.id for node in trainer}
        gpus = trainer.count(lost) if placement.device == "cuda" else 0
        found = [
            (giving, node)
            for node in nodes
            if node.id not in trainers and (giving := _giving_way(node, held, gpus, movable)) is not None
        ]
        if not found:
            raise PlacementError(
                f"the trainer has lost {lost.address}, and no other node can have {gpus or 'its'} ranks"
            )
        giving, new = min(
            found, key=lambda each: (len(each[0]), losses.get(each[1].address, 0), _by_address(each[1]))
        )
        leaving += giving
        if len(leaving) > most:
            raise PlacementError(
                f"the trainer has lost {lost.address}, and {len(leaving)} engines would have to give way on "
                f"{new.address}: {most} can be spared (rollout.engine.min_count)"
            )
        for engine in giving:
            del held[engine]
        trainer = tuple(new if node.id == lost.id else node for node in trainer)
        own = (own - {lost.id}) | ({new.id} if lost.id in own else set[str]())
    return replace(placement, trainer=trainer, trainers_own=own), leaving


def _giving_way(
    node: Node, held: Mapping[str, Held], gpus: int, movable: Collection[str]
) -> list[str] | None:
    """Return the engines that must leave ``node`` so that ``gpus`` of it are free; None: no room."""
    on_node = {
        engine: each.gpus for engine, each in held.items() if node.id in {other.id for other in each.nodes}
    }
    free, giving = node.gpus - sum(on_node.values()), list[str]()
    for engine, taken in on_node.items():
        if free < gpus and taken and engine in movable:
            giving.append(engine)
            free += taken
    return giving if free >= gpus else None


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
    taken = _take(nodes, free, judge.count, judge.tensor_parallel, "engines of the judge (judge.endpoint)")
    return tuple(node for (node,) in taken)


def _colocated(nodes: Sequence[Node], config: RunConfig, device: str) -> Placement:
    free = {node.id: node.gpus for node in nodes}
    trainer = _ranks(nodes, free, config, device)
    engine = config.rollout.engine
    shared: tuple[tuple[tuple[int, ...], ...], ...] = ()
    if device == "cpu":
        hosts = list(dict.fromkeys(trainer)) if engine.nodes > 1 else trainer
        engines = _engines(hosts, free, config, device)
    else:
        ranks = {node.id: [rank for rank, host in enumerate(trainer) if host == node] for node in nodes}
        left = {node: len(of_node) for node, of_node in ranks.items()}
        what = "engines (rollout.engine) on the trainer's GPUs"
        engines = _take(nodes, left, engine.count, engine.ranks_per_node, what, spread=engine.nodes)
        shared = tuple(
            tuple(tuple(ranks[node.id].pop(0) for _ in range(engine.ranks_per_node)) for node in on_nodes)
            for on_nodes in engines
        )
    if config.weights.transport.type == "tensor" and {n for each in engines for n in each} != {trainer[0]}:
        raise PlacementError(
            f"weights.transport.type is tensor, but not all engines are on {trainer[0].address}, the node of "
            "the trainer's first rank, whose memory they would share: use disk or delta"
        )
    judge = _judge(nodes, free, config, device)
    return Placement(trainer, engines, device, shared, _collectors(nodes, config), judge)


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
    return tuple(node for (node,) in _take(nodes, free, ranks, 1, "trainer ranks (actor.parallel)"))


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


def _take(
    nodes: Sequence[Node], free: dict[str, int], count: int, gpus: int, what: str, *, spread: int = 1
) -> tuple[tuple[Node, ...], ...]:
    """Take ``gpus`` GPUs on each of ``spread`` nodes, ``count`` times, always from the first nodes with room.

    Return the nodes of each. Raises PlacementError.
    """
    free_gpus = ", ".join(f"{node.address}: {free[node.id]}" for node in nodes)
    taken: list[tuple[Node, ...]] = []
    while len(taken) < count:
        with_room = [node for node in nodes if free[node.id] >= gpus][:spread]
        if len(with_room) < spread:
            each = f"{gpus} GPUs each" if spread == 1 else f"{gpus} GPUs on each of {spread} nodes"
            raise PlacementError(
                f"{count} {what} need {each}; there is room for {len(taken)} (free GPUs by node: {free_gpus})"
            )
        for node in with_room:
            free[node.id] -= gpus
        taken.append(tuple(with_room))
    return tuple(taken)
