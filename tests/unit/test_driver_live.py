"""The live loop's place in a run: what runs as long as users are served, and what ends with what."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slipstream.backend.driver.loops.live_users import LiveUsers
from slipstream.backend.simulate import clock
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.system.key import new_key


@dataclass
class Part:
    """A receiver, gateways or judging: something that runs until it is cancelled or fails."""

    did: list[str]
    name: str
    failure: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @asynccontextmanager
    async def serving(self, host: str) -> AsyncIterator[str]:
        self.did.append(f"listens on {host}")
        yield f"http://{host}:1234"
        self.did.append("does not listen any more")

    async def failed(self) -> None:
        await self.run()

    async def run(self) -> None:
        self.did.append(f"{self.name} runs")
        try:
            await self.failure
        finally:
            self.did.append(f"{self.name} ends")

    async def stop(self) -> None:
        self.did.append(f"{self.name} stops")


class World:
    def __init__(self, run: Path) -> None:
        self.did: list[str] = []
        self.receiver, self.gateways = Part(self.did, "receiver"), Part(self.did, "gateways")
        self.judging, self.key = Part(self.did, "judging"), new_key()
        self.live = LiveUsers(self.receiver, self.gateways, self.judging, run, self.key)


def test_gateways_find_where_the_driver_listens_and_each_loop_is_a_task_of_its_own(tmp_path: Path):
    async def main() -> None:
        world = World(tmp_path)
        keeping = asyncio.create_task(world.live.keep("127.0.0.1"))
        await asyncio.sleep(0.05)
        assert DriverAddress.read(tmp_path) == DriverAddress("http://127.0.0.1:1234", world.key)
        assert world.did[0] == "listens on 127.0.0.1"
        assert set(world.did[1:]) == {"receiver runs", "gateways runs", "judging runs"}
        keeping.cancel()
        await asyncio.wait({keeping})
        assert {"receiver ends", "gateways ends", "judging ends"} <= set(world.did)
        assert "gateways stops" not in world.did, "users are answered until the run lets go of them"
        await world.live.stop()
        assert world.did[-1] == "gateways stops"

    clock.run(main())


@pytest.mark.parametrize("part", ["receiver", "gateways", "judging"])
def test_whatever_fails_for_good_ends_the_run_with_its_reason(tmp_path: Path, part: str):
    async def main() -> None:
        world = World(tmp_path)
        keeping = asyncio.create_task(world.live.keep("127.0.0.1"))
        await asyncio.sleep(0.05)
        getattr(world, part).failure.set_exception(RuntimeError(f"the {part} cannot go on"))
        with pytest.raises(ExceptionGroup) as raised:
            await keeping
        assert f"the {part} cannot go on" in str(raised.value.exceptions[0])

    clock.run(main())
