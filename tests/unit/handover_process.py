"""The two ends of a hand-over as processes of their own, for tests that kill them.

    python -m tests.unit.handover_process driver RUN      takes entries, and keeps them in RUN/taken.jsonl
    python -m tests.unit.handover_process gateway RUN     records turns, prints the numbers that are durable

A line on standard input makes the gateway record no further turn; it ends when all are acknowledged.
"""

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.rollout.engine.roster import EngineRoster
from slipstream.rollout.engine.routing import PoolStatus
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.link import DriverLink
from slipstream.rollout.live.driver_address import DriverAddress
from slipstream.rollout.live.receiver import GatewayReceiver
from slipstream.rollout.system.key import new_key
from slipstream.rollout.tokens.turn_entries import Entry, chunk_of, encode_entry
from tests.unit.gateway_entries import end, next_state, turn

FLUSH_S = 0.01


class FileIntake:
    """Keeps entries in a file, and what it has not yet written in memory, where a kill loses it."""

    def __init__(self, path: Path) -> None:
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        path.write_bytes(whole + b"\n" if whole else b"")
        self.durables: dict[str, int] = {}
        for line in whole.splitlines():
            gateway, number, *_ = json.loads(line)
            self.durables[gateway] = number
        self._file = path.open("ab")
        self._taken: list[tuple[str, int, Entry, bytes]] = []
        self._then: list[Callable[[], None]] = []
        self._due = False

    def take(self, gateway: str, first_number: int, entries: Sequence[Entry]) -> None:
        for number, entry in enumerate(entries, first_number):
            self._taken.append((gateway, number, entry, bytes(chunk_of(entry))))

    def outcomes(self, gateway: str) -> list[tuple[int, str]]:
        return []

    def durable(self, gateway: str) -> int:
        return self.durables.get(gateway, 0)

    def when_durable(self, then: Callable[[], None]) -> None:
        self._then.append(then)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._due = False
        for gateway, number, entry, chunk in self._taken:
            kind, data = encode_entry(entry)
            texts = [base64.b64encode(part).decode() for part in (data, chunk)]
            self._file.write(json.dumps([gateway, number, kind, *texts]).encode() + b"\n")
            self.durables[gateway] = number
        self._taken.clear()
        self._file.flush()
        os.fsync(self._file.fileno())
        then, self._then = self._then, []
        for call in then:
            call()


class NoPool:
    """A pool without engines that remembers the records that it follows."""

    def __init__(self) -> None:
        self.record = None
        self.is_in_touch = False

    def status(self) -> PoolStatus:
        return PoolStatus(number=self.record.number if self.record else 0)

    def follow(self, routing) -> None:
        self.record = routing
        self.is_in_touch = True

    def lose_touch(self) -> None:
        self.is_in_touch = False


async def drive(run: Path) -> None:
    intake = FileIntake(run / "taken.jsonl")
    key = new_key()
    receiver = GatewayReceiver(key, intake, EngineRoster(lambda: 0, limit=8), limit=4)
    async with receiver.serving("127.0.0.1") as url:
        DriverAddress(url, key).write(run)
        print("listening", flush=True)
        await receiver.failed()


async def serve(run: Path) -> None:
    journal = TurnJournal.open(run / "gateway" / "gateway-0.sqlite", "gateway-0")
    link = DriverLink(journal, NoPool(), lambda: DriverAddress.read(run))
    linking = asyncio.create_task(link.run())
    print("open", journal.last, flush=True)
    enough = asyncio.Event()
    reader = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    reader.add_done_callback(lambda _: enough.set())

    async def user(name: int) -> None:
        while not enough.is_set():
            session = f"{name}-{journal.last}"
            (number,) = journal.append([turn(session)])
            await journal.durable(number)
            print(number, flush=True)
            journal.append([next_state(number), end(session)])
            await asyncio.sleep(0.001)

    await asyncio.gather(*map(user, range(3)))
    while journal.acknowledged < journal.last:
        await asyncio.sleep(0.01)
    print("last", journal.last, flush=True)
    linking.cancel()
    await asyncio.wait({linking})
    journal.close()


if __name__ == "__main__":
    role, folder = sys.argv[1:]
    asyncio.run({"driver": drive, "gateway": serve}[role](Path(folder)))
