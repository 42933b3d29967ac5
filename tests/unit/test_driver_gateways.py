"""Gateways as processes: started, started again, ended, and taken over from a driver that is gone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.backend.cluster.guard import VARIABLE
from slipstream.backend.cluster.kept_process import KeptProcess
from slipstream.backend.driver.processes.gateways import GatewayGone, Gateways, announcement
from slipstream.configs.schema import GatewayConfig, RunConfig
from slipstream.configs.schema.run import RunSection
from slipstream.rollout.gateway.keys import add_key, keys_file, revoke_key
from slipstream.rollout.system.restarts import RestartLimit

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
DEAF = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
    "time.sleep(60)",
]


def exits(code: int) -> list[str]:
    return [sys.executable, "-S", "-c", f"raise SystemExit({code})"]


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


def test_the_announcement_says_where_users_reach_the_gateways_and_that_they_need_a_key(tmp_path: Path):
    config = RunConfig.model_construct(
        run=RunSection(name="served", root=tmp_path, steps=1), gateway=GatewayConfig(host="::1", port=4000)
    )
    where = "users reach http://[::1]:4000/v1"
    refused = f"{where}; every request is refused until there is an API key: `slipstream key add`"
    assert announcement(config.gateway, config.run.folder, {}) == refused
    assert announcement(config.gateway, config.run.folder, {"SGLANG_API_KEY": "secret"}) == where
    add_key(keys_file(config.gateway, config.run.folder), "ann")
    assert announcement(config.gateway, config.run.folder, {}) == where
    revoke_key(keys_file(config.gateway, config.run.folder), "ann")
    assert announcement(config.gateway, config.run.folder, {}) == refused
    keys_file(config.gateway, config.run.folder).write_text("no keys")
    assert announcement(config.gateway, config.run.folder, {}) == where, (
        "the gateway says what is wrong with the file"
    )


class World:
    def __init__(self, folder: Path, *commands: list[str], restarts: int = 3) -> None:
        self.notes: list[str] = []
        limit = RestartLimit("Slipstream", restarts, 86400.0, "it has not served", same=None)
        self.gateways = Gateways(
            commands, folder, folder / "logs", self.notes.append, limit=limit, first_pause_s=0.01
        )

    async def pids(self, count: int, without: set[int] = frozenset()) -> set[int]:
        """Wait until so many processes run, none of them in ``without``."""
        while len(pids := {p.pid for p in self.gateways._processes.values()} - without) < count:
            await asyncio.sleep(0.01)
        return pids


def test_gateways_run_until_they_are_stopped_and_leave_nothing(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, SLEEPER, SLEEPER)
        running = asyncio.create_task(world.gateways.run())
        pids = await world.pids(2)
        running.cancel()
        await asyncio.wait({running})
        assert all(map(is_alive, pids)), "cancelled, the driver only looks away"
        await world.gateways.stop()
        assert all(map(ended, pids))
        assert not list((tmp_path / "gateway").iterdir())

    run(main)


def test_a_gateway_that_is_killed_is_started_again_and_the_other_one_stays(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path, SLEEPER, SLEEPER)
        running = asyncio.create_task(world.gateways.run())
        before = await world.pids(2)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        [late] = await world.pids(1, without=before)
        assert is_alive(late) and all(is_alive(pid) for pid in before - {victim})
        assert world.gateways.restarts == 1
        assert "is started again: it has ended with code -9" in world.notes[0]
        running.cancel()
        await asyncio.wait({running})
        await world.gateways.stop()

    run(main)


@pytest.mark.parametrize(("code", "what"), [(1, "has failed 3 times"), (2, "cannot run")])
def test_a_gateway_that_cannot_run_ends_the_run_at_once_if_its_input_is_wrong(
    tmp_path: Path, code: int, what: str
):
    async def main() -> None:
        world = World(tmp_path, exits(code), restarts=2)
        with pytest.raises(ExceptionGroup) as raised:
            await world.gateways.run()
        [error] = raised.value.exceptions
        assert isinstance(error, GatewayGone)
        assert f"gateway-0 {what}" in str(error)
        assert f"with code {code}" in str(error) and "gateway-0.log" in str(error)

    run(main)


def test_a_gateway_that_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slipstream.backend.cluster.kept_process.END_S", 0.1)

    async def main() -> None:
        process = KeptProcess.start(DEAF, tmp_path / "file", tmp_path / "log")
        while "deaf" not in (tmp_path / "log").read_text():
            await asyncio.sleep(0.01)
        await process.end()
        assert ended(process.pid)

    run(main)


DRIVER = """
import asyncio, sys
from pathlib import Path
from slipstream.backend.cluster.kept_process import KeptProcess
async def main():
    process = KeptProcess.start(sys.argv[2:], Path(sys.argv[1]), Path(sys.argv[1] + ".log"))
    print(process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture
def orphan(tmp_path: Path):
    """A process whose starter was killed: its id. The file that names it is ``tmp_path / "file"``."""
    environment = os.environ | {VARIABLE: "mark of a run"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "file"), *SLEEPER],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    yield pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_process_outlives_its_starter_and_is_taken_over_watched_and_ended(tmp_path: Path, orphan: int):
    assert is_alive(orphan)
    marks = Path(f"/proc/{orphan}/environ").read_bytes()
    assert VARIABLE.encode() not in marks, "the guard of the run that has ended would kill it"

    async def main() -> None:
        process = KeptProcess.taken_over(SLEEPER, tmp_path / "file")
        assert process is not None and process.is_taken_over and process.pid == orphan
        waiting = asyncio.create_task(process.wait())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await process.end()
        assert await waiting is None
        assert ended(orphan)

    run(main)


def test_one_that_was_started_with_other_settings_is_killed_and_not_taken_over(tmp_path: Path, orphan: int):
    async def main() -> None:
        assert KeptProcess.taken_over([*SLEEPER, "other"], tmp_path / "file") is None
        assert ended(orphan)

    run(main)


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"process": 1}'])
def test_a_file_that_names_no_living_process_is_no_reason_to_fail(tmp_path: Path, content: bytes | None):
    if content is not None:
        (tmp_path / "file").write_bytes(content)

    async def main() -> None:
        assert KeptProcess.taken_over(SLEEPER, tmp_path / "file") is None

    run(main)
