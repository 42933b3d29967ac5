"""The gateway's journal: what is durable is there after a kill, and damage is refused with the way out."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.rollout.gateway import journal as journal_module
from slipstream.rollout.gateway.journal import TurnJournal
from slipstream.rollout.gateway.journal_file import JournalBusy, JournalError, JournalFile
from slipstream.rollout.tokens.record import CorruptRecord
from slipstream.rollout.tokens.turn_entries import KINDS, Forgotten, chunk_of, decode_entry, encode_entry
from tests.environment import environment
from tests.unit.gateway_entries import end, forgotten, held, next_state, opened, plain, reward, turn

ROOT = Path(__file__).parents[2]
ALL_KINDS = [turn(), next_state(1), reward(1, -0.5), end(), forgotten(key="k"), opened(), held()]


def write(path: Path, *records) -> list[int]:
    async def main() -> list[int]:
        journal = TurnJournal.open(path, "gateway-0")
        try:
            numbers = journal.append(records)
            await journal.durable(numbers[-1])
        finally:
            journal.close()
        return numbers

    return asyncio.run(main())


def stored(path: Path) -> list[tuple]:
    journal = TurnJournal.open(path, "gateway-0")
    try:
        return [(row.number, plain(row.entry()), row.chunk) for row in journal.retained()]
    finally:
        journal.close()


def as_stored(*records, first: int = 1) -> list[tuple]:
    return [(number, plain(r), bytes(chunk_of(r))) for number, r in enumerate(records, first)]


@pytest.mark.parametrize("record", ALL_KINDS, ids=[kind.__name__ for kind in KINDS])
def test_every_entry_comes_back_from_its_encoding(record):
    kind, data = encode_entry(record)
    assert plain(decode_entry(kind, data, chunk_of(record))) == plain(record)


def test_bytes_that_are_no_entry_are_refused():
    kind, data = encode_entry(turn())
    for wrong_kind, wrong in [(kind, data[:-1]), (kind + 1, data), (99, data), (kind, b"")]:
        with pytest.raises(CorruptRecord):
            decode_entry(wrong_kind, wrong)


def test_entries_survive_in_their_order_with_their_chunks(tmp_path):
    path = tmp_path / "gateway" / "journal.sqlite"
    records = [turn("a"), turn("b", tokens=0), next_state(1), reward(2), turn("a", seed=1)]
    assert write(path, *records) == [1, 2, 3, 4, 5]
    assert write(path, turn("c")) == [6]
    assert stored(path) == as_stored(*records, turn("c"))


def test_a_journal_keeps_its_identity_and_its_successor_has_another(tmp_path):
    path = tmp_path / "journal.sqlite"
    names = []
    for life in range(3):
        if life == 2:
            path.unlink()
        file = JournalFile.open(path, "gateway-0")
        names.append(file.stamp.identity)
        file.close()
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("gateway-0.") for name in names)


def test_only_what_is_durable_can_be_read_and_acknowledged(tmp_path, monkeypatch):
    async def main():
        journal = TurnJournal.open(tmp_path / "journal.sqlite", "g")
        try:
            grown = asyncio.create_task(journal.grown(0))
            await asyncio.sleep(0)
            (number,) = journal.append([turn()])
            with pytest.raises(JournalError, match="older copy"):
                journal.acknowledge(number)
            await grown
            assert [row.number for row in await journal.read(0)] == [number]
            await journal.durable(number)
            journal.acknowledge(number)
            assert await journal.read(number) == []
            with pytest.raises(ValueError, match="the last one is 1"):
                await journal.durable(2)
        finally:
            journal.close()

    asyncio.run(main())


def test_reading_takes_as_much_as_is_asked_for_and_goes_on_behind_it(tmp_path):
    async def main():
        journal = TurnJournal.open(tmp_path / "journal.sqlite", "g")
        try:
            await journal.durable(journal.append([turn(str(n), tokens=100) for n in range(10)])[-1])
            numbers: list[int] = []
            after = reads = 0
            while rows := await journal.read(after, most_bytes=3000):
                numbers += [row.number for row in rows]
                after, reads = rows[-1].number, reads + 1
            assert numbers == list(range(1, 11))
            assert 1 < reads < 10
        finally:
            journal.close()

    asyncio.run(main())


def test_many_entries_share_a_commit(tmp_path, monkeypatch):
    commits = []
    append = JournalFile.append
    monkeypatch.setattr(
        JournalFile,
        "append",
        lambda self, first, entries, acknowledged: (
            commits.append(len(entries)),
            append(self, first, entries, acknowledged),
        ),
    )

    async def main():
        journal = TurnJournal.open(tmp_path / "journal.sqlite", "g")
        try:

            async def one(n: int) -> None:
                await journal.durable(journal.append([turn(str(n))])[-1])

            await asyncio.gather(*map(one, range(400)))
        finally:
            journal.close()

    asyncio.run(main())
    assert sum(commits) == 400
    assert len(commits) <= 40


# ---- what is removed


def test_entries_of_ended_sessions_go_once_they_are_acknowledged(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "TIDY_S", 0.0)
    path = tmp_path / "journal.sqlite"
    records = [turn("a"), turn("b"), next_state(1), end("a"), next_state(2), reward(1), turn("c"), end("c")]

    async def main(acknowledged: int) -> list[int]:
        journal = TurnJournal.open(path, "g")
        try:
            if not journal.last:
                await journal.durable(journal.append(records)[-1])
            journal.acknowledge(acknowledged)
            await asyncio.sleep(0.05)
            kept = [row.number for row in await journal.read(0)]
        finally:
            journal.close()
        return kept

    assert asyncio.run(main(3)) == [1, 2, 3, 4, 5, 6, 7, 8], "the end of a is not acknowledged"
    assert asyncio.run(main(5)) == [2, 5, 6, 7, 8], "a reward that came later waits for its acknowledgement"
    assert asyncio.run(main(8)) == [2, 5]
    assert write(path, turn("d")) == [9], "numbers are never used again"


def test_sessions_of_two_keys_are_not_the_same_whatever_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "TIDY_S", 0.0)

    async def main():
        journal = TurnJournal.open(tmp_path / "journal.sqlite", "g")
        try:
            records = [turn("a", "ann"), turn("a", "bob"), end("a", "ann"), turn("a", "cid")]
            await journal.durable(journal.append([*records, forgotten("a", "cid")])[-1])
            journal.acknowledge(5)
            await asyncio.sleep(0.05)
            assert [row.number for row in await journal.read(0)] == [2]
        finally:
            journal.close()

    asyncio.run(main())


def test_a_session_that_goes_on_under_its_old_name_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "TIDY_S", 0.0)
    path = tmp_path / "journal.sqlite"

    async def main():
        journal = TurnJournal.open(path, "g")
        try:
            await journal.durable(journal.append([turn("a"), end("a"), turn("a", seed=1), next_state(3)])[-1])
            journal.acknowledge(4)
            await asyncio.sleep(0.05)
            assert [row.number for row in await journal.read(0)] == [3, 4]
        finally:
            journal.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "which",
    [{"session": "a"}, {"key": "ann"}, {"session": "a", "key": "ann"}],
    ids=["session", "key", "both"],
)
def test_what_is_forgotten_leaves_the_disk_and_its_numbers_stay(tmp_path, which):
    path = tmp_path / "journal.sqlite"
    secret = "the secret of ann"

    async def main():
        journal = TurnJournal.open(path, "g")
        try:
            records = [
                turn("a", "ann"),
                next_state(1, secret),
                turn("b", "bob"),
                next_state(3, "words of bob"),
            ]
            records += [turn("a", "ann", parent=1), next_state(5, secret)]
            await journal.durable(journal.append(records)[-1])
            journal.acknowledge(2)
            await journal.durable(journal.append([forgotten(**which)])[-1])
            rows = await journal.read(0)
            assert [row.number for row in rows] == [3, 4, 5, 6, 7]
            assert all(row.entry() == Forgotten(**{"session": None, "key": None} | which) for row in rows[2:])
            assert not any(row.chunk for row in rows[2:])
            files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
            assert secret.encode() not in files
            assert b"words of bob" in files
        finally:
            journal.close()

    asyncio.run(main())
    assert len(stored(path)) == 5


# ---- other processes, and their ends

WRITER = """
import asyncio, sys
from pathlib import Path
from slipstream.rollout.gateway.journal import TurnJournal
from tests.unit.gateway_entries import turn

async def main():
    journal = TurnJournal.open(Path(sys.argv[1]), "g")
    print("open", journal.last, flush=True)
    async def one(user):
        for n in range(10**6):
            (number,) = journal.append([turn(f"{user}", seed=n)])
            await journal.durable(number)
            print(number, flush=True)
    await asyncio.gather(*map(one, range(4)))
asyncio.run(main())
"""


def start_writer(path: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_a_second_process_is_kept_out_and_a_killed_one_loses_nothing_durable(tmp_path):
    path, draw = tmp_path / "journal.sqlite", random.Random(7)
    told = 0
    for _ in range(3):
        process = start_writer(path)
        try:
            assert process.stdout.readline().split()[0] == "open"
            with pytest.raises(JournalBusy, match="end the other process"):
                JournalFile.open(path, "g")
            for _ in range(draw.randint(1, 40)):
                told = int(process.stdout.readline())
        finally:
            os.kill(process.pid, signal.SIGKILL)
            rest, _ = process.communicate(timeout=240)
        told = max([told, *map(int, rest.split("\n")[:-1])])
        rows = stored(path)
        numbers = [number for number, *_ in rows]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= told
        for _, entry, chunk in rows:
            session, _, seed = json.loads(entry[13])[0]["content"].split()
            record = turn(session, seed=int(seed))
            assert (entry, chunk) == (plain(record), record.chunk)


# ---- damage


def damaged(path: Path) -> str:
    with pytest.raises(JournalError) as caught:
        JournalFile.open(path, "g")
    return str(caught.value)


def flip(path: Path, marker: bytes) -> None:
    data = bytearray(path.read_bytes())
    position = data.index(marker)
    data[position] ^= 1
    path.write_bytes(data)


def test_damage_is_refused_and_the_error_says_what_to_do(tmp_path):
    path = tmp_path / "journal.sqlite"
    write(path, turn("the session"), next_state(1, "what the user says"), turn("b"))
    whole = path.read_bytes()
    flip(path, b"what the user says")
    assert "entry 2 is damaged: restore the file from a copy, or move it away" in damaged(path)
    for content in (b"", b"not a database" * 100, whole[: len(whole) // 2], whole[:4096]):
        path.write_bytes(content)
        assert "move it away together with journal.sqlite-wal" in damaged(path)
    path.write_bytes(whole)
    flip(path, b"g" if b"gateway-0." not in whole else b"gateway-0.")
    assert "its stamp is damaged" in damaged(path)
    path.write_bytes(whole)
    assert len(stored(path)) == 3


def test_a_missing_entry_is_noticed(tmp_path):
    path = tmp_path / "journal.sqlite"
    write(path, turn("a"), turn("b"), turn("c"))
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM entries WHERE number = 2")
    connection.commit()
    connection.close()
    assert "2 entries after number 0, expected 3" in damaged(path)


def test_a_log_that_is_gone_after_a_kill_is_noticed(tmp_path):
    path = tmp_path / "journal.sqlite"
    process = start_writer(path)
    process.stdout.readline()
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=240)
    (tmp_path / "journal.sqlite-wal").unlink()
    assert "it was not closed, and journal.sqlite-wal is gone" in damaged(path)


def test_a_disk_that_fails_fails_whoever_waits_and_everybody_after(tmp_path, monkeypatch):
    def fail(*_) -> None:
        raise OSError(28, "No space left on device")

    async def main():
        journal = TurnJournal.open(tmp_path / "journal.sqlite", "g")
        monkeypatch.setattr(JournalFile, "append", fail)
        failed = asyncio.create_task(journal.failed())
        (number,) = journal.append([turn()])
        with pytest.raises(JournalError, match="make room"):
            await journal.durable(number)
        with pytest.raises(JournalError, match="make room"):
            await failed
        with pytest.raises(JournalError, match="make room"):
            journal.append([turn()])
        with pytest.raises(JournalError, match="make room"):
            await journal.read(0)
        with pytest.raises(JournalError, match="make room"):
            journal.close()

    asyncio.run(main())
