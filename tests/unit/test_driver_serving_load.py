"""Following the load: all engines at once, failures are no observations, the decision reaches the roster."""

import asyncio

from slipstream.backend.driver.loops import serving
from slipstream.backend.driver.loops.serving import follow_load, sample
from slipstream.backend.simulate import clock
from slipstream.rollout.control.concurrency import ConcurrencyController, EngineLoad
from slipstream.rollout.engine.client import EngineError, EngineLost
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import PoolStatus

FULL = EngineLoad(running=10, waiting=0, kv_use=0.99)


class FakeEngine:
    """Gives its replies in turn, the last one forever. An exception is raised; None is no reply at all."""

    def __init__(self, name: str, *replies: EngineLoad | Exception | None) -> None:
        self.name = name
        self.replies = list(replies)
        self.asked = 0

    async def load(self) -> EngineLoad:
        self.asked += 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if reply is None:
            await asyncio.sleep(60)
        if isinstance(reply, Exception):
            raise reply
        return reply


class Controller(ConcurrencyController):
    """Records what it is observed; wants one fewer with every observation."""

    def __init__(self) -> None:
        super().__init__(maximum=100)
        self.observed: list = []

    def observe(self, loads, in_use) -> None:
        self.observed.append((sorted(load.running for load in loads), in_use))
        self.limit -= 1

    def disturbed(self) -> None:
        self.observed.append("disturbed")


def running(n: int, taken_s: float = 0.0) -> EngineLoad:
    return EngineLoad(n, 0, 0.5, taken_s=taken_s)


def roster_of(*engines: FakeEngine) -> EngineRoster:
    roster = EngineRoster(lambda: 0, limit=100)
    for engine in engines:
        roster.add(engine)
    return roster


async def followed(roster: EngineRoster, controller: ConcurrencyController, until) -> None:
    await asyncio.sleep(0)
    following = asyncio.create_task(follow_load(roster, controller, every_s=0.01))
    async with asyncio.timeout(60):
        while not until():
            assert not following.done()
            await asyncio.sleep(0.005)
    following.cancel()
    await asyncio.wait({following})
    assert following.cancelled()


def test_engines_that_fail_or_are_late_are_left_out(monkeypatch):
    monkeypatch.setattr(serving, "SAMPLE_TIMEOUT_S", 0.05)
    engines = [
        FakeEngine("a", running(1)),
        FakeEngine("b", EngineLost("gone")),
        FakeEngine("c", None),
        FakeEngine("d", EngineError("HTTP 500")),
        FakeEngine("e", running(5)),
    ]
    assert clock.run(sample(engines)) == {"a": running(1), "e": running(5)}
    assert clock.run(sample([])) == {}


def test_what_the_controller_decides_becomes_the_limit_of_the_roster():
    async def main():
        engine = FakeEngine("a", *(running(n, taken_s=n) for n in range(20)))
        roster, controller = roster_of(engine), Controller()
        await followed(roster, controller, lambda: len(controller.observed) == 3)
        assert controller.observed == [([0], 0), ([1], 0), ([2], 0)]
        assert roster.limit == controller.limit == 97

    clock.run(main())


def test_a_sample_that_repeats_the_last_one_is_no_observation():
    async def main():
        engines = (
            FakeEngine("a", running(1, 1.0), running(1, 1.0), running(2, 2.0)),
            FakeEngine("b", running(5, 1.0)),
        )
        controller = Controller()
        await followed(roster_of(*engines), controller, lambda: len(controller.observed) == 4)
        assert controller.observed == [([1, 5], 0), ([], 0), ([2], 0), ([], 0)]

    clock.run(main())


def test_a_failed_sample_changes_nothing_and_the_next_one_counts():
    async def main():
        engine = FakeEngine("a", EngineLost("gone"), EngineError("no"), running(3, 1.0))
        controller = ConcurrencyController(maximum=100)
        roster = roster_of(engine)
        await followed(roster, controller, lambda: engine.asked > 4)
        assert roster.limit == 100

    clock.run(main())


def test_a_new_version_tells_the_controller_of_the_disturbance():
    async def main():
        engine = FakeEngine("a", running(1))
        roster, controller = roster_of(engine), Controller()
        roster._version = lambda: 1 if len(controller.observed) >= 2 else 0

        def until() -> bool:
            return len(controller.observed) >= 5

        await followed(roster, controller, until)
        assert controller.observed.count("disturbed") == 1

    clock.run(main())


def test_full_memory_lowers_the_limit_of_the_roster():
    async def main():
        roster, controller = roster_of(FakeEngine("a", FULL)), ConcurrencyController(maximum=100)
        roster.joined("collector")
        roster.reported("collector", PoolStatus(in_use=100))
        await followed(roster, controller, lambda: roster.limit < 100)
        assert roster.limit == 80

    clock.run(main())
