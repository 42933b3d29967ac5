"""The roster: every change is a record that all collectors follow, and nobody waits for one that does not."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from slipstream.backend.simulate import clock
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import EngineAddress, EngineLost
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.roster import RECORDS_OF_AN_EPOCH, EngineRoster
from slipstream.rollout.engine.routing import LostEngine, PoolStatus
from slipstream.rollout.system.key import Key
from slipstream.rollout.tokens.trajectory import Finish
from tests.unit.doubles import Collector
from tests.unit.driven_pool import settle


class ControlClient:
    """The driver's client of one start of a server."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = EngineAddress(name, f"http://{name}", 1, 100, 100, timeout_s=60)


class Generator:
    """A collector's client, whose requests grow and end when the test says so."""

    def __init__(self) -> None:
        self.requests: dict[asyncio.Future, tuple] = {}

    async def generate(self, input_ids, sampling, completion, *, greedy, cache_key, version, grown) -> None:
        future = asyncio.get_running_loop().create_future()
        self.requests[future] = (completion, version, grown)
        try:
            await future
        finally:
            del self.requests[future]

    def grow(self) -> None:
        for completion, version, grown in self.requests.values():
            completion.add(version, [1], [-1.0])
            grown()

    def end(self, outcome: Exception | None = None) -> None:
        for future, (completion, _, _) in self.requests.items():
            if outcome is not None:
                future.set_exception(outcome)
            else:
                completion.finish = Finish.STOP
                future.set_result(None)

    async def close(self) -> None:
        self.end(EngineLost("closed"))


class Generating(Collector):
    """A collector with clients that the test can reach by the names of their engines."""

    def __init__(self, roster: EngineRoster, name: str = "collector") -> None:
        self.clients: dict[str, Generator] = {}
        super().__init__(roster, name, connect=self._connect)

    def _connect(self, address: EngineAddress) -> Generator:
        return self.clients.setdefault(address.name, Generator())

    def start(self, grown=None) -> asyncio.Task[None]:
        sampling = SamplingConfig(max_new_tokens=9)
        return asyncio.create_task(self.pool.generate([7], sampling, GrowingCompletion(), grown=grown))


def make(*clients: ControlClient, limit: int = 8, follow_timeout_s: float = 60.0, **more) -> EngineRoster:
    roster = EngineRoster(lambda: 0, limit=limit, follow_timeout_s=follow_timeout_s, **more)
    for client in clients:
        roster.add(client)
    return roster


async def stop(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


# ---- records


def test_collectors_hear_of_the_judges_engines_and_gateways_do_not():
    async def main():
        roster = make(ControlClient("a"))
        Generating(roster)
        roster.joined("gateway", limit=4)
        judge = ControlClient("judge-engine-0").address
        before = roster.number
        roster.judge_serves((judge,))
        assert roster.number > before
        assert roster.routing_for("collector").judge == (judge,)
        assert [engine.address.name for engine in roster.routing_for("collector").engines] == ["a"]
        assert roster.routing_for("gateway").judge == ()

    clock.run(main())


def test_all_changes_of_one_tick_are_sent_once_and_as_the_whole_truth():
    async def main():
        a, b = ControlClient("a"), ControlClient("b")
        roster = make(a)
        collector = Generating(roster)
        await settle()
        collector.records.clear()
        roster.add(b)
        roster.limit = 3
        roster._version = lambda: 2
        roster.announce()
        roster.remove(a)
        await settle()
        (record,) = collector.records
        assert record.number == roster.number == collector.pool.status().number
        assert (record.version, record.limit, record.held) == (2, 3, False)
        assert [engine.address for engine in record.engines] == [b.address]

    clock.run(main())


def test_changes_that_change_nothing_are_not_sent():
    async def main():
        client = ControlClient("a")
        roster = make(client)
        number = roster.number
        roster.add(client)
        roster.trust(client)
        roster.limit = roster.limit
        roster.remove(ControlClient("b"))
        assert roster.number == number

    clock.run(main())


def test_a_server_that_was_started_again_has_a_later_life():
    async def main():
        first, second = ControlClient("a"), ControlClient("a")
        roster = make(first)
        roster.joined("collector")
        (old,) = roster.routing_for("collector").engines
        roster.remove(first)
        roster.add(second)
        (new,) = roster.routing_for("collector").engines
        assert new.life > old.life

    clock.run(main())


def test_records_of_the_next_driver_are_newer_than_all_of_the_one_before():
    """A gateway goes on while the driver is started again."""

    async def main():
        before = make(ControlClient("a"), epoch=3)
        for _ in range(100):
            before.announce()
        after = make(ControlClient("a"), epoch=4)
        assert 3 * RECORDS_OF_AN_EPOCH < before.number < after.number
        for roster in (before, after):
            roster.joined("gateway")
        lives = [roster.routing_for("gateway").engines[0].life for roster in (before, after)]
        assert lives[0] < lives[1]

    clock.run(main())


@pytest.mark.parametrize("collectors", [1, 2, 3, 7])
@pytest.mark.parametrize("limit", [7, 8, 100])
def test_the_shares_of_the_limit_add_up_to_the_limit_and_are_as_equal_as_they_can_be(collectors, limit):
    async def main():
        roster = make(limit=limit)
        names = [f"collector-{number}" for number in range(collectors)]
        for name in names:
            roster.joined(name)
        shares = [roster.routing_for(name).limit for name in names]
        assert sum(shares) == limit
        assert max(shares) - min(shares) <= 1
        for name in names[1:]:
            roster.left(name)
        assert roster.routing_for(names[0]).limit == limit

    clock.run(main())


def test_every_collector_may_run_a_request_although_there_are_more_of_them_than_the_limit():
    async def main():
        roster = make(limit=2)
        for name in "abc":
            roster.joined(name)
        assert [roster.routing_for(name).limit for name in "abc"] == [1, 1, 1]

    clock.run(main())


def test_collectors_begin_with_different_engines_and_all_have_all_of_them():
    """Each prefers the first of equally loaded engines: else the first engine would get most."""

    async def main():
        roster = make(*(ControlClient(name) for name in "abcd"))
        for name in ("x", "y"):
            roster.joined(name)
        orders = [[engine.address.name for engine in roster.routing_for(name).engines] for name in ("x", "y")]
        assert orders == [["a", "b", "c", "d"], ["c", "d", "a", "b"]]

    clock.run(main())


def test_a_collector_is_given_the_keys_of_the_servers_and_shows_them_to_nobody():
    async def main():
        client = ControlClient("a")
        client.address = replace(client.address, key=Key("secret"))
        collector = Generating(make(client))
        await settle()
        (engine,) = collector.records[-1].engines
        assert engine.address == client.address
        assert engine.address.key.header == "Bearer secret"
        assert "secret" not in repr(collector.records[-1])

    clock.run(main())


# ---- losses


def test_an_engine_is_condemned_once():
    async def main():
        client = ControlClient("a")
        roster = make(client)
        roster.condemn(client, "first")
        roster.condemn(client, "second")
        assert roster.clients == []
        assert roster.lost.get_nowait() == (client, "first")
        assert roster.lost.empty()

    clock.run(main())


def test_an_engine_that_any_collector_has_lost_is_given_up_everywhere():
    async def main():
        a, b = ControlClient("a"), ControlClient("b")
        roster = make(a)
        first, second = Generating(roster, "first"), Generating(roster, "second")
        await settle()
        requests = [first.start(), second.start()]
        await settle()
        roster.add(b)
        first.clients["a"].end(EngineLost("gone"))
        await settle()
        assert roster.lost.get_nowait() == (a, "it does not answer")
        assert roster.clients == [b]
        for collector in (first, second):
            assert [engine.address.name for engine in collector.records[-1].engines] == ["b"]
            assert collector.pool.status().lost == ()
            assert len(collector.clients["b"].requests) == 1, "its request has gone on"
        await stop(*requests)

    clock.run(main())


def test_a_late_report_of_a_loss_does_not_condemn_the_next_start_of_the_server():
    async def main():
        old, new = ControlClient("a"), ControlClient("a")
        roster = make(old)
        roster.joined("slow")
        (engine,) = roster.routing_for("slow").engines
        roster.remove(old)
        late = PoolStatus(lost=(LostEngine("a", engine.life, "it does not answer"),))
        roster.reported("slow", late)
        roster.add(new)
        roster.reported("slow", late)
        assert roster.clients == [new]
        assert roster.lost.empty()

    clock.run(main())


def test_reports_of_a_collector_that_has_left_count_no_more():
    async def main():
        client = ControlClient("a")
        roster = make(client)
        roster.joined("gone")
        (engine,) = roster.routing_for("gone").engines
        roster.left("gone")
        roster.reported("gone", PoolStatus(in_use=5, lost=(LostEngine("a", engine.life, "why"),)))
        assert roster.clients == [client]
        assert roster.in_use == 0

    clock.run(main())


# ---- doubt


def test_doubt_is_in_force_everywhere_before_it_returns():
    async def main():
        client, told = ControlClient("a"), []
        roster = make(client)
        quick, slow = Generating(roster, "quick"), Generating(roster, "slow")
        await settle()
        requests = [
            collector.start(lambda name=collector.name: told.append(name)) for collector in (quick, slow)
        ]
        await settle()
        slow.hears = False
        doubting = asyncio.create_task(roster.doubt(1))
        await settle()
        for collector in (quick, slow):
            collector.clients["a"].grow()
        assert told == ["slow"]
        assert not doubting.done(), "weights that are published now would be trusted by the slow one"
        slow.hear()
        await asyncio.wait_for(doubting, 1)
        for collector in (quick, slow):
            collector.clients["a"].grow()
        assert told == ["slow"]
        roster.trust(client)
        await settle()
        assert sorted(told[1:]) == ["quick", "slow"], "what was held back is handed on with the verdict"
        for collector in (quick, slow):
            collector.clients["a"].grow()
        assert told[3:] == ["quick", "slow"]
        await stop(*requests)

    clock.run(main())


def test_doubt_without_collectors_is_in_force_at_once():
    async def main():
        client = ControlClient("a")
        roster = make(client)
        await asyncio.wait_for(roster.doubt(1), 1)
        assert roster.doubted(client) == 1

    clock.run(main())


def test_the_first_unverified_version_stays_in_doubt_until_it_is_trusted():
    async def main():
        client, late = ControlClient("a"), ControlClient("late")
        roster = make(client)
        await roster.doubt(5)
        roster.add(late)
        await roster.doubt(6)
        assert (roster.doubted(client), roster.doubted(late)) == (5, 6)

    clock.run(main())


def test_a_collector_that_joins_meanwhile_is_not_waited_for_as_its_first_record_says_it_all():
    async def main():
        roster = make(ControlClient("a"))
        slow = Generating(roster)
        await settle()
        slow.hears = False
        doubting = asyncio.create_task(roster.doubt(1))
        await settle()
        roster.joined("new")
        (engine,) = roster.routing_for("new").engines
        assert engine.doubted == 1
        slow.hear()
        await asyncio.wait_for(doubting, 1)

    clock.run(main())


def test_a_collector_that_dies_while_the_driver_waits_for_it_is_not_waited_for():
    async def main():
        roster = make(ControlClient("a"))
        alive, dying = Generating(roster, "alive"), Generating(roster, "dying")
        await settle()
        dying.hears = False
        doubting = asyncio.create_task(roster.doubt(1))
        await settle()
        assert not doubting.done()
        dying.leave()
        await asyncio.wait_for(doubting, 1)
        assert not alive.lags
        assert not dying.lags

    clock.run(main())


def test_a_collector_that_does_not_follow_in_time_is_reported_and_not_waited_for_any_longer(caplog):
    async def main():
        roster = make(ControlClient("a"), follow_timeout_s=0.05)
        alive, silent = Generating(roster, "alive"), Generating(roster, "silent")
        await settle()
        silent.hears = False
        roster.reported("silent", PoolStatus(roster.number, running=1))
        await asyncio.wait_for(roster.doubt(1), 1)
        assert (alive.lags, silent.lags) == (False, True)
        assert f"silent does not follow routing record {roster.number} within 0.05 s" in caplog.text
        silent.lags = False
        drained = roster.drained(timeout_s=60)
        for waiting in (roster.doubt(2), drained.__aenter__()):
            task = asyncio.ensure_future(waiting)
            await settle()
            assert task.done()
        await asyncio.sleep(0.1)
        assert not silent.lags, "it is reported once"
        await drained.__aexit__(None, None, None)

    clock.run(main())


def test_a_gateway_that_stands_still_is_waited_for_no_longer_than_a_gateway_may_take():
    async def main():
        roster = make(ControlClient("a"), follow_timeout_s=60.0, gateway_timeout_s=0.05)
        lagging: list[str] = []
        roster.subscribe(lambda: None, lagging.append)
        collector = Generating(roster, "collector")
        roster.joined("gateway", limit=4)
        await settle()
        collector.hears = False
        doubting = asyncio.create_task(roster.doubt(1))
        await asyncio.sleep(0.1)
        assert lagging == ["gateway"], "a collector has more time"
        assert not doubting.done()
        collector.hear()
        await asyncio.wait_for(doubting, 1)
        assert not collector.lags

    clock.run(main())


def test_a_collector_that_follows_late_but_in_time_is_not_reported():
    async def main():
        roster = make(ControlClient("a"), follow_timeout_s=0.4)
        slow = Generating(roster)
        await settle()
        for _ in range(4):
            slow.hears = False
            roster.announce()
            await asyncio.sleep(0.1)
            slow.hear()
            await settle()
        await asyncio.sleep(0.45)
        assert not slow.lags

    clock.run(main())


# ---- draining


def test_draining_waits_for_the_requests_of_all_collectors_while_new_ones_wait():
    async def main():
        roster = make(ControlClient("a"))
        collectors = [Generating(roster, "first"), Generating(roster, "second")]
        await settle()
        old = [collector.start() for collector in collectors]
        await settle()
        drained = roster.drained(timeout_s=60)
        entering = asyncio.create_task(drained.__aenter__())
        await settle()
        new = [collector.start() for collector in collectors]
        await settle()
        collectors[0].clients["a"].end()
        await settle()
        assert not entering.done(), "the other collector is not idle yet"
        collectors[1].clients["a"].end()
        await asyncio.wait_for(entering, 1)
        await asyncio.gather(*old)
        assert [len(collector.clients["a"].requests) for collector in collectors] == [0, 0]
        await drained.__aexit__(None, None, None)
        await settle()
        assert [len(collector.clients["a"].requests) for collector in collectors] == [1, 1]
        await stop(*new)

    clock.run(main())


def test_draining_does_not_begin_before_every_collector_holds_its_requests_back():
    """One that has not heard of it runs nothing now, and may start a request the next moment."""

    async def main():
        roster = make(ControlClient("a"))
        slow = Generating(roster)
        await settle()
        slow.hears = False
        drained = roster.drained(timeout_s=0.01)
        entering = asyncio.create_task(drained.__aenter__())
        await asyncio.sleep(0.05)
        assert not entering.done()
        slow.hear()
        await asyncio.wait_for(entering, 1)
        await drained.__aexit__(None, None, None)

    clock.run(main())


def test_draining_goes_on_without_requests_that_take_too_long(caplog):
    async def main():
        roster = make(ControlClient("a"))
        collector = Generating(roster)
        await settle()
        request = collector.start()
        await settle()
        async with roster.drained(timeout_s=0.02):
            assert len(collector.clients["a"].requests) == 1
        assert "1 requests outlast 0 s of draining" in caplog.text
        await stop(request)

    clock.run(main())


def test_draining_continues_after_the_update_what_was_interrupted_during_it():
    async def main():
        roster = make(ControlClient("a"))
        collector = Generating(roster)
        await settle()
        request = collector.start()
        await settle()
        async with asyncio.timeout(60):
            drained = roster.drained(timeout_s=60)
            entering = asyncio.create_task(drained.__aenter__())
            await settle()
            collector.clients["a"].grow()
            collector.clients["a"].end(EngineLost("gone"))
            await entering
            roster.add(ControlClient("b"))
            await settle()
            assert not collector.clients["b"].requests
            await drained.__aexit__(None, None, None)
            await settle()
            collector.clients["b"].grow()
            collector.clients["b"].end()
            await request
        assert collector.pool.tokens_generated == 2

    clock.run(main())


def test_draining_idle_engines_takes_no_time_and_an_error_ends_it():
    async def main():
        roster = make(ControlClient("a"))
        collector = Generating(roster)

        async def fail() -> None:
            async with asyncio.timeout(60), roster.drained(timeout_s=60):
                raise KeyError

        with pytest.raises(KeyError):
            await fail()
        async with asyncio.timeout(60), roster.drained(timeout_s=60):
            assert collector.pool.held
        await settle()
        assert not collector.pool.held

    clock.run(main())


# ---- totals


def test_totals_are_of_all_collectors_also_of_those_that_are_gone():
    async def main():
        roster = make()
        for name in ("first", "second"):
            roster.joined(name)
        roster.reported("first", PoolStatus(1, 3, 2, 10, 4, 1))
        roster.reported("second", PoolStatus(1, 2, 1, 5, 1, 2))
        assert roster.in_use == 5
        roster.left("first")
        roster.left("first")
        roster.reported("second", PoolStatus(1, 2, 1, 7, 1, 2))
        assert roster.in_use == 2
        assert (roster.tokens_generated, roster.tokens_continued, roster.requests_resent) == (17, 5, 3)

    clock.run(main())


def test_what_users_get_counts_as_generated_and_not_as_requests_of_rollouts():
    """The controller of concurrency sets rollouts alone against their limit."""

    async def main():
        roster = make()
        roster.joined("collector")
        roster.joined("gateway", limit=64)
        roster.reported("collector", PoolStatus(1, 3, 2, 10, 4, 1))
        roster.reported("gateway", PoolStatus(1, 20, 18, 100, 30, 2))
        assert (roster.in_use, roster.live_in_use) == (3, 20)
        roster.left("gateway")
        assert (roster.in_use, roster.live_in_use) == (3, 0)
        assert (roster.tokens_generated, roster.tokens_continued, roster.requests_resent) == (110, 34, 3)

    clock.run(main())


def test_two_collectors_of_one_name_are_a_mistake():
    async def main():
        roster = make()
        roster.joined("same")
        with pytest.raises(ValueError, match="there is a collector same already"):
            roster.joined("same")

    clock.run(main())
