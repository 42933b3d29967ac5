"""An engine over several nodes, seen by the supervisor: its servers start, are watched and end together."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from slipstream.backend.driver.processes import engines
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.processes.engines import EngineLimits, RayEngine
from slipstream.rollout.engine.server_process import EngineStartError, MeetingPoint, ServerAccess
from slipstream.rollout.system.key import Key
from slipstream.rollout.system.restarts import NodeLost

LIMITS = EngineLimits(
    ranks=2,
    vocab_size=7,
    max_length=64,
    request_timeout_s=5,
    answer_timeout_s=5,
    stream_interval=8,
    start_timeout_s=5,
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
        monkeypatch.setattr(engines, "kill", self._kill)
        self.lost = False
        """Ray has found a node of the engine dead."""
        self.engine = RayEngine(
            "engine-0",
            self._create,
            LIMITS,
            Separate(),
            nodes=nodes,
            meets=nodes > 1,
            check_nodes=self._check_nodes,
        )

    def _check_nodes(self) -> None:
        if self.lost:
            raise NodeLost("Ray has lost 10.0.0.2")

    def _create(self, node: int) -> Any:
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

        def create(node: int) -> Any:
            actor = world._create(node)
            world.lost, actor.killed = True, True
            return actor

        monkeypatch.setattr(world.engine, "_create", create)
        with pytest.raises(NodeLost, match=r"10\.0\.0\.2"):
            await world.engine.start()

    asyncio.run(main())
    assert len(world.made) == (4 if found == "during the start" else 2)
    assert all(actor.killed for actor in world.made)
