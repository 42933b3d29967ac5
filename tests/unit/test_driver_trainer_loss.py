"""The training loop and the weights that are served, when the trainer dies at every point of a step."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.loops.training import training_loop, training_steps
from slipstream.backend.driver.processes.devices import Separate
from slipstream.backend.driver.start.feedback import Feedback
from slipstream.backend.driver.weights.interrupted import Stock
from slipstream.backend.driver.weights.served_weights import ServedWeights
from slipstream.backend.simulate import clock
from slipstream.bridge.publish.report import PublishReport
from slipstream.configs.schema.run import RunSection
from slipstream.rollout.collection.driver.collected_group import CollectedGroup
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.tokens.trajectory import Prompt
from tests.unit.doubles import Collector, advance


@dataclass
class Trainer:
    """Dies in the calls that ``dies`` names, each once."""

    dies: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    kills: int = 0

    async def train(self, batch: Any) -> dict[str, float]:
        self._call("train")
        return {}

    async def publish(self, version: int, engines: Any) -> PublishReport:
        self._call(f"publish {version}")
        return PublishReport(version, [engine.name for engine in engines])

    async def logprobs(self, ids: Any) -> list[float]:
        self._call("logprobs")
        return []

    def kill(self) -> None:
        self.kills += 1

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.dies and what.startswith(self.dies[0]):
            self.dies.pop(0)
            raise TrainerFailed(f"killed in {what}")


@dataclass
class Batches:
    """Batches without an end, from version 0 on, until ``end``."""

    version: int = 0
    sampled_version: int = 0
    next_version: int = 0
    is_stepping: bool = False
    is_ended: bool = False
    failed: list[str] = field(default_factory=list)
    there: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    live: tuple[()] = ()
    prompts_drawn: int = 0
    counts: GroupCounts = field(default_factory=GroupCounts)

    def __post_init__(self) -> None:
        self.there.set()

    @property
    def step(self) -> int:
        return self.version

    async def next(self, timeout_s: float) -> list[CollectedGroup]:
        await self.there.wait()
        return [] if self.is_ended else [CollectedGroup(1, 0, Prompt(0, "?"), [])]

    async def step_begins(self) -> None:
        self.begun += 1
        self.next_version, self.is_stepping = self.version + 1, True

    async def step_failed(self, reason: str) -> None:
        self.failed.append(reason)
        self.is_stepping = False

    def published(self, version: int) -> None:
        self.version = self.sampled_version = version
        self.is_stepping = False

    @property
    def core(self) -> Any:
        return self

    def lag(self, version: int) -> int:
        return 0

    def end(self) -> None:
        self.is_ended = True
        self.over.set()
        self.there.set()

    async def ended(self) -> None:
        await self.over.wait()


class Listener:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, step: Any, status: Any) -> None:
        self.steps.append(step.version)

    def note(self, text: str) -> None: ...


@dataclass
class Checkpoints:
    dies: bool = False

    async def step_done(self, run: Any) -> None:
        if self.dies:
            self.dies = False
            raise TrainerFailed("killed in a checkpoint")


class Interrupted:
    """Says of each engine what a publication that was cut off has left of it."""

    def __init__(self, stock: Stock | None = None) -> None:
        self.stock = stock or Stock()
        self.asked: list[tuple[int, list[str]]] = []

    async def ended(self, version: int, engines: Any) -> Stock:
        self.asked.append((version, [engine.name for engine in engines]))
        return self.stock


class Client:
    def __init__(self, name: str) -> None:
        self.name = name
        self.address = engine(name)

    async def close(self) -> None: ...


def engine(name: str) -> EngineAddress:
    return EngineAddress(name, f"http://{name}", 1, 100, 100, 5)


@dataclass
class World:
    trainer: Trainer
    batches: Batches
    roster: EngineRoster
    weights: ServedWeights
    interrupted: Interrupted
    listener: Listener = field(default_factory=Listener)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    async def train(self, steps: int) -> None:
        run = RunSection(name="test", steps=steps)
        batches: Any = self.batches
        taken = training_steps(
            run, batches, self.weights, self.checkpoints, self.listener, lambda: None, nothing, Feedback()
        )
        await training_loop(taken, run, batches, None)

    async def revive(self, restored: int | None = None) -> None:
        """Restore the trainer as soon as it has failed, to ``restored`` or to what it had."""
        await self.weights.life.lost()
        if restored is not None:
            self.batches.version = restored
        self.weights.life.restored()


def world_of(*engines: str, stock: Stock | None = None, dies: tuple[str, ...] = ()) -> World:
    batches = Batches()
    trainer, interrupted = Trainer([*dies]), Interrupted(stock)
    roster = EngineRoster(lambda: batches.sampled_version, limit=4)
    for name in engines:
        client: Any = Client(name)
        roster.add(client)
    weights: Any = ServedWeights(trainer, roster, Separate(), batches, interrupted=interrupted)
    return World(trainer, batches, roster, weights, interrupted)


async def nothing(refs: list[bytes]) -> list[bytes]:
    return []


def run(main: Callable[[], Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await main()

    return clock.run(limited())


@pytest.mark.parametrize("dies", ["train", "publish"])
def test_a_step_in_which_the_trainer_dies_is_charged_to_its_batch_and_training_goes_on(dies: str):
    async def main() -> None:
        world = world_of("a", dies=(dies,))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.revive())
            tasks.create_task(world.train(3))
        assert len(world.batches.failed) == 1 and f"killed in {dies}" in world.batches.failed[0]
        assert world.listener.steps == [1, 2, 3]
        assert world.batches.begun == 4

    run(main)


def test_a_failure_that_is_no_steps_is_charged_to_nobody():
    async def main() -> None:
        world = world_of("a")
        world.checkpoints.dies = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.revive())
            tasks.create_task(world.train(2))
        assert world.batches.failed == []
        assert world.listener.steps == [1, 2], "the step was done before"

    run(main)


def test_a_loss_is_noticed_while_the_loop_waits_for_a_batch():
    async def main() -> None:
        world = world_of("a")
        world.batches.there.clear()
        training = asyncio.create_task(world.train(1))
        await asyncio.sleep(0.01)
        world.weights.life.fail(TrainerFailed("killed while it waited"))
        await asyncio.sleep(0.01)
        assert not training.done() and world.batches.begun == 0
        world.batches.there.set()
        await asyncio.sleep(0.01)
        assert world.batches.begun == 0, "no step begins without a trainer"
        world.weights.life.restored()
        await training
        assert world.batches.failed == [] and world.listener.steps == [1]

    run(main)


def test_a_run_may_be_stopped_while_the_trainer_is_restarted():
    async def main() -> None:
        world = world_of("a", dies=("train",))
        training = asyncio.create_task(world.train(3))
        await world.weights.life.lost()
        await asyncio.sleep(0.01)
        assert not training.done()
        world.batches.end()
        await training
        assert not world.weights.life.is_alive and world.listener.steps == []

    run(main)


def test_engines_whose_weights_were_cut_off_wait_and_the_others_go_on():
    async def main() -> None:
        stock = Stock(outdated={"b": "a part has come"}, failed={"c": "no answer"})
        world = world_of("a", "b", "c", stock=stock, dies=("publish",))
        collector = Collector(world.roster)
        with pytest.raises(TrainerFailed):
            await advance(world.weights, 1)
        assert world.trainer.kills == 1, "nothing of a dying trainer may reach an engine any more"
        assert world.interrupted.asked == [(0, ["a", "b", "c"])]
        assert [client.name for client in world.roster.clients] == ["a"]
        assert world.roster.outdated.get_nowait()[0].name == "b"
        assert world.roster.lost.get_nowait()[0].name == "c"
        await asyncio.sleep(0.01)
        assert not collector.records[-1].held

    run(main)


def test_an_engine_that_starts_waits_for_a_trainer():
    """The trainer dies behind version 1 and is restored to version 0, which gets the number 2."""

    async def main() -> None:
        world = world_of("a", dies=("nothing",))
        await advance(world.weights, 1)
        world.weights.life.fail(TrainerFailed("killed"))
        admitted: list[int] = []
        late = asyncio.create_task(
            world.weights.bring_up_to_date(engine("late"), lambda: admitted.append(world.batches.version))
        )
        await asyncio.sleep(0.01)
        world.batches.version = 0
        await world.weights.publish_copy(2)
        await asyncio.sleep(0.01)
        assert (world.batches.version, world.batches.sampled_version) == (2, 2)
        assert not late.done()
        world.weights.life.restored()
        assert await late is None
        assert admitted == [2]
        assert world.trainer.calls == ["train", "publish 1", "publish 2", "publish 2"]

    run(main)


def test_a_copy_that_the_trainer_does_not_survive_leaves_the_engines_as_any_publication_does():
    async def main() -> None:
        stock = Stock(outdated={"b": "a part has come"})
        world = world_of("a", "b", stock=stock, dies=("publish 6",))
        await advance(world.weights, 5)
        world.batches.version = 2
        with pytest.raises(TrainerFailed):
            await world.weights.publish_copy(6)
        assert (world.batches.version, world.batches.sampled_version) == (2, 5)
        assert world.interrupted.asked == [(5, ["a", "b"])]
        assert [client.name for client in world.roster.clients] == ["a"]

    run(main)


def test_requests_are_held_while_no_engine_serves_and_one_waits_for_the_trainer():
    async def main() -> None:
        world = world_of()
        collector = Collector(world.roster)
        world.weights.life.fail(TrainerFailed("killed"))
        client: Any = Client("late")
        late = asyncio.create_task(
            world.weights.bring_up_to_date(client.address, lambda: world.roster.add(client))
        )
        await asyncio.sleep(0.01)
        assert collector.records[-1].held, "they wait without the limit of a missing engine"
        world.weights.life.restored()
        await late
        await asyncio.sleep(0.01)
        assert not collector.records[-1].held

    run(main)


def test_a_trainer_that_dies_while_it_brings_an_engine_up_to_date_is_reported_and_waited_for():
    async def main() -> None:
        world = world_of("a", dies=("publish 1",))
        world.batches.version = world.batches.sampled_version = 1
        bringing = asyncio.create_task(world.weights.bring_up_to_date(engine("late"), lambda: None))
        assert "killed in publish 1" in str(await world.weights.life.lost())
        await asyncio.sleep(0.01)
        assert world.interrupted.asked == [(1, ["late"])], "else its next update could not begin"
        world.weights.life.restored()
        assert await bringing is None
        assert world.trainer.calls == ["publish 1", "publish 1"]

    run(main)


def test_engines_that_come_while_another_is_brought_up_to_date_get_the_version_together():
    async def main() -> None:
        world = world_of("a", dies=("publish 1",))
        world.batches.version = world.batches.sampled_version = 1
        admitted: list[str] = []
        bringing = [
            asyncio.create_task(
                world.weights.bring_up_to_date(engine(name), lambda name=name: admitted.append(name))
            )
            for name in ("b", "c", "d", "e", "f")
        ]
        await world.weights.life.lost()
        bringing.pop().cancel()
        await asyncio.sleep(0.01)
        world.weights.life.restored()
        assert await asyncio.gather(*bringing) == [None] * 4
        assert admitted == ["b", "c", "d", "e"]
        assert world.trainer.calls == ["publish 1", "publish 1"]

    run(main)


def test_an_engine_that_was_cut_off_gets_the_initial_weights_too():
    """It stands still with a part of version 1. Without a checkpoint the trainer goes back to version 0."""

    async def main() -> None:
        world = world_of("a", stock=Stock(outdated={"a": "cut off"}), dies=("publish",))
        with pytest.raises(TrainerFailed):
            await advance(world.weights, 1)
        world.weights.life.fail(TrainerFailed("killed"))
        world.weights.life.restored()
        admitted: list[str] = []
        for name in ("a", "b", "a"):  # b has just started
            await world.weights.bring_up_to_date(engine(name), lambda name=name: admitted.append(name))
        assert [call for call in world.trainer.calls if "publish" in call] == ["publish 1", "publish 0"]
        assert admitted == ["a", "b", "a"]

    run(main)
