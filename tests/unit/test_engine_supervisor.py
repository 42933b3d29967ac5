"""The supervisor: engines are started, synced, watched and restarted, each server judged for itself."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from slipstream.backend.simulate import clock
from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine import roster, supervisor
from slipstream.rollout.engine.client import EngineAddress, EngineLost
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import PoolStatus, Suspect
from slipstream.rollout.engine.supervisor import EngineCounts, EngineGone, Supervisor
from slipstream.rollout.system.restarts import NodeLost, RestartLimit
from tests.unit.doubles import Collector
from tests.unit.driven_pool import settle


class FakeHandle:
    """A server without a process: it starts when allowed, and exits when the test says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts = 0
        self.stops = 0
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.start_errors: list[Exception | None] = []
        self.may_move = asyncio.Event()
        self.node: str | None = f"{name}'s first node"
        self.unfit: list[str] = []
        self.found = ""
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def placed(self) -> str:
        if self.node is None:
            await self.may_move.wait()
            self.may_move.clear()
            self.node = "another node"
        return self.node

    def give_up_place(self, *, unfit: bool) -> None:
        assert self.node is not None
        if unfit:
            self.unfit.append(self.node)
        self.node = None

    async def start(self) -> EngineAddress:
        self.starts += 1
        await self.may_start.wait()
        if self.start_errors and (error := self.start_errors.pop(0)) is not None:
            raise error
        self._exited = asyncio.get_running_loop().create_future()
        return EngineAddress(self.name, f"http://127.0.0.1:{self.starts}", 1, 100, 100, timeout_s=60)

    async def wait_exit(self) -> int:
        return await asyncio.shield(self._exited)

    async def stands(self) -> str:
        return self.found

    async def stop(self) -> None:
        self.stops += 1

    def exit(self, code: int) -> None:
        self._exited.set_result(code)


class World:
    """A supervisor over fake handles, with a roster, a collector and a sync that the test controls."""

    def __init__(self, n: int, restarts: int | None, pause_s: float = 0.0, **counts: float) -> None:
        self.handles = [FakeHandle(f"engine-{i}") for i in range(n)]
        first = int(counts.get("first", n))
        for handle in self.handles[first:]:
            handle.node = None
        self.roster = EngineRoster(lambda: 0, limit=8)
        self.pool = Collector(self.roster).pool
        self.notes: list[str] = []
        self.synced: list[str] = []
        self.refusals: list[str | Exception | None] = []
        self.may_sync = asyncio.Event()
        self.may_sync.set()
        self.serving = asyncio.Event()
        self.unwell: asyncio.Queue[str] = asyncio.Queue()
        """Why a server is not well, when the test says so."""
        self.supervisor = Supervisor(
            self.handles,
            self.roster,
            self,
            limit=RestartLimit("rollout.engine.restarts", restarts, 86400.0, "it has not served"),
            counts=EngineCounts(
                first,
                int(counts.get("fewest", 1)),
                int(counts.get("most", n)),
                counts.get("patience_s", 60.0),
            ),
            note=self.notes.append,
            watch=lambda client: self.unwell.get(),
            pause_s=pause_s,
        )

    async def bring_up_to_date(self, address, admit):
        await self.may_sync.wait()
        self.synced.append(address.url)
        refused = self.refusals.pop(0) if self.refusals else None
        if isinstance(refused, Exception):
            raise refused
        if refused is None:
            admit()
        return refused

    async def generate(self) -> None:
        """Send a request to whatever engine serves."""
        await self.pool.generate([1], SamplingConfig(max_new_tokens=1), GrowingCompletion())

    @property
    def handle(self) -> FakeHandle:
        return self.handles[0]

    @property
    def urls(self) -> list[str]:
        """Where the engines of the roster are: the port of a fake server is the number of its start."""
        return [client.address.url for client in self.roster.clients]


async def until(condition, timeout_s: float = 60.0) -> None:
    """Poll, for the tests' own sake: everything under test is event driven."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def supervised(n: int = 1, restarts: int | None = 3, pause_s: float = 0.0, **counts: float):
    world = World(n, restarts, pause_s, **counts)
    running = asyncio.create_task(world.supervisor.run(world.serving))
    world.running = running
    try:
        yield world
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def failure(world: World) -> Exception:
    """What ends the supervisor's run, which comes in an ExceptionGroup."""
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as caught:
            await world.running
    (error,) = caught.value.exceptions
    return error


def test_all_engines_serve_before_the_run_begins():
    async def main():
        async with supervised(n=2) as world:
            world.handles[1].may_start.clear()
            await settle()
            assert len(world.urls) == 1
            assert not world.serving.is_set()
            world.handles[1].may_start.set()
            await asyncio.wait_for(world.serving.wait(), 60)
            assert len(world.urls) == 2
            assert world.supervisor.restarts == 0
            assert world.notes == []

    clock.run(main())


def test_an_engine_is_in_the_roster_only_after_it_is_synced():
    async def main():
        async with supervised() as world:
            world.may_sync.clear()
            await settle()
            assert world.handle.starts == 1
            assert world.urls == []
            world.may_sync.set()
            await settle()
            assert len(world.urls) == 1

    clock.run(main())


def test_a_server_that_exits_is_started_again_and_synced_anew():
    async def main():
        async with supervised() as world:
            await world.serving.wait()
            world.may_sync.clear()
            world.handle.exit(-9)
            await until(lambda: world.handle.starts == 2)
            assert world.urls == []
            world.may_sync.set()
            await until(lambda: world.urls)
            assert world.synced == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
            assert world.urls == ["http://127.0.0.1:2"]
            assert world.notes == ["engine-0 is started again: its server exited with code -9"]
            assert world.supervisor.restarts == 1

    clock.run(main())


def test_a_condemned_engine_leaves_the_roster_and_is_started_again():
    async def main():
        async with supervised(n=2) as world:
            await world.serving.wait()
            world.supervisor.condemn("engine-1", "receive of version 3: no answer")
            await until(lambda: world.handles[1].starts == 2)
            await until(lambda: len(world.urls) == 2)
            assert world.handles[0].starts == 1
            assert world.notes == ["engine-1 is started again: receive of version 3: no answer"]

    clock.run(main())


def test_a_server_that_stands_still_is_started_again_although_nobody_asks_it_for_anything():
    async def main():
        async with supervised() as world:
            await world.serving.wait()
            world.unwell.put_nowait("it does not say that it is well")
            await until(lambda: world.urls == ["http://127.0.0.1:2"])
            assert world.notes == ["engine-0 is started again: it does not say that it is well"]

    clock.run(main())


def test_an_engine_that_hangs_is_shown_and_it_alone_is_started_again():
    async def main():
        async with supervised(n=2) as world:
            await world.serving.wait()
            served: list[list[str]] = []

            async def stands() -> str:
                served.append(world.urls)
                return "; sglang::scheduler (process 7) is stopped by a signal (stacks of its processes: F)"

            world.handles[1].stands = stands
            world.supervisor.condemn("engine-1", "send for version 3: no answer in 30 s")
            await until(lambda: world.handles[1].starts == 2 and len(world.urls) == 2)
            assert world.handles[0].starts == 1
            assert [len(urls) for urls in served] == [1], "no request waits for what is being looked at"
            assert world.notes == [
                "engine-1 is started again: send for version 3: no answer in 30 s; sglang::scheduler "
                "(process 7) is stopped by a signal (stacks of its processes: F)"
            ]

    clock.run(main())


@pytest.mark.parametrize("when", ["serving", "syncing", "starting"])
def test_an_engine_that_gives_way_leaves_whatever_it_does_and_returns_to_another_node(when: str):
    async def main():
        async with supervised(n=2, restarts=0, fewest=1) as world:
            await world.serving.wait()
            assert world.supervisor.to_spare == 1
            engine = world.handles[1]
            if when != "serving":
                (world.may_sync if when == "syncing" else engine.may_start).clear()
                world.roster.condemn(world.roster.clients[1], "no answer")
                world.supervisor._engines["engine-1"].restarts._limit = RestartLimit("r", 9, 60.0, "served")
                await until(lambda: engine.starts == 2)
            async with asyncio.timeout(60):
                await world.supervisor.give_way(["engine-1"], "it gives way to the trainer")
            assert engine.node is None
            assert engine.unfit == []
            assert len(world.urls) == 1
            assert world.supervisor.to_spare == 0
            assert "engine-1 has left its node: it gives way to the trainer; 1 engine left" in world.notes
            world.may_sync.set()
            engine.may_start.set()
            engine.may_move.set()
            await until(lambda: len(world.urls) == 2)
            assert engine.node == "another node"

    clock.run(main())


def test_an_engine_that_does_not_give_way_in_time_is_killed_and_returns_to_another_node(monkeypatch):
    async def main():
        async with supervised(n=2, restarts=0, fewest=1) as world:
            await world.serving.wait()
            engine, begun, released = world.handles[1], asyncio.Event(), asyncio.Event()

            async def held_up(address, admit):
                admit()
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await released.wait()  # as a connection that does not close

            sync, world.bring_up_to_date = world.bring_up_to_date, held_up
            world.supervisor._engines["engine-1"].restarts._limit = RestartLimit("r", 9, 60.0, "served")
            world.supervisor.condemn("engine-1", "no answer")
            await asyncio.wait_for(begun.wait(), 10)
            world.bring_up_to_date = sync
            monkeypatch.setattr(supervisor, "GIVE_WAY_S", 0.05)
            async with asyncio.timeout(10):
                await world.supervisor.give_way(["engine-1"], "it gives way to the trainer")
            assert engine.node is None, "the trainer may have it"
            assert len(world.urls) == 1, "no request goes to it"
            left = "engine-1 has left its node: it gives way to the trainer"
            late = "it had not ended what it did after 0.05 s, and was killed"
            assert f"{left}; {late}; 1 engine left" in world.notes
            engine.may_move.set()
            released.set()
            await until(lambda: engine.node == "another node" and len(world.urls) == 2)
            assert sum(note.startswith(left) for note in world.notes) == 1

    asyncio.run(main())


def test_the_first_verdict_on_an_engine_is_the_one_reported():
    async def main():
        async with supervised() as world:
            await world.serving.wait()
            world.supervisor.condemn("engine-0", "it missed version 3")
            world.supervisor.condemn("engine-0", "it does not answer")
            await until(lambda: world.notes)
            assert world.notes == ["engine-0 is started again: it missed version 3"]

    clock.run(main())


def test_the_exit_code_is_reported_rather_than_what_the_clients_noticed():
    async def main():
        async with supervised() as world:
            await world.serving.wait()
            world.supervisor.condemn("engine-0", "it does not answer")
            await asyncio.sleep(0.05)
            world.handle.exit(137)
            await until(lambda: world.notes)
            assert world.notes == ["engine-0 is started again: its server exited with code 137"]

    clock.run(main())


def test_an_engine_whose_request_is_lost_is_started_again():
    async def main():
        async with supervised() as world:
            await world.serving.wait()
            request = asyncio.create_task(world.generate())
            await until(lambda: world.handle.starts == 2)  # nothing listens there
            assert world.notes == ["engine-0 is started again: it does not answer"]
            request.cancel()

    asyncio.run(main())


def test_engines_that_are_lost_under_requests_of_users_do_not_end_the_run():
    async def main():
        async with supervised(restarts=1) as world:
            await world.serving.wait()
            world.roster.joined("gateway", limit=8)
            for start in range(1, 5):
                await until(lambda start=start: world.handle.starts == start and world.urls)
                (engine,) = world.roster.routing_for("gateway").engines
                suspects = (Suspect("engine-0", engine.life, "request 5 of the key anna"),)
                world.roster.reported("gateway", PoolStatus(suspects=suspects))
                world.handle.exit(1)
            await until(lambda: world.handle.starts == 5)
            assert world.supervisor.restarts == 4
            assert (
                world.notes
                == [
                    "engine-0 is started again: its server exited with code 1, while it ran request 5 of the "
                    "key anna: not counted as a failure of the run"
                ]
                * 4
            )

    clock.run(main())


def test_losses_without_requests_of_users_are_counted_beside_a_gateway(monkeypatch):
    async def main():
        async with supervised(restarts=1) as world:
            await world.serving.wait()
            world.roster.joined("gateway", limit=8)
            world.roster.reported("gateway", PoolStatus(suspects=(Suspect("engine-0", 0, "long ago"),)))
            world.handle.exit(1)
            await until(lambda: world.handle.starts == 2 and world.urls)
            world.handle.exit(1)
            assert isinstance(await failure(world), EngineGone)

    monkeypatch.setattr(roster, "REPORT_S", 0.01)
    clock.run(main())


def test_a_late_loss_of_the_old_server_does_not_condemn_the_new_one():
    """Requests that were running on a server end as lost when its client is closed: as the next one starts.

    Counting them against it would start it again, and again, until the budget is used up.
    """

    async def main():
        async with supervised(restarts=1) as world:
            await world.serving.wait()
            (old,) = world.roster.clients
            world.handle.may_start.clear()
            world.handle.exit(1)
            await until(lambda: world.handle.starts == 2)
            world.roster.lost.put_nowait((old, "it does not answer"))
            await settle()
            world.handle.may_start.set()
            await until(lambda: world.urls)
            world.roster.lost.put_nowait((old, "it does not answer"))
            await asyncio.sleep(0.6)  # a verdict takes up to half a second to act
            assert world.handle.starts == 2
            assert world.urls == ["http://127.0.0.1:2"]
            assert not world.running.done()

    clock.run(main())


def test_a_late_verdict_by_name_does_not_condemn_the_server_that_is_starting():
    async def main():
        async with supervised(restarts=1) as world:
            await world.serving.wait()
            world.handle.may_start.clear()
            world.handle.exit(1)
            await until(lambda: world.handle.starts == 2)
            world.supervisor.condemn("engine-0", "it missed version 3")
            world.handle.may_start.set()
            await until(lambda: world.urls)
            await asyncio.sleep(0.6)
            assert world.urls == ["http://127.0.0.1:2"]
            assert not world.running.done()

    clock.run(main())


def test_running_requests_of_a_condemned_engine_are_ended_and_cost_it_one_restart():
    """With real clients: the old server accepts requests and never answers."""

    async def main():
        asked = 0

        async def silent(reader, writer):
            nonlocal asked
            await reader.readline()
            asked += 1
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, supervised(restarts=1) as world:

            async def start():
                world.handle.starts += 1
                return EngineAddress("engine-0", url, 1, 100, 100, timeout_s=60)

            world.handle.start = start
            await world.serving.wait()
            requests = [asyncio.create_task(world.generate()) for _ in range(5)]
            await until(lambda: asked == 5)
            world.supervisor.condemn("engine-0", "it missed version 3")
            await until(lambda: world.handle.starts == 2)
            await until(lambda: world.pool.requests_resent == 5)
            await asyncio.sleep(0.6)
            assert world.handle.starts == 2
            assert len(world.urls) == 1
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    asyncio.run(main())


def test_an_engine_that_is_lost_as_soon_as_it_is_admitted_is_noticed():
    """Also before the supervisor has seen the end of the sync."""

    async def main():
        async with supervised() as world:
            sync = world.bring_up_to_date

            async def lost_at_once(address, admit):
                refused = await sync(address, admit)
                if world.handle.starts == 1:
                    (client,) = world.roster.clients
                    world.roster.remove(client)
                    world.roster.lost.put_nowait((client, "it does not answer"))
                    await settle()
                return refused

            world.bring_up_to_date = lost_at_once
            await until(lambda: world.handle.starts == 2 and world.urls)
            assert world.urls == ["http://127.0.0.1:2"]

    clock.run(main())


def test_an_engine_that_lost_a_request_is_in_the_roster_once_after_its_restart():
    async def main():
        async with supervised() as world:
            await world.serving.wait()
            (client,) = world.roster.clients
            world.roster.remove(client)
            world.roster.lost.put_nowait((client, "it does not answer"))
            world.handle.exit(1)
            await until(lambda: world.urls == ["http://127.0.0.1:2"])
            await asyncio.sleep(0.6)
            assert world.urls == ["http://127.0.0.1:2"]
            assert world.supervisor.restarts == 1

    clock.run(main())


def test_a_refused_sync_is_a_restart():
    async def main():
        async with supervised() as world:
            world.refusals = ["join for version 4: no answer"]
            await asyncio.wait_for(world.serving.wait(), 60)
            assert world.handle.starts == 2
            assert world.urls == ["http://127.0.0.1:2"]
            (note,) = world.notes
            assert "could not be brought to the current version: join for version 4" in note

    clock.run(main())


def test_a_sync_that_raises_ends_the_run():
    """Only the trainer raises there, and it holds the policy."""

    async def main():
        async with supervised() as world:
            world.refusals = [RuntimeError("the trainer is gone")]
            assert str(await failure(world)) == "the trainer is gone"
            assert world.urls == []

    clock.run(main())


@pytest.mark.parametrize("restarts", [0, 2])
def test_an_engine_that_fails_too_often_ends_the_run(restarts):
    async def main():
        async with supervised(restarts=restarts) as world:
            for number in range(restarts + 1):
                await until(lambda number=number: world.urls == [f"http://127.0.0.1:{number + 1}"])
                world.handle.exit(number)
            error = await failure(world)
            assert isinstance(error, EngineGone)
            assert str(error).startswith(
                f"engine-0 has failed {'once' if not restarts else '3 times'} within"
            )
            assert str(error).endswith(f"the last time: its server exited with code {restarts}")
            assert world.handle.starts == restarts + 1
            assert world.urls == []

    clock.run(main())


def test_each_engine_has_its_own_budget():
    async def main():
        async with supervised(n=3, restarts=1) as world:
            await world.serving.wait()
            for handle in world.handles:
                handle.exit(1)
            await until(lambda: world.supervisor.restarts == 3 and len(world.urls) == 3)
            assert not world.running.done()

    clock.run(main())


def test_a_first_start_that_fails_ends_the_run_with_its_reason():
    async def main():
        async with supervised() as world:
            world.handle.start_errors = [RuntimeError("no such model")]
            assert str(await failure(world)) == "no such model"
            assert not world.serving.is_set()
            assert world.handle.starts == 1

    clock.run(main())


def test_a_restart_that_fails_is_tried_again_within_the_budget():
    async def main():
        async with supervised(restarts=3) as world:
            await world.serving.wait()
            world.handle.start_errors = [RuntimeError("the port is taken"), RuntimeError("again")]
            world.handle.exit(1)
            await until(lambda: world.urls == ["http://127.0.0.1:4"])
            assert world.notes == [
                "engine-0 is started again: its server exited with code 1",
                "engine-0 is started again: it did not start: the port is taken",
                "engine-0 is started again: it did not start: again",
            ]
            world.handle.exit(1)
            error = await failure(world)
            assert "engine-0 has failed 4 times" in str(error)
            assert str(error).endswith("the last time: its server exited with code 1")

    clock.run(main())


@pytest.mark.parametrize("restarts", [10, None])
def test_an_engine_that_dies_at_each_start_for_the_same_reason_ends_the_run(restarts):
    """Whatever its log says of times, ports and memory."""

    async def main():
        async with supervised(restarts=restarts) as world:
            await world.serving.wait()
            world.handle.start_errors = [
                RuntimeError(
                    "SGLang exited with code 1 while starting; the end of /logs/engine-0.log:\n"
                    f"[12:0{number}] Scheduler hit an exception: Traceback (most recent call last):\n"
                    '  File "/sglang/model_runner.py", line 9, in init\n'
                    f"RuntimeError: port 300{number} is taken"
                )
                for number in range(9)
            ]
            world.handle.exit(1)
            error = await failure(world)
            assert isinstance(error, EngineGone)
            assert "engine-0 has failed twice in the same way, and it has not served in between" in str(error)
            assert "port 3000 is taken" in str(error) and "port 3001" not in str(error)
            assert world.handle.starts == 3

    clock.run(main())


def test_an_engine_that_is_refused_in_the_same_way_again_ends_the_run():
    async def main():
        async with supervised(restarts=10) as world:
            world.refusals = ["join for version 4: no answer", "join for version 5: no answer"]
            error = await failure(world)
            assert "it has not served in between" in str(error)
            assert world.handle.starts == 2

    clock.run(main())


def test_an_engine_that_serves_in_between_is_started_again_after_the_same_failure():
    async def main():
        async with supervised(restarts=10) as world:
            for number in range(1, 6):
                await until(lambda number=number: world.urls == [f"http://127.0.0.1:{number}"])
                world.handle.exit(-9)
            await until(lambda: world.urls == ["http://127.0.0.1:6"])

    clock.run(main())


def test_when_one_engine_ends_the_run_the_others_leave_the_roster():
    async def main():
        async with supervised(n=2, restarts=0) as world:
            await world.serving.wait()
            clients = world.roster.clients
            world.handles[0].exit(1)
            assert isinstance(await failure(world), EngineGone)
            assert world.urls == []
            for client in clients:
                with pytest.raises(EngineLost, match="given up"):
                    await client.resume()

    clock.run(main())


@pytest.mark.parametrize("phase", ["starting", "syncing", "serving", "condemned"])
def test_a_cancelled_supervisor_ends_and_empties_the_roster(phase):
    async def main():
        async with supervised(n=2) as world:
            if phase == "starting":
                world.handle.may_start.clear()
            elif phase == "syncing":
                world.may_sync.clear()
            await settle()
            if phase == "condemned":
                world.supervisor.condemn("engine-0", "why")
                await settle()
            world.running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(world.running, 60)
            assert world.urls == []

    clock.run(main())


def test_a_cancellation_as_the_exit_is_noticed_is_not_swallowed():
    """Else the supervisor would start a server that nobody stops, and never end."""

    async def main():
        for steps in range(12):
            async with supervised() as world:
                await world.serving.wait()
                world.supervisor.condemn("engine-0", "it does not answer")
                await settle()
                world.handle.exit(1)
                for _ in range(steps):
                    await asyncio.sleep(0)
                world.running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(world.running, 60)

    clock.run(main())


def test_stopping_ends_every_server_also_when_one_refuses():
    async def main():
        async with supervised(n=3) as world:
            await world.serving.wait()

            async def refuse():
                raise RuntimeError("its actor is gone")

            world.handles[1].stop = refuse
            world.running.cancel()
            await asyncio.gather(world.running, return_exceptions=True)
            await world.supervisor.stop()
            assert [handle.stops for handle in world.handles] == [1, 0, 1]

    clock.run(main())


def test_an_engine_that_is_withdrawn_is_brought_up_to_date_without_a_restart():
    async def main():
        async with supervised(restarts=0) as world:
            await world.serving.wait()
            [client] = world.roster.clients
            world.may_sync.clear()
            world.roster.withdraw(client, "the trainer has died while it sent weights")
            await until(lambda: world.notes)
            assert world.notes == [
                "engine-0 waits for the next version: the trainer has died while it sent weights"
            ]
            assert not world.urls and client in world.roster.withdrawn
            world.may_sync.set()
            await until(lambda: world.urls)
            assert world.roster.clients == [client] and not world.roster.withdrawn
            assert world.handle.starts == 1
            assert world.synced == [client.address.url] * 2

    clock.run(main())


def test_an_engine_that_dies_while_it_is_withdrawn_is_started_again():
    async def main():
        async with supervised(restarts=1) as world:
            await world.serving.wait()
            [client] = world.roster.clients
            world.refusals = ["it does not answer"]
            world.roster.withdraw(client, "a part of the weights has come")
            await until(lambda: world.handle.starts == 2)
            await until(lambda: world.urls == ["http://127.0.0.1:2"])
            assert not world.roster.withdrawn

    clock.run(main())


def test_without_a_limit_an_engine_is_started_again_as_often_as_it_takes_and_after_a_pause():
    async def main():
        async with supervised(restarts=None, pause_s=0.05) as world:
            await world.serving.wait()
            for number in range(2, 7):
                lost = asyncio.get_running_loop().time()
                world.handle.exit(1)
                await until(lambda number=number: world.urls == [f"http://127.0.0.1:{number}"])
                assert asyncio.get_running_loop().time() - lost >= 0.05
            assert not world.running.done()

    clock.run(main())


def noted(world: World, text: str) -> bool:
    return any(text in note for note in world.notes)


def lose_node(handle: FakeHandle, noticed: str = "exit") -> None:
    lost = NodeLost(f"Ray has lost the node of {handle.name}")
    if noticed == "exit":
        handle._exited.set_exception(lost)
    else:
        handle.start_errors.append(lost)
        handle.exit(-1)


@pytest.mark.parametrize("restarts", [0, 3, None])
@pytest.mark.parametrize("noticed", ["exit", "start"])
def test_engines_whose_nodes_are_lost_wait_for_others_and_the_run_ends_when_no_node_comes(restarts, noticed):
    async def main():
        async with supervised(n=3, restarts=restarts, patience_s=0.2) as world:
            await world.serving.wait()
            if restarts == 0 and noticed == "start":
                return
            for number, handle in enumerate(world.handles):
                lose_node(handle, noticed)
                if number < 2:
                    left = "2 engines" if number == 0 else "1 engine"
                    await until(lambda left=left: noted(world, f"{left} left"))
                    assert noted(world, f"Ray has lost the node of engine-{number}")
                    assert len(world.roster.clients) == 2 - number
                    assert not world.running.done()
                    world.supervisor.condemn(handle.name, "a late verdict")
            error = await failure(world)
            assert isinstance(error, NodeLost)
            assert "no node has come within 0.2 s (rollout.engine.patience_s)" in str(error)
            assert "0 engines found that have a node, at least 1 expected (rollout.engine.min_count)" in str(
                error
            )
            assert "the node of engine-2" in str(error) and "--resume" in str(error)
            assert sum(handle.starts for handle in world.handles) == (3 if noticed == "exit" else 6)

    clock.run(main())


def test_an_engine_whose_node_is_lost_is_started_on_another_one_and_brought_up_to_date():
    async def main():
        async with supervised(n=2, restarts=0) as world:
            await world.serving.wait()
            for start in range(2, 5):
                lose_node(world.handle)
                await until(lambda: world.handle.node is None)
                world.handle.may_move.set()
                await until(lambda start=start: f"http://127.0.0.1:{start}" in world.urls)
                assert world.synced[-1] == f"http://127.0.0.1:{start}"
                assert world.notes.count("engine-0 is placed on another node") == start - 1
            assert not world.running.done() and world.handles[1].starts == 1

    clock.run(main())


def test_below_the_smallest_number_requests_wait_and_a_node_in_time_lets_the_run_go_on():
    async def main():
        async with supervised(n=2, fewest=2, patience_s=60) as world:
            await world.serving.wait()
            lose_node(world.handle)
            await until(lambda: noted(world, "waiting for nodes for 60 s at most: 1 engine found"))
            assert not world.roster.routing_for("collector").held, "the other one serves"
            lose_node(world.handles[1])
            await until(lambda: not world.urls)
            assert world.roster.routing_for("collector").held
            world.handle.may_move.set()
            await until(lambda: world.urls)
            assert not world.roster.routing_for("collector").held
            world.handles[1].may_move.set()
            await until(lambda: len(world.urls) == 2)
            assert not world.running.done()

    clock.run(main())


def test_a_run_begins_with_its_first_engines_and_the_others_come_when_there_is_room():
    async def main():
        async with supervised(n=3, first=1) as world:
            await world.serving.wait()
            assert world.urls == ["http://127.0.0.1:1"]
            for number in (2, 1):
                world.handles[number].may_move.set()
                await until(lambda number=number: len(world.urls) == 4 - number)
            assert [handle.starts for handle in world.handles] == [1, 1, 1]

    clock.run(main())


def test_engines_that_have_joined_take_the_place_of_further_ones_until_they_leave():
    async def main():
        async with supervised(n=2, first=1, most=2) as world:
            await world.serving.wait()
            joined = FakeHandle("joined-0")
            kept = asyncio.create_task(world.supervisor.keep_joined(joined))
            await until(lambda: len(world.urls) == 2)
            assert not world.supervisor.has_room
            late = world.handles[1]
            late.may_move.set()
            await settle()
            assert late.starts == 0
            joined.exit(0)
            assert await asyncio.wait_for(kept, 30) == "its server exited with code 0"
            late.may_move.set()  # the node that it had found was given up
            await until(lambda: late.starts == 1 and len(world.urls) == 2)
            assert list(world.supervisor.where()) == ["engine-0", "engine-1"]
            assert not world.running.done() and world.supervisor.restarts == 0

    clock.run(main())


def test_an_engine_that_has_joined_and_fails_ends_nothing():
    async def main():
        async with supervised(n=1, restarts=0, most=2) as world:
            await world.serving.wait()
            world.refusals = [RuntimeError("other weights")]
            reason = await world.supervisor.keep_joined(FakeHandle("joined-0"))
            assert reason == "RuntimeError: other weights"
            broken = FakeHandle("joined-1")
            broken.start_errors = [RuntimeError("no answer")]
            assert "no answer" in await world.supervisor.keep_joined(broken)
            assert len(world.urls) == 1 and not world.running.done()

    clock.run(main())


def test_a_node_on_which_a_further_engine_does_not_start_is_given_up_and_the_run_goes_on():
    """At the start the recipe is to blame; later, the node may be."""

    async def main():
        async with supervised(n=2, first=1) as world:
            await world.serving.wait()
            late = world.handles[1]
            late.start_errors = [RuntimeError("no driver")] * 2
            late.may_move.set()
            await until(lambda: late.unfit)
            assert noted(world, "engine-1 has left its node: it has failed twice in the same way")
            assert late.unfit == ["another node"] and late.starts == 2
            late.may_move.set()
            await until(lambda: len(world.urls) == 2)
            late.exit(1)
            await until(lambda: late.starts == 4 and len(world.urls) == 2)
            late.start_errors = [RuntimeError("broken now")] * 2
            late.exit(1)
            assert isinstance(await failure(world), EngineGone), "it had served there"

    clock.run(main())


def test_an_engine_whose_node_is_lost_before_it_has_served_ends_the_run():
    """A run that has lost a node at its beginning is better started again than begun with fewer engines."""

    async def main():
        async with supervised(n=2) as world:
            world.handles[1].start_errors.append(NodeLost("Ray has lost node2"))
            assert isinstance(await failure(world), NodeLost)

    clock.run(main())
