"""The hand-over of live turns: each entry counts once, in order, whoever is killed and whatever is late."""

import asyncio
import base64
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.gateway import journal as journal_module
from slipstream.rollout.gateway import link as link_module
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.journal_file import JournalError
from slipstream.rollout.gateway.link import DriverLink
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.live.gateway_messages import (
    GATEWAY_DOWN,
    EntryHeader,
    GatewayUp,
    Hello,
    crc_of_entry,
)
from slipstream.rollout.live.receiver import GatewayReceiver, HandoverRefused
from slipstream.rollout.system.frames import pack, split
from slipstream.rollout.system.key import Key, new_key
from slipstream.rollout.tokens.turn_entries import (
    SessionEnd,
    UserReward,
    chunk_of,
    decode_entry,
    encode_entry,
)
from tests.environment import environment
from tests.selection import shortened
from tests.unit.gateway_entries import end, next_state, plain, reward, turn
from tests.unit.handover_process import NoPool

ROOT = Path(__file__).parents[2]


class Intake:
    """Keeps what it takes; becomes durable when the test says so."""

    def __init__(self, by_itself: bool = True) -> None:
        self.taken: list[tuple[str, int, tuple, bytes]] = []
        self.durables: dict[str, int] = {}
        self.then: list = []
        self.by_itself = by_itself
        self.told: list[tuple[int, str]] = []

    @property
    def numbers(self) -> list[int]:
        return [number for _, number, *_ in self.taken]

    def take(self, gateway, first_number, entries) -> None:
        for number, entry in enumerate(entries, first_number):
            self.taken.append((gateway, number, plain(entry), bytes(chunk_of(entry))))
            if isinstance(entry, UserReward):
                self.told.append((number, f"outcome {number}"))

    def outcomes(self, gateway: str) -> list[tuple[int, str]]:
        outcomes, self.told = self.told, []
        return outcomes

    def durable(self, gateway: str) -> int:
        return self.durables.get(gateway, 0)

    def when_durable(self, then) -> None:
        self.then.append(then)
        if self.by_itself:
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        for gateway, number, *_ in self.taken:
            self.durables[gateway] = number
        then, self.then = self.then, []
        for call in then:
            call()


class World:
    """A journal with its link, and a driver that a test starts and ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = NoPool()
        self.address: DriverAddress | None = None
        self.key = new_key()
        self.roster = EngineRoster(lambda: 0, limit=8, gateway_timeout_s=60.0)

    @asynccontextmanager
    async def gateway(self):
        journal = TurnJournal.open(self.folder / "journal.sqlite", "gateway-0")
        link = DriverLink(journal, self.pool, lambda: self.address)
        running = asyncio.create_task(link.run())
        try:
            yield journal, link
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            journal.close()

    @asynccontextmanager
    async def driver(self, intake: Intake):
        receiver = GatewayReceiver(self.key, intake, self.roster, limit=4)
        async with receiver.serving("127.0.0.1") as url:
            self.address = DriverAddress(url, self.key)
            yield receiver
            self.address = None


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(link_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(link_module, "LONGEST_PAUSE_S", 0.05)

    def make(main) -> None:
        async def limited() -> None:
            async with asyncio.timeout(120):
                await main(World(tmp_path))

        asyncio.run(limited())

    return make


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_entries_arrive_in_order_and_are_acknowledged_when_they_are_durable(world):
    async def main(world: World):
        intake = Intake(by_itself=False)
        records = [turn("a"), next_state(1), turn("b"), end("a")]
        async with world.driver(intake), world.gateway() as (journal, _):
            await journal.durable(journal.append(records)[-1])
            await until(lambda: len(intake.taken) == 4)
            await asyncio.sleep(0.05)
            assert journal.acknowledged == 0
            intake.settle()
            await until(lambda: journal.acknowledged == 4)
            expected = [(n, plain(r), chunk_of(r)) for n, r in enumerate(records, 1)]
            assert [taken[1:] for taken in intake.taken] == expected
            assert {taken[0] for taken in intake.taken} == {journal.identity}

    world(main)


def test_a_client_hears_what_the_driver_has_made_of_its_rewards(world, monkeypatch):
    monkeypatch.setattr(journal_module, "OUTCOME_S", 60.0)

    async def main(world: World):
        async with world.driver(Intake()), world.gateway() as (journal, _):
            numbers = journal.append([turn("a"), reward(1), reward(1)])
            outcomes = await journal.outcomes(numbers[1:])
            assert outcomes == ["outcome 2", "outcome 3"]
            assert not journal._outcomes

    world(main)


def test_a_client_does_not_wait_for_a_driver_that_is_gone_and_hears_later_what_it_has_made(
    world, monkeypatch
):
    monkeypatch.setattr(journal_module, "OUTCOME_S", 0.05)
    monkeypatch.setattr(journal_module, "MOST_OUTCOMES", 2)

    async def main(world: World):
        async with world.gateway() as (journal, _):
            numbers = journal.append([reward(1)] * 3)
            assert await journal.outcomes(numbers) == [""] * 3
            journal.rewarded([(number, "counted") for number in numbers])
            assert await journal.outcomes(numbers[1:]) == ["counted"] * 2
            assert not journal._outcomes, "the first has made room for the others"

    world(main)


def test_a_gateway_follows_the_routing_records_with_a_limit_of_its_own(world):
    async def main(world: World):
        async with world.driver(Intake()) as receiver, world.gateway() as (journal, link):
            await link.connected.wait()
            await until(lambda: world.pool.record is not None)
            assert world.pool.record.limit == 4
            await world.roster.doubt(1)  # returns when the gateway follows
            assert world.pool.record.number == world.roster.number
            await until(lambda: receiver.statuses[journal.identity].pool.number == world.roster.number)
            world.roster.joined("collector")
            assert world.roster.share_of("collector") == 8

    world(main)


def test_a_gateway_without_a_driver_goes_on_and_hands_over_later(world):
    async def main(world: World):
        first, second = Intake(by_itself=False), Intake()
        async with world.gateway() as (journal, link):
            await journal.durable(journal.append([turn("a")])[-1])
            async with world.driver(first):
                await until(lambda: first.numbers == [1])
                await until(lambda: world.pool.is_in_touch)
            await until(link.disconnected.is_set)
            assert not world.pool.is_in_touch
            await journal.durable(journal.append([turn("b")])[-1])
            async with world.driver(second):
                await until(lambda: second.numbers == [1, 2])
                await journal.durable(journal.append([turn("c")])[-1])
                await until(lambda: journal.acknowledged == 3)
                await until(lambda: world.pool.is_in_touch)
            assert link.connections == 2
        async with world.gateway() as (journal, _), world.driver(second):
            await journal.durable(journal.append([turn("d")])[-1])
            await until(lambda: journal.acknowledged == 4)
            assert second.numbers == [1, 2, 3, 4]

    world(main)


def test_what_one_driver_has_taken_is_not_sent_to_it_again_although_it_is_not_durable(world):
    async def main(world: World):
        intake = Intake(by_itself=False)
        async with world.driver(intake) as receiver, world.gateway() as (journal, link):
            await journal.durable(journal.append([turn("a"), turn("b")])[-1])
            await until(lambda: intake.numbers == [1, 2])
            (connection,) = receiver._connections.values()
            connection.give_up()
            await until(lambda: link.connections == 2)
            await journal.durable(journal.append([turn("c")])[-1])
            await until(lambda: intake.numbers == [1, 2, 3])
            intake.settle()
            await until(lambda: journal.acknowledged == 3)

    world(main)


def test_no_more_than_a_window_is_on_its_way(world, monkeypatch):
    monkeypatch.setattr(link_module, "WINDOW_BYTES", 3000)
    monkeypatch.setattr(link_module, "FRAME_BYTES", 1000)

    async def main(world: World):
        intake = Intake(by_itself=False)
        async with world.driver(intake), world.gateway() as (journal, _):
            await journal.durable(journal.append([turn(str(n), tokens=50) for n in range(30)])[-1])
            await until(lambda: len(intake.taken) > 2)
            await asyncio.sleep(0.1)
            assert len(intake.taken) < 15
            while len(intake.taken) < 30:
                intake.settle()
                await asyncio.sleep(0.005)
            assert intake.numbers == list(range(1, 31))

    world(main)


def test_a_journal_that_is_older_than_the_ledger_is_refused_by_the_gateway(world):
    async def main(world: World):
        intake = Intake()
        async with world.driver(intake), world.gateway() as (journal, _):
            intake.durables[journal.identity] = 7
            with pytest.raises(JournalError, match="the driver has 7: the file was replaced"):
                await DriverLink(journal, world.pool, lambda: world.address).run()
            world.address = None

    async def tolerant(world: World):
        with pytest.raises(JournalError):  # what the link of the gateway itself has met
            await main(world)

    world(tolerant)


def test_a_ledger_that_is_older_than_the_journal_ends_the_run(world):
    async def main(world: World):
        intake = Intake()
        async with world.driver(intake), world.gateway() as (journal, _):
            await journal.durable(journal.append([turn("a")])[-1])
            await until(lambda: journal.acknowledged == 1)
        async with world.driver(Intake()) as receiver, world.gateway():
            with pytest.raises(HandoverRefused, match="up to entry 0, and entries up to 1 were acknowledged"):
                await receiver.failed()

    world(main)


def test_what_the_intake_raises_ends_the_run(world):
    class Broken(Intake):
        def take(self, *_) -> None:
            raise OSError("disk")

    async def main(world: World):
        async with world.driver(Broken()) as receiver, world.gateway() as (journal, _):
            journal.append([turn("a")])
            with pytest.raises(OSError, match="disk"):
                await receiver.failed()

    world(main)


# ---- frames that no gateway sends


def header(number: int, record, **changes) -> tuple[EntryHeader, bytes]:
    kind, data = encode_entry(record)
    chunk = chunk_of(record)
    values = {
        "kind": kind,
        "data": data,
        "size": len(chunk),
        "crc": crc_of_entry(number, kind, data, chunk),
    }
    return EntryHeader(**values | changes), chunk


async def say(world: World, *frames: bytes, key: Key | None = None) -> list:
    """Send frames as the gateway `g` would. Return what the driver answers until it hangs up."""
    answers = []
    headers = {"Authorization": (key or world.key).header}
    async with (
        aiohttp.ClientSession(world.address.url, headers=headers) as session,
        session.ws_connect("/gateway/g") as socket,
    ):
        for frame in frames:
            await socket.send_bytes(frame)
        async for message in socket:
            answers.append(split(message.data, GATEWAY_DOWN)[0])
    return answers


def test_a_wrong_key_is_refused(world):
    async def main(world: World):
        async with world.driver(Intake()):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await say(world, key=Key("wrong"))
            assert caught.value.status == 401

    world(main)


HELLO = pack(GatewayUp(hello=Hello("g", 5, 0)), ())
GOOD, CHUNK = header(1, turn("a"))
BAD = {
    "no hello": [pack(GatewayUp(), ())],
    "another name": [pack(GatewayUp(hello=Hello("h", 0, 0)), ())],
    "noise": [HELLO, b"noise"],
    "a gap": [HELLO, pack(GatewayUp(first=2, entries=[header(2, turn("a"))[0]]), [CHUNK])],
    "a damaged chunk": [HELLO, pack(GatewayUp(first=1, entries=[GOOD]), [CHUNK[:-1] + b"?"])],
    "another number": [
        HELLO,
        pack(GatewayUp(first=1, entries=[header(2, turn("a"))[0]]), [CHUNK]),
    ],
    "a short payload": [HELLO, pack(GatewayUp(first=1, entries=[GOOD]), [CHUNK[:-4]])],
    "a long payload": [HELLO, pack(GatewayUp(first=1, entries=[GOOD]), [CHUNK, b"more"])],
    "an unknown kind": [
        HELLO,
        pack(GatewayUp(first=1, entries=[EntryHeader(9, b"", 0, crc_of_entry(1, 9, b"", b""))]), ()),
    ],
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_a_gateway_that_does_not_keep_to_the_rules_loses_its_connection_only(world, frames):
    async def main(world: World):
        intake = Intake()
        async with world.driver(intake) as receiver:
            await say(world, *frames)
            assert intake.taken == []
            assert receiver._connections == {}
            good = asyncio.create_task(say(world, HELLO, pack(GatewayUp(first=1, entries=[GOOD]), [CHUNK])))
            await until(lambda: intake.numbers == [1])
            good.cancel()

    world(main)


def test_a_second_connection_takes_the_place_of_one_that_ended_unnoticed(world):
    async def main(world: World):
        intake = Intake()
        async with world.driver(intake):
            first = asyncio.create_task(say(world, HELLO))
            await until(lambda: len(world.roster._collectors) == 1)
            second = asyncio.create_task(say(world, HELLO, pack(GatewayUp(first=1, entries=[GOOD]), [CHUNK])))
            await first
            await until(lambda: intake.numbers == [1])
            assert len(world.roster._collectors) == 1
            second.cancel()

    world(main)


# ---- kill -9


def start(role: str, run: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.handover_process", role, str(run)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert line.startswith(("listening", "open")), line
    os.set_blocking(process.stdout.fileno(), False)
    return process


def heard(process: subprocess.Popen) -> list[str]:
    with suppress(TypeError):
        return (process.stdout.read() or "").split("\n")
    return []


@pytest.mark.parametrize("seed", shortened([1, 2], [1]))
def test_kills_of_either_side_lose_and_double_nothing(tmp_path, seed):
    draw = random.Random(seed)
    told: set[int] = set()
    processes = {role: start(role, tmp_path) for role in ("driver", "gateway")}

    def listen() -> None:
        told.update(int(line) for line in heard(processes["gateway"]) if line.isdigit())

    try:
        for _ in range(4):
            time.sleep(draw.uniform(0.02, 0.3))
            role = draw.choice(["driver", "gateway"])
            listen()
            os.kill(processes[role].pid, signal.SIGKILL)
            processes[role].wait()
            if role == "gateway":
                listen()
            processes[role].stdin.close()
            processes[role].stdout.close()
            processes[role] = start(role, tmp_path)
        deadline = time.monotonic() + 60
        while len(told) <= 20 and time.monotonic() < deadline:
            time.sleep(0.05)
            listen()
        gateway = processes["gateway"]
        os.set_blocking(gateway.stdout.fileno(), True)
        rest, _ = gateway.communicate("enough\n", timeout=120)
        *numbers, last = rest.split("\n")[:-1]
        told.update(int(line) for line in numbers if line.isdigit())
        last = int(last.split()[1])
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError, ValueError):
                    stream.close()

    taken = [json.loads(line) for line in (tmp_path / "taken.jsonl").read_text().splitlines()]
    assert len({gateway for gateway, *_ in taken}) == 1
    assert [number for _, number, *_ in taken] == list(range(1, last + 1))
    assert len(told) > 20
    assert told <= set(range(1, last + 1))
    for _, number, kind, data, chunk in taken:
        entry = decode_entry(kind, base64.b64decode(data))
        if isinstance(entry, SessionEnd):
            continue
        if number in told:
            assert base64.b64decode(chunk) == turn(entry.session).chunk
