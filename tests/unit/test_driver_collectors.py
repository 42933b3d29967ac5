"""Collectors that are lost: which of them are started again, and what ends the run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayTaskError

from slipstream.backend.driver.processes import collectors
from slipstream.backend.driver.processes.collectors import CollectorGone, Collectors
from slipstream.backend.simulate import clock
from slipstream.rollout.collection.collector.spec import CollectorSpec
from slipstream.rollout.system.key import new_key
from slipstream.rollout.system.restarts import NodeLost, RestartLimit


def raised(cause: Exception) -> Exception:
    text = f'Traceback (most recent call last):\n  File "/workflow.py", line 3, in run\n{cause!r}'
    return RayTaskError("collect", text, cause, proctitle="ray::CollectorActor", pid=7, ip="127.0.0.1")


class World:
    """Collectors whose lives end as the test says, with or without a group that they have finished."""

    def __init__(self, *fates: Exception | None, count: int = 1) -> None:
        """``fates``: of each life of any collector, in order; after them it lives on. None: its connection
        ends."""
        self.count = count
        self.fates = list(fates)
        self.results: set[str] = set()
        self.finishes = True
        self.notes: list[str] = []
        self.lives: list[str] = []
        self.lost: set[int] = set()
        """Collectors whose node Ray has found dead."""

    def check_node(self, number: int) -> None:
        if number in self.lost:
            raise NodeLost(f"Ray has lost node{number}")

    def create(self, number: int) -> Any:
        return object()

    async def collect(self, actor: Any, spec: CollectorSpec) -> None:
        self.lives.append(spec.name)
        if self.finishes:
            self.results.add(spec.name)
        await asyncio.sleep(0)
        if not self.fates:
            await asyncio.sleep(60)
        elif (fate := self.fates.pop(0)) is not None:
            raise fate

    def run(self, restarts: int = 16) -> Collectors:
        """Run until every fate has come. Raises what the collectors do."""
        actors: Any = self
        made = Collectors(
            RestartLimit("rollout.collector_restarts", restarts, 86400.0, "it has finished no group"),
            self.results.__contains__,
            actors,
            Path("logs"),
            new_key(),
            vocab_size=9,
            context=9,
            note=self.notes.append,
        )

        async def main() -> None:
            running = asyncio.create_task(made.run("http://driver"))
            async with asyncio.timeout(60):
                while self.fates and not running.done():
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.01)
            if running.done():
                running.result()
            running.cancel()
            await asyncio.wait({running})

        clock.run(main())
        return made


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "kill", lambda actor: None)


def gone(world: World, **settings: int) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        world.run(**settings)
    (error,) = caught.value.exceptions
    assert isinstance(error, CollectorGone)
    return str(error)


def test_a_collector_that_crashes_before_it_has_finished_anything_is_started_once_more():
    """As on the prompt that is assigned first again, whose workflow ends its process."""
    world = World(*(ActorDiedError() for _ in range(9)))
    world.finishes = False
    assert "collector-0 has failed twice in the same way, and it has finished no group" in gone(world)
    assert world.lives == ["collector-0.0", "collector-0.1"]


def test_the_first_traceback_of_a_collector_that_raises_again_is_shown():
    world = World(None, *(raised(ValueError(f"no room {number}")) for number in range(9)))
    world.finishes = False
    error = gone(world)
    assert (
        'File "/workflow.py", line 3, in run' in error and "no room 0" in error and "no room 1" not in error
    )
    assert world.notes == [
        "collector-0 is started again: its connection has ended",
        "collector-0 is started again: ValueError: no room 0",
    ]


def test_collectors_that_finish_groups_in_between_are_started_again_until_the_limit():
    assert World(*(ActorDiedError() for _ in range(5))).run(restarts=5).restarts == 5
    error = gone(World(*(ActorDiedError() for _ in range(6))), restarts=5)
    assert "has failed 6 times within 24 h" in error and "rollout.collector_restarts allows 5" in error


def test_a_collector_that_raises_after_it_has_worked_is_started_again():
    assert World(raised(ValueError("no room"))).run().restarts == 1


def test_each_collector_has_its_own_account():
    world = World(ActorDiedError(), ActorDiedError(), count=2)
    world.finishes = False
    assert world.run().restarts == 2


def test_a_first_start_that_raises_ends_the_run_at_once():
    world = World(raised(ImportError("no module my_reward")))
    world.finishes = False
    assert "no module my_reward" in gone(world)
    assert len(world.lives) == 1


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnschedulableError("no such node")])
def test_a_collector_whose_node_is_lost_stays_away_while_there_is_another_one(error: Exception):
    world = World(error, count=2)
    world.finishes = False
    world.lost = {0}
    assert world.run(restarts=0).restarts == 0
    assert world.lives == ["collector-0.0", "collector-1.0"]
    assert world.notes == [
        "collector-0 is gone with its node, and the run goes on with 1 of 2 collectors: Ray has lost node0"
    ]


def test_the_last_collector_whose_node_is_lost_ends_the_run():
    world = World(ActorDiedError(), ActorDiedError(), count=2)
    world.lost = {0, 1}
    with pytest.raises(ExceptionGroup) as caught:
        world.run()
    assert [type(error) for error in caught.value.exceptions] == [NodeLost]
