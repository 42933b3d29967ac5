"""A file system that stalls for longer than the lease of the run folder: a real one, frozen by the kernel."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.rollout.control.core import Ticket
from slipstream.rollout.ledger.lease.folder_lease import Fenced, take_lease
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.system import disk

LEASE_S = 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The root of a file system of its own."""
    image, folder = tmp_path / "image", tmp_path / "runs"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_driver_waits_for_a_disk_that_stalls_says_so_and_loses_nothing(folder: Path, monkeypatch):
    monkeypatch.setattr(disk, "STALL_S", 3 * LEASE_S)
    monkeypatch.setattr(disk, "LOOK_S", LEASE_S / 4)
    losses: list[Fenced] = []

    async def main() -> int:
        loop, said = asyncio.get_running_loop(), asyncio.Queue[str]()

        def note(text: str) -> None:
            loop.call_soon_threadsafe(said.put_nowait, text)

        lease = await take_lease(folder, lease_s=LEASE_S, say=note, note=note)
        lease.keep()
        with lease.held(losses.append):
            ledger, _ = open_ledger(folder, batch_size=1, n_samples=2, bound=2, guard=lease.check)
            metrics = MetricsLog(folder, note=note)
            record(ledger, metrics, 0)
            await ledger.flushed()
            await frozen(folder, "--freeze")
            try:
                record(ledger, metrics, 1)
                flushed = asyncio.ensure_future(ledger.flushed())
                async with asyncio.timeout(120):
                    told = await said.get()
                    for number in range(2, 20):
                        record(ledger, metrics, number)
                        await asyncio.sleep(LEASE_S / 10)
                assert not flushed.done()
            finally:
                await frozen(folder, "--unfreeze")
            async with asyncio.timeout(120):
                await flushed
                await ledger.flushed()
                assert (await said.get()).startswith("the disk answers again, after ")
            assert told.startswith("the disk does not answer: ")
            assert all(f"{name} waits since " in told for name in ("ledger.sqlite", "metrics.jsonl"))
            metrics.close()
            ledger.close()
        return lease.term

    assert asyncio.run(main()) > 1, "the old term may have run out for others"
    assert losses == []
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 20
    ledger, recovered = open_ledger(folder, batch_size=1, n_samples=2, bound=2)
    ledger.close()
    assert len(recovered.open) == 20


def record(ledger: Ledger, metrics: MetricsLog, number: int) -> None:
    ledger.append(b"tokens")
    ledger.admitted(Ticket(number, 0), number)
    metrics.log(number, {"reward/mean": 1.0})


async def frozen(folder: Path, how: str) -> None:
    process = await asyncio.create_subprocess_exec("fsfreeze", how, folder)
    assert await process.wait() == 0
