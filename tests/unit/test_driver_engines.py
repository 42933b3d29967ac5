"""An engine over several nodes, seen by the supervisor: its servers start, are watched and end together."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from slipstream.backend.cluster.placement import Node, Placement
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.processes import engines, places
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.processes.engines import EngineLimits, RayEngine
from slipstream.backend.driver.processes.places import EnginePlaces
from slipstream.rollout.engine.server_process import EngineStartError, MeetingPoint, ServerAccess
from slipstream.rollout.system.key import Key
from slipstream.rollout.system.restarts import NodeLost

LIMITS = EngineLimits(
    ranks=2,
    vocab_size=7,
    max_length=64,
    request_timeout_s=60,
    answer_timeout_s=60,
    stream_interval=8,
    start_timeout_s=60,
)


@dataclass
class Method:
    """A method of an actor."""

    call: Callable[..., Any]

    def remote(self, *arguments: object) -> asyncio.Future:
        return asyncio.ensure_future(self.call(*arguments))


@dataclass
class Actor:
    """The actor of one node, with a server that lasts until it is ended."""

    node: int
    events: list[str]
    fails: bool = False
    killed: bool = False
    hangs: bool = False
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    meeting: MeetingPoint | None = None
    starts: int = 0

    @property
    def meeting_point(self) -> Method:
        async def call() -> MeetingPoint:
            self._check()
            return MeetingPoint("10.0.0.1", 20_000 + self.starts)

        return Method(call)

    @property
    def start(self) -> Method:
        async def call(version: int, meeting: MeetingPoint | None) -> ServerAccess:
            self._check()
            self.meeting, self.exited = meeting, asyncio.Event()
            self.starts += 1
            self.events.append(f"start {self.node}")
            if self.fails:
                raise EngineStartError(f"node {self.node} has no such model")
            await asyncio.sleep(0.01)
            return ServerAccess(f"http://node-{self.node}", Key("k"))

        return Method(call)

    @property
    def wait_exit(self) -> Method:
        async def call() -> int:
            await self.exited.wait()
            self._check()
            return -9

        return Method(call)

    @property
    def write_stacks(self) -> Method:
        async def call() -> tuple[str, list[str]]:
            if self.hangs:
                await asyncio.Event().wait()
            self._check()
            return f"engine-0-node-{self.node}.txt", [
                "sglang::scheduler_TP1 (process 7) is stopped by a signal"
            ]

        return Method(call)

    @property
    def stop(self) -> Method:
        async def call() -> None:
            self._check()
            self.events.append(f"stop {self.node}")
            self.exited.set()

        return Method(call)

    def _check(self) -> None:
        if self.killed:
            raise ray.exceptions.RayActorError


class World:
    """The actors of one engine over two nodes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int = 2) -> None:
        self.events: list[str] = []
        self.made: list[Actor] = []
        self.created_on: list[str] = []
        monkeypatch.setattr(engines, "kill", self._kill)
        monkeypatch.setattr(places, "check_nodes", self._check_nodes)
        monkeypatch.setattr(places, "LOOK_S", 0.01)
        self.alive = [Node(f"id{number}", f"10.0.0.{number}", 0) for number in range(nodes)]
        self.places = EnginePlaces(Placement((), (), "cpu"), lambda: self.alive)
        self.places.begin("engine-0", tuple(self.alive), 0)
        self.lost = False
        """Ray has found a node of the engine dead."""
        self.engine = RayEngine(
            "engine-0",
            self._create,
            LIMITS,
            Separate(),
            self.places,
            nodes=nodes,
            meets=nodes > 1,
        )

    def _check_nodes(self, nodes: tuple[Node, ...]) -> None:
        if self.lost:
            raise NodeLost("Ray has lost 10.0.0.2")

    def _create(self, node: int, on: Node) -> Any:
        self.created_on.append(on.address)
        self.made.append(Actor(node, self.events))
        return self.made[-1]

    def _kill(self, actor: Any) -> None:
        actor.killed = True
        actor.exited.set()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_every_node_starts_with_the_meeting_point_of_the_first_and_the_first_has_the_url(world: World):
    address = asyncio.run(world.engine.start())
    assert (address.url, address.ranks) == ("http://node-0", 2)
    assert [(actor.node, actor.meeting) for actor in world.made] == [
        (node, MeetingPoint("10.0.0.1", 20_000)) for node in range(2)
    ]


@pytest.mark.parametrize("node", [0, 1])
def test_the_end_of_one_server_ends_the_others_and_the_next_start_is_that_of_all(world: World, node: int):
    async def main() -> None:
        await world.engine.start()
        world.made[node].exited.set()
        assert await world.engine.wait_exit() == -9
        await asyncio.sleep(0)
        assert {"stop 0", "stop 1"} <= set(world.events)
        world.events.clear()
        await world.engine.start()
        assert world.events == ["start 0", "start 1"]
        assert world.made[1].meeting == MeetingPoint("10.0.0.1", 20_001), "each start has one of its own"

    asyncio.run(main())
    assert len(world.made) == 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_lost_actor_ends_the_other_nodes_server_and_all_are_made_anew(world: World, node: int):
    async def main() -> None:
        await world.engine.start()
        world._kill(world.made[node])
        assert await world.engine.wait_exit() == -1
        await asyncio.sleep(0)
        assert f"stop {1 - node}" in world.events
        await world.engine.start()

    asyncio.run(main())
    assert [actor.node for actor in world.made] == [0, 1, 0, 1]
    assert all(actor.killed for actor in world.made[:2]), "none goes on beside its successor"
    assert not any(actor.killed for actor in world.made[2:])


@pytest.mark.parametrize("node", [0, 1])
def test_a_start_that_fails_on_one_node_says_why_and_ends_the_others(world: World, node: int):
    async def main() -> None:
        await world.engine.start()
        world.made[node].fails = True
        with pytest.raises(EngineStartError, match=f"node {node} has no such model"):
            await world.engine.start()
        await asyncio.sleep(0)
        assert f"stop {1 - node}" in world.events

    asyncio.run(main())


@pytest.mark.parametrize("harm", ["hangs", "killed"])
def test_what_the_processes_of_an_engine_do_is_said_even_if_one_node_does_not_answer(
    world: World, monkeypatch: pytest.MonkeyPatch, harm: str
):
    monkeypatch.setattr(engines, "STACKS_S", 0.2)

    async def main() -> str:
        await world.engine.start()
        setattr(world.made[1], harm, True)
        return await world.engine.stands()

    assert asyncio.run(main()) == (
        "; sglang::scheduler_TP1 (process 7) is stopped by a signal on 10.0.0.0; its actor on 10.0.0.1 does "
        "not answer (stacks of its processes: engine-0-node-0.txt)"
    )


def test_stopping_ends_every_server_and_every_actor(world: World):
    async def main() -> None:
        await world.engine.start()
        await world.engine.stop()
        await world.engine.stop()

    asyncio.run(main())
    assert sorted(world.events[2:]) == ["stop 0", "stop 1"]
    assert all(actor.killed for actor in world.made)


def test_an_engine_on_one_node_needs_no_meeting_point(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch, nodes=1)
    asyncio.run(world.engine.start())
    assert [actor.meeting for actor in world.made] == [None]


@pytest.mark.parametrize("found", ["before the exit is seen", "before the start", "during the start"])
def test_an_engine_whose_node_is_lost_says_so_whenever_ray_finds_out(
    world: World, monkeypatch: pytest.MonkeyPatch, found: str
):
    async def main() -> None:
        await world.engine.start()
        world.lost = found == "before the exit is seen"
        world._kill(world.made[1])
        if world.lost:
            with pytest.raises(NodeLost):
                await world.engine.wait_exit()
        else:
            assert await world.engine.wait_exit() == -1
        world.lost = world.lost or found == "before the start"

        def create(node: int, on: Node) -> Any:
            actor = world._create(node, on)
            world.lost, actor.killed = True, True
            return actor

        monkeypatch.setattr(world.engine, "_create", create)
        with pytest.raises(NodeLost, match=r"10\.0\.0\.2"):
            await world.engine.start()

    asyncio.run(main())
    assert len(world.made) == (4 if found == "during the start" else 2)
    assert all(actor.killed for actor in world.made)


def test_an_engine_that_has_given_up_its_nodes_waits_for_others_and_starts_there(world: World):
    async def main() -> None:
        await world.engine.start()
        assert await world.engine.placed() == "10.0.0.0, 10.0.0.1"
        world.engine.give_up_place(unfit=False)
        assert all(actor.killed for actor in world.made)
        world.alive = world.alive[:1]
        waiting = asyncio.ensure_future(world.engine.placed())
        for _ in range(5):
            await world.places._look()
            await asyncio.sleep(0)
        assert not waiting.done(), "one node is not enough"
        world.alive = [*world.alive, Node("new", "10.0.0.9", 0)]
        assert await asyncio.wait_for(waiting, 60) == "10.0.0.9, 10.0.0.0", "a node without losses first"
        await world.engine.start()
        assert world.created_on[-2:] == ["10.0.0.9", "10.0.0.0"]

    asyncio.run(main())


def test_a_node_on_which_an_engine_does_not_start_is_not_tried_again(world: World):
    async def main() -> None:
        world.engine.give_up_place(unfit=True)
        waiting = asyncio.ensure_future(world.engine.placed())
        await asyncio.wait({waiting}, timeout=0.2)
        assert not waiting.done()
        world.alive = [Node(f"returned{number}", f"10.0.0.{number}", 0) for number in range(2)]
        assert await asyncio.wait_for(waiting, 60) == "10.0.0.0, 10.0.0.1"

    asyncio.run(main())


def test_two_engines_never_get_the_same_gpu():
    async def main() -> None:
        room = EnginePlaces(Placement((), (), "cuda"), lambda: [Node("id0", "10.0.0.0", 2)])
        for name in ("engine-0", "engine-1"):
            await room.take(name, spread=1, gpus=1, beyond=True)
        third = asyncio.ensure_future(room.take("engine-2", spread=1, gpus=1, beyond=False))
        await asyncio.wait({third}, timeout=0.05)
        assert not third.done()
        room.give_up("engine-0", unfit=False)
        third.cancel()
        await asyncio.wait_for(room.take("engine-2", spread=1, gpus=1, beyond=False), 60)

    asyncio.run(main())


def test_without_gpus_an_engine_beyond_the_first_ones_needs_a_node_of_its_own():
    async def main() -> None:
        node = Node("id0", "10.0.0.0", 0)
        room = EnginePlaces(Placement((), (), "cpu"), lambda: [node])
        room.begin("engine-0", (node,), 0)
        further = asyncio.ensure_future(room.take("engine-1", spread=1, gpus=0, beyond=True))
        await asyncio.wait({further}, timeout=0.05)
        assert not further.done()
        further.cancel()
        await room.take("engine-1", spread=1, gpus=0, beyond=False)

    asyncio.run(main())


def test_the_trainer_gets_the_node_of_engines_that_have_left_it_and_others_do_not():
    async def main() -> None:
        first, lost, left, kept = (Node(f"id{n}", f"10.0.0.{n}", 2) for n in range(4))
        room = EnginePlaces(Placement((first, lost), (), "cuda"), lambda: [first, left, kept])
        for name, node in (("engine-0", left), ("engine-1", kept), ("judge-engine-0", first)):
            room.begin(name, (node,), 2 if node is not first else 1)
        events: list[object] = []

        class Engines:
            to_spare = 1

            def where(self) -> dict[str, str]:
                return {"engine-0": "", "engine-1": ""}

            async def give_way(self, names: list[str], reason: str) -> None:
                events.append(names)
                assert room.placement.trainer == (first, left), "no engine may take the node meanwhile"
                for name in names:
                    room.give_up(name, unfit=False)

        engines: Any = Engines()
        await room.keep_trainer(engines)
        assert events == [["engine-0"]]
        waiting = asyncio.ensure_future(room.take("engine-0", spread=1, gpus=2, beyond=False))
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        waiting.cancel()
        engines.to_spare = 0
        room._placement = Placement((first, lost), (), "cuda")
        room.begin("engine-0", (left,), 2)
        with pytest.raises(TrainerFailed, match="would have to give way"):
            await room.keep_trainer(engines)

    asyncio.run(main())
