"""Engines from outside: who is taken, who is refused and why, and how one leaves. Over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from slipstream.backend.commands import engines
from slipstream.backend.commands.outcome import NotYet
from slipstream.backend.driver.modes.joining import EngineService, NotAnswered, served
from slipstream.backend.driver.processes.engines import EngineLimits
from slipstream.backend.driver.processes.joined_engines import CODE, ENGINES, JoinedEngines, code_digest
from slipstream.backend.driver.start.inputs import InputError
from slipstream.rollout.engine.client import EngineAddress
from slipstream.rollout.engine.launch import FACTS
from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.server_process import ServerAccess
from slipstream.rollout.engine.supervisor import EngineCounts, Supervisor
from slipstream.rollout.system.key import Key
from slipstream.rollout.system.restarts import RestartLimit

EXPECTED = {"model": "a", "vocabulary": "7", "Slipstream": "1"}
LIMITS = EngineLimits(1, 7, 64, 60.0, 60.0, 8, 60.0)
KEY = Key("secret")
WAIT_S = 60.0


class World:
    """A run that may have two engines, none of which is its own, and whose weights a test holds up."""

    def __init__(self, folder: Path, barred: str | None = None) -> None:
        self.notes: list[str] = []
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.may_sync = asyncio.Event()
        self.may_sync.set()
        self.refusal: str | Exception | None = None
        self.synced: list[str] = []
        self.roster = EngineRoster(lambda: 5, limit=8)
        self.supervisor = Supervisor(
            [],
            self.roster,
            self,
            limit=RestartLimit("rollout.engine.restarts", 0, 86400.0, "it has not served"),
            counts=EngineCounts(0, 0, 2, 60.0),
            note=self.notes.append,
            watch=lambda client: self.lost.get(),
        )
        self.joined = JoinedEngines(
            self.supervisor, self.roster, LIMITS, lambda: EXPECTED, folder, self.notes.append, barred=barred
        )

    async def bring_up_to_date(self, engine: EngineAddress, admit: Callable[[], None]) -> str | None:
        await self.may_sync.wait()
        self.synced.append(engine.name)
        if isinstance(self.refusal, Exception):
            raise self.refusal
        if self.refusal is None:
            admit()
        return self.refusal

    @property
    def serving(self) -> list[str]:
        return [client.name for client in self.roster.clients]


@asynccontextmanager
async def server(facts: dict[str, str], version: int = 0) -> AsyncIterator[ServerAccess]:
    """What a driver asks of a server before it takes it."""

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != KEY.header:
            return web.Response(status=401)
        return web.json_response(facts if request.path == FACTS else {"weight_version": str(version)})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield ServerAccess(f"http://127.0.0.1:{runner.addresses[0][1]}", KEY)
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_an_engine_gets_the_current_version_before_it_serves_and_leaves_in_order(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            service = EngineService(tmp_path)
            assert (tmp_path / ENGINES).stat().st_mode & 0o077 == 0
            world.may_sync.clear()
            assert await service.join(access) == "joined-0"
            [state] = await service.engines()
            assert (state.name, state.serves, state.joined) == ("joined-0", False, True)
            assert world.serving == []
            leaving = asyncio.create_task(service.remove("joined-0"))  # while it gets the version
            world.may_sync.set()
            await asyncio.wait_for(leaving, WAIT_S)
            assert world.synced == ["joined-0"] and world.serving == []
            assert await service.left("joined-0") == "it was asked to"
            assert await service.join(access) == "joined-1", "no name is used twice"
            await until(lambda: world.serving == ["joined-1"])
            await asyncio.wait_for(service.remove("joined-1"), WAIT_S)
            assert world.serving == [] and await service.engines() == []
        assert not (tmp_path / ENGINES).exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("facts", "version", "reasons"),
    [
        (EXPECTED | {"model": "b"}, 0, ["model: b found, a expected"]),
        (EXPECTED | {"vocabulary": "8"}, 0, ["vocabulary: 8 found, 7 expected"]),
        (EXPECTED | {"Slipstream": "0"}, 0, ["Slipstream: 0 found, 1 expected"]),
        ({"model": "a"}, 0, ["vocabulary: nothing found", "Slipstream: nothing found"]),
        (EXPECTED, 3, ["version 3 found, 0 expected"]),
        ({"model": "b", "vocabulary": "8", "Slipstream": "1"}, 2, ["model: b", "vocabulary: 8", "version 2"]),
    ],
)
def test_a_server_of_something_else_is_refused_with_every_reason(tmp_path, facts, version, reasons):
    async def main() -> None:
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"), server(facts, version) as access:
            with pytest.raises(NotAnswered) as refused:
                await EngineService(tmp_path).join(access)
            assert all(reason in str(refused.value) for reason in reasons), refused.value
            assert world.synced == [] and world.supervisor.where() == {}

    asyncio.run(main())


@pytest.mark.parametrize("wrong", ["key", "port", "url", "barred"])
def test_a_server_that_cannot_be_asked_is_refused(tmp_path: Path, wrong: str):
    async def main() -> None:
        world = World(tmp_path, barred="not with this transport" if wrong == "barred" else None)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            asked, told = {
                "key": (ServerAccess(access.url, Key("another")), "HTTP 401"),
                "port": (ServerAccess("http://127.0.0.1:1", KEY), "does not say what it serves"),
                "url": (ServerAccess("unix:/socket", KEY), "http://HOST:PORT expected"),
                "barred": (access, "not with this transport"),
            }[wrong]
            with pytest.raises(NotAnswered, match=told) as refused:
                await EngineService(tmp_path).join(asked)
            assert "secret" not in str(refused.value) and "another" not in str(refused.value)

    asyncio.run(main())


def test_no_more_engines_join_than_there_may_be_and_none_joins_twice(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path)
        async with (
            world.joined.serving("127.0.0.1"),
            server(EXPECTED) as first,
            server(EXPECTED) as second,
            server(EXPECTED) as third,
        ):
            service = EngineService(tmp_path)
            await service.join(first)
            await until(lambda: world.serving == ["joined-0"])
            await service.check_room()
            with pytest.raises(NotAnswered, match="is an engine of the run already"):
                await service.join(first)
            results = await asyncio.gather(
                *(service.join(each) for each in (second, third)), return_exceptions=True
            )
            refused = [each for each in results if isinstance(each, NotAnswered)]
            assert len(refused) == 1 and "max_count" in str(refused[0])
            with pytest.raises(NotAnswered, match="as many engines as"):
                await service.check_room()
            await service.remove("joined-0")
            assert await service.join(first) == "joined-2"

    asyncio.run(main())


@pytest.mark.parametrize("how", ["dies", "condemned", "refused", "mismatch"])
def test_an_engine_that_is_lost_is_not_started_again_and_ends_nothing(tmp_path: Path, how: str):
    async def main() -> None:
        world = World(tmp_path)
        world.refusal = {"refused": "no answer", "mismatch": RuntimeError("other log-probs")}.get(how)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            service = EngineService(tmp_path)
            name = await service.join(access)
            if world.refusal is None:
                await until(lambda: world.serving == [name])
            if how == "dies":
                world.lost.put_nowait("it does not say that it is well")
            elif how == "condemned":
                world.supervisor.condemn(name, "it missed version 6")
            reason = await asyncio.wait_for(service.left(name), WAIT_S)
            told = {
                "dies": "is well",
                "condemned": "missed version 6",
                "refused": "no answer",
                "mismatch": "other log-probs",
            }[how]
            assert told in reason and world.serving == [] and world.supervisor.where() == {}
            assert any(told in note for note in world.notes)

    asyncio.run(main())


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_command_has_not_failed_whose_engine_was_asked_to_leave(tmp_path: Path, is_asked: bool):
    async def main() -> None:
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            service = EngineService(tmp_path)
            name = await service.join(access)
            await until(lambda: world.serving == [name])
            loop = asyncio.get_running_loop()
            said: list[str] = []
            command = asyncio.create_task(
                served(service, loop.create_future(), name, loop.create_future(), said.append)
            )
            if is_asked:
                await service.remove(name)
            else:
                world.lost.put_nowait("it does not say that it is well")
            reason = await asyncio.wait_for(command, WAIT_S)
            assert reason is None if is_asked else "is well" in str(reason)
            assert said == (["joined-0 has left: it was asked to"] if is_asked else [])

    asyncio.run(main())


def test_an_engine_that_is_still_leaving_is_not_wrong_input_and_can_be_waited_for_again(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            world.may_sync.clear()
            name = await EngineService(tmp_path).join(access)
            with pytest.raises(NotYet, match=r"still leaving .* gets the current version") as told:
                await asyncio.to_thread(engines.remove, tmp_path, name, 0.01)
            assert told.value.exit_code == 75
            [state] = await asyncio.to_thread(engines.listed, tmp_path)
            assert "gets the version, then leaves" in engines.line(state)
            world.may_sync.set()
            for _ in range(2):  # also when it has left
                await asyncio.to_thread(engines.remove, tmp_path, name, WAIT_S)
            assert world.serving == []

    asyncio.run(main())


def test_an_engine_that_is_still_leaving_when_the_run_ends_has_left(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            world.may_sync.clear()
            service = EngineService(tmp_path)
            name = await service.join(access)
            leaving = asyncio.create_task(service.remove(name, WAIT_S))
            await until(lambda: world.joined.states()[0].leaving)
        assert (await leaving).left in ("the run has ended", "it was asked to")

    asyncio.run(main())


def test_a_question_that_is_never_answered_because_the_run_has_ended_says_so(tmp_path: Path):
    async def main() -> None:
        asked = asyncio.Event()

        async def told(request: web.Request) -> web.Response:
            return web.json_response({"name": "joined-0", "joined": True, "leaving": True})

        async def closing(request: web.Request) -> web.Response:
            asked.set()
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        app = web.Application()
        app.router.add_delete("/engines/joined-0", told)
        app.router.add_get("/engines/joined-0", closing)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        file = tmp_path / ENGINES
        file.write_text(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}", "key": "key"}))
        leaving = asyncio.create_task(EngineService(tmp_path).remove("joined-0", 1.0))
        await asked.wait()
        file.unlink()
        assert (await leaving).left == "the run has ended"
        await runner.cleanup()

    asyncio.run(main())


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_command_has_not_failed_whose_engine_has_served_until_the_run_ends(tmp_path: Path, is_heard: bool):
    async def main() -> None:
        world, said, loop = World(tmp_path), list[str](), asyncio.get_running_loop()
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            service = EngineService(tmp_path)
            name = await service.join(access)
            await until(lambda: world.serving == [name])
            ended = served(service, loop.create_future(), name, loop.create_future(), said.append)
            command = asyncio.create_task(ended) if is_heard else None
            await service.engines()  # the command's question goes out before it
        command = command or asyncio.create_task(ended)
        assert await asyncio.wait_for(command, WAIT_S) is None
        assert said == ["joined-0 has left: the run has ended"]

    asyncio.run(main())


def test_nobody_without_the_key_sees_or_changes_engines(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"), server(EXPECTED) as access:
            told = json.loads((tmp_path / ENGINES).read_text())
            (tmp_path / "other").mkdir()
            (tmp_path / "other" / ENGINES).write_text(json.dumps(told | {"key": "wrong"}))
            stranger = EngineService(tmp_path / "other")
            for call in (stranger.engines(), stranger.join(access), stranger.remove("joined-0")):
                with pytest.raises(NotAnswered, match="no valid key"):
                    await call
            with pytest.raises(NotAnswered, match="there is no engine joined-7; the run has: none"):
                await EngineService(tmp_path).remove("joined-7")

    asyncio.run(main())


def test_a_folder_without_a_driver_is_refused_and_a_driver_that_is_gone_is_noticed(tmp_path, monkeypatch):
    async def main() -> None:
        with pytest.raises(InputError, match=r"no engines\.json found; expected the folder of a run"):
            EngineService(tmp_path)
        world = World(tmp_path)
        async with world.joined.serving("127.0.0.1"):
            service = EngineService(tmp_path)
            told = (tmp_path / ENGINES).read_text()
        (tmp_path / ENGINES).write_text(told)  # as a driver leaves it that is killed
        monkeypatch.setattr("slipstream.backend.driver.modes.joining.GONE_S", 0.0)
        assert "does not answer" in await asyncio.wait_for(service.left("joined-0"), WAIT_S)

    asyncio.run(main())


def test_the_digest_of_the_code_is_that_of_every_package():
    digests = {code_digest(CODE[:number]) for number in range(len(CODE) + 1)}
    assert len(digests) == len(CODE) + 1 and code_digest() in digests
