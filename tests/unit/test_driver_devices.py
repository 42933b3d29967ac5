"""Trainer and engines take turns on the same devices, whatever fails meanwhile."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.processes import devices
from slipstream.backend.driver.processes.devices import Beside, Colocated
from slipstream.backend.simulate import clock
from slipstream.rollout.engine.client import EngineError
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import PoolStatus
from slipstream.rollout.system.time_limit import TimeLimit
from tests.unit.doubles import Collector

ALL, WEIGHTS = {"weights", "kv_cache", "cuda_graph"}, {"weights"}


@dataclass
class World:
    """What everybody did, in order, and who has memory on the devices."""

    did: list[str] = field(default_factory=list)
    trainer_has: str = "all"
    engines: dict[str, "Engine"] = field(default_factory=dict)

    def note(self, what: str) -> None:
        self.did.append(what)
        alive = [engine for engine in self.engines.values() if not engine.lost]
        if self.trainer_has == "all":
            assert not any(engine.has for engine in alive), what
        elif self.trainer_has == "weights":
            assert all(engine.has <= WEIGHTS for engine in alive), what


@dataclass(eq=False)
class Engine:
    world: World
    name: str
    has: set[str] = field(default_factory=lambda: set(ALL))
    paused: bool = False
    fails: str = ""
    lost: bool = False

    async def pause(self, mode: str) -> None:
        self.paused = True
        await self._do(f"pauses ({mode})")

    async def release_memory(self, parts) -> None:
        assert self.paused and set(parts) <= self.has
        await self._do("gives up")
        self.has -= set(parts)

    async def regain_memory(self, parts) -> None:
        assert self.paused and not self.has & set(parts)
        self.has |= set(parts)
        await self._do(f"takes {' '.join(sorted(parts))}")

    async def resume(self) -> None:
        assert self.has == ALL
        self.paused = False
        await self._do("goes on")

    async def close(self) -> None:
        """Nothing is open."""

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _do(self, what: str) -> None:
        await asyncio.sleep(1)
        if self.fails and what.startswith(self.fails):
            raise EngineError("no")
        self.world.note(f"{self.name} {what}")


class Trainer:
    def __init__(self, world: World) -> None:
        self.world = world

    async def show_peak(self) -> None:
        self.world.note("trainer shows its peak")

    async def rest(self, *, keep_weights: bool = False) -> None:
        self.world.trainer_has = "weights" if keep_weights else ""
        self.world.note("trainer keeps weights" if keep_weights else "trainer rests")

    def kill(self) -> None:
        self.world.trainer_has = ""
        self.world.note("trainer is killed")

    async def wake(self) -> None:
        assert not self.world.trainer_has
        self.world.trainer_has = "all"
        self.world.note("trainer wakes")


class Roster(EngineRoster):
    """Remembers which engines were condemned."""

    def __init__(self, *clients: Any) -> None:
        super().__init__(lambda: 0, limit=8)
        self.condemned: dict[str, str] = {}
        for client in clients:
            self.add(client)

    def condemn(self, client: Any, reason: str) -> None:
        client.lost = True
        if client in self.clients:
            self.condemned[client.name] = reason
        super().condemn(client, reason)


def colocated(world: World, drain_s: float | None = None) -> tuple[Colocated, Roster]:
    roster = Roster()
    trainer: Any = Trainer(world)
    return Colocated(trainer, roster, pause="retract", drain_s=drain_s, timeout_s=5), roster


def world_of(*names: str, **fails: str) -> World:
    world = World()
    world.engines = {name: Engine(world, name, fails=fails.get(name, "")) for name in names}
    return world


async def started(world: World, *clients: Engine, drain_s: float | None = None) -> tuple[Colocated, Roster]:
    """The trainer has been there once."""
    found, roster = colocated(world, drain_s)
    engines, world.engines = world.engines, {}
    async with found.training():
        """It is built."""
    world.engines = engines
    for client in clients:
        roster.add(client)
    world.did.clear()
    return found, roster


def run(main: Callable[[], Any]) -> Any:
    return clock.run(main())


def test_a_step_hands_the_devices_over_and_back():
    async def main():
        world = world_of("a")
        found, _ = await started(world, world.engines["a"])
        async with found.training() as turn:
            world.note("trains")
            async with found.publishing():
                world.note("sends")
        assert world.did == [
            "a pauses (retract)",
            "a gives up",
            "trainer wakes",
            "trains",
            "trainer keeps weights",
            "a takes weights",
            "sends",
            "trainer rests",
            "a takes cuda_graph kv_cache",
            "a goes on",
        ]
        assert turn.stood_s == pytest.approx(5)

    run(main)


def test_a_turn_may_end_without_a_new_version():
    async def main():
        world = world_of("a", "b")
        found, _ = await started(world, *world.engines.values())
        with pytest.raises(CheckpointError):
            async with found.training():
                raise CheckpointError("disk full")
        assert world.did[-5:-3] == ["trainer rests", "a takes cuda_graph kv_cache weights"]
        assert not any(engine.paused for engine in world.engines.values())

    run(main)


@pytest.mark.parametrize("step", ["pauses", "gives up", "takes weights", "takes cuda_graph", "goes on"])
def test_an_engine_that_fails_a_step_is_given_up_and_the_others_go_on(step: str):
    async def main():
        world = world_of("a", "b", b=step)
        found, roster = await started(world, *world.engines.values())
        async with found.training(), found.publishing():
            """Sends."""
        assert list(roster.condemned) == ["b"]
        assert "no" in roster.condemned["b"]
        assert world.did[-1] == "a goes on"
        assert not world.engines["a"].paused

    run(main)


def test_an_engine_that_was_lost_meanwhile_stays_as_it_is():
    async def main():
        world = world_of("a", "b")
        found, roster = await started(world, *world.engines.values())
        async with found.training(), found.publishing():
            roster.condemn(world.engines["b"], "part of the weights")
        assert world.engines["b"].paused
        assert world.engines["b"].has == WEIGHTS

    run(main)


def test_an_engine_that_is_new_stands_aside_as_well(monkeypatch):
    async def main():
        world = world_of("a", "new")
        found, _ = await started(world, world.engines["a"])
        monkeypatch.setattr(devices, "EngineClient", lambda address: world.engines[address])
        address: Any = "new"
        async with found.training(address):
            assert not world.engines["new"].has
        assert not world.engines["new"].paused

    run(main)


def test_engines_start_while_the_trainer_rests_and_the_trainer_waits_for_those_that_start():
    async def main():
        world = world_of()
        found, _ = colocated(world)
        times: dict[str, float] = {}

        async def start(name: str, begins: float) -> None:
            await asyncio.sleep(begins)
            async with found.starting():
                times[f"{name} starts"] = asyncio.get_running_loop().time()
                await asyncio.sleep(10)

        async def train(name: str, begins: float) -> None:
            await asyncio.sleep(begins)
            async with found.training():
                times[name] = asyncio.get_running_loop().time()
                await asyncio.sleep(3)

        await asyncio.gather(
            start("early", 0), train("builds", 1), start("two", 4.5), train("step", 5), start("late", 6)
        )
        assert times == {
            "builds": 1,
            "early starts": 4,  # nothing starts before the trainer was there
            "two starts": 4.5,
            "step": 14.5,
            "late starts": 17.5,
        }

    run(main)


@pytest.mark.parametrize("drain_s", [None, 2.0], ids=["interrupted", "drained"])
def test_the_trainers_time_is_not_an_episodes(drain_s: float | None):
    """Requests are held during a turn, and collectors stop the clocks of their episodes meanwhile."""

    async def main():
        found, roster = await started(world_of(), drain_s=drain_s)
        episodes = TimeLimit(10)
        collector = Collector(roster, on_held=episodes.stop)

        async def episode() -> None:
            with episodes():
                await asyncio.sleep(19)

        running = asyncio.create_task(episode())
        await asyncio.sleep(1)
        async with found.training():
            await asyncio.sleep(10)
            assert collector.pool.held
        await running
        assert not collector.pool.held

    run(main)


def test_a_turn_that_drains_begins_when_no_collector_runs_a_request():
    async def main():
        world = world_of("a")
        found, roster = await started(world, world.engines["a"], drain_s=60)
        roster.joined("busy")
        roster.joined("idle")

        async def follow(name: str, running: int) -> None:
            await asyncio.sleep(1)
            roster.reported(name, PoolStatus(number=roster.number, running=running))

        async def end() -> None:
            await asyncio.sleep(8)
            roster.reported("busy", PoolStatus(number=roster.number, running=0))

        tasks = [asyncio.create_task(task) for task in (follow("busy", 3), follow("idle", 0), end())]
        began = asyncio.get_running_loop().time()
        async with found.training():
            assert world.did[0] == "a pauses (retract)"
            assert asyncio.get_running_loop().time() - began == pytest.approx(8 + 2)
        await asyncio.gather(*tasks)

    run(main)


@pytest.mark.parametrize("moment", ["trains", "sends"])
def test_a_trainer_that_dies_in_its_turn_leaves_the_devices_to_the_engines(moment: str):
    async def main():
        world = world_of("a", "b")
        found, roster = await started(world, *world.engines.values())

        async def failing() -> None:
            async with found.training(), AsyncExitStack() as stack:
                if moment == "sends":
                    await stack.enter_async_context(found.publishing())
                    roster.withdraw(world.engines["b"], "a part has come")  # type: ignore[arg-type]
                raise TrainerFailed("killed")

        with pytest.raises(TrainerFailed):
            await failing()
        assert "trainer is killed" in world.did
        assert all(engine.has == ALL for engine in world.engines.values())
        assert not world.engines["a"].paused
        assert world.engines["b"].paused == (moment == "sends"), "it waits for a whole version"

    run(main)


def test_a_trainer_that_is_started_again_is_not_woken():
    async def main():
        world = world_of("a")
        found, _ = await started(world, world.engines["a"])
        found.trainer_gone()
        async with found.training():
            assert "trainer wakes" not in world.did
            world.trainer_has = "all"
        assert world.did[-1] == "a goes on"
        async with found.training():
            """The next turn is as every other."""
        assert "trainer wakes" in world.did

    run(main)


class Gpu:
    """A GPU whose memory two processes take, in GiB."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken: dict[str, int] = {}

    @property
    def free(self) -> int:
        return self.total - sum(self.taken.values())

    def take(self, who: str, size: int) -> None:
        self.taken[who] = size
        if self.free < 0:
            raise EngineError("CUDA out of memory")


class OnGpu(Trainer):
    """Keeps 4 GiB from its first step on: groups of NCCL, workspaces. A step takes 60."""

    def __init__(self, world: World, gpu: Gpu) -> None:
        super().__init__(world)
        self.gpu, self.keeps = gpu, 1

    async def show_peak(self) -> None:
        self.keeps = 4
        self.gpu.take("trainer", 60)

    async def wake(self) -> None:
        await super().wake()
        await self.show_peak()

    async def rest(self, *, keep_weights: bool = False) -> None:
        await super().rest(keep_weights=keep_weights)
        self.gpu.take("trainer", self.keeps + (10 if keep_weights else 0))


class Sizing(Engine):
    """Takes 0.9 of what is free at its start, and that again after each turn of the trainer."""

    def __init__(self, world: World, name: str, gpu: Gpu) -> None:
        super().__init__(world, name)
        self.gpu = gpu

    def start(self) -> None:
        self.pool = self.gpu.free * 9 // 10
        self.gpu.take(self.name, self.pool + 7)  # its context and its graphs besides

    async def release_memory(self, memory: Any) -> None:
        self.gpu.take(self.name, 0)
        await super().release_memory(memory)

    async def regain_memory(self, memory: Any) -> None:
        if "kv_cache" in memory:
            self.gpu.take(self.name, self.pool + 7)
        await super().regain_memory(memory)


def test_an_engine_sizes_its_pool_after_the_trainer_has_shown_what_it_keeps():
    """With the 3 GiB that come with the first step, 0.9 of 79 GiB and 7 would not fit any more."""

    async def main():
        world, gpu, roster = World(), Gpu(80), Roster()
        trainer: Any = OnGpu(world, gpu)
        devices = Colocated(trainer, roster, pause="retract", drain_s=None, timeout_s=5)
        async with devices.training():
            trainer.gpu.take("trainer", 30)  # it is built
        world.trainer_has = ""
        engine = Sizing(world, "a", gpu)
        world.engines = {"a": engine}
        async with devices.starting():
            engine.start()
        roster.add(engine)
        for _ in range(2):
            async with devices.training():
                """It trains."""
        assert not roster.condemned, roster.condemned

    run(main)


def test_an_engine_beside_the_trainer_starts_after_its_peak_and_after_that_of_a_new_trainer():
    async def main():
        world = World()
        trainer: Any = Trainer(world)
        devices = Beside(trainer)

        async def start(name: str) -> None:
            async with devices.starting():
                world.note(f"{name} starts")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(start("a"))
            async with devices.training():
                await asyncio.sleep(1)
                world.note("trainer is built")
        async with devices.training():
            await start("b")
        devices.trainer_gone()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(start("c"))
            async with devices.training():
                await asyncio.sleep(1)
        peak = "trainer shows its peak"
        assert world.did == ["trainer is built", peak, "a starts", "b starts", peak, "c starts"]

    run(main)
