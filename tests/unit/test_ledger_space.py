"""The files of payload: they go when nothing needs them, and a straggler keeps only its own chunks."""

import os
import zlib
from pathlib import Path

import pytest

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.recovery import open_ledger
from slipstream.rollout.ledger.storage.database import LedgerError
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing.store import SPARSE_SEGMENTS
from slipstream.rollout.ledger.writing.writer import SAMPLES, Ledger
from slipstream.rollout.tokens.record import REF, encode
from tests.unit.test_ledger import (
    BATCH,
    add_piece,
    child,
    in_ledger,
    nothing,
    open_and_close,
    piece_header,
    query,
    ready_group,
    train,
    trajectory,
)

SEGMENT = 4_000
"""Bytes of a segment in these tests: about ten groups of ``ready_group``."""


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).iterdir())


async def pass_by(ledger: Ledger, first: int, number: int, tokens: int = 10) -> None:
    """Have groups come and go."""
    for id_ in range(first, first + number):
        ready_group(ledger, id_, [0] * tokens)
        ledger.lost(id_, Loss.STALE)
        await ledger.flushed()


def test_a_segment_goes_when_its_last_group_has_ended(tmp_path):
    async def act(ledger: Ledger) -> None:
        for id_ in range(60):
            ready_group(ledger, id_, [0] * 30)
            await ledger.flushed()
        before = segments(tmp_path)
        assert len(before) > 5
        for id_ in range(59):
            ledger.lost(id_, Loss.STALE)
        await ledger.flushed()
        ledger.admitted(Ticket(60, 0), 60)  # the writer tidies up after it has told of a commit
        await ledger.flushed()
        assert segments(tmp_path) == before[-2:]

    in_ledger(tmp_path, act, segment_bytes=SEGMENT)
    assert query(tmp_path, "SELECT count(*) FROM samples")[0][0] < 2 * 20
    assert [group.id for group in in_ledger(tmp_path, nothing).open] == [59, 60]


def test_trained_groups_keep_their_segments_until_they_are_released(tmp_path):
    async def act(ledger: Ledger) -> None:
        for id_ in range(40):
            ready_group(ledger, id_, [id_] * 30, id_)
            train(ledger, id_ + 1, id_, id_, [id_] * 30)
            await ledger.flushed()
        assert len(segments(tmp_path)) > 4
        ledger.release(30)
        await ledger.flushed()
        ledger.step_failed(41, "")
        await ledger.flushed()

    in_ledger(tmp_path, act, segment_bytes=SEGMENT)
    recovered, _ = open_and_close(tmp_path, restored=30)
    assert [group.id for group in recovered.open if group.is_ready] == list(range(30, 40))
    assert recovered.notes == []
    assert int(segments(tmp_path)[0]) > 2


@pytest.mark.parametrize("pieces", [1, 40])
def test_a_straggler_does_not_keep_the_segments_that_it_has_touched(tmp_path, pieces):
    """One sample grows while 2,000 groups come and go, in segments of which it has a small part each."""
    refs: list[bytes] = []

    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        for number in range(pieces):
            refs.append(add_piece(ledger, 0, number, 0, number + 1))
            chunk = ledger.read(refs[-1])
            await pass_by(ledger, 1 + number * (400 // pieces), 400 // pieces)
            own = sum(REF.unpack(ref)[2] for ref in refs)
            stored = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
            assert stored <= (SPARSE_SEGMENTS + 3) * SEGMENT + 2 * own
            assert ledger.read(refs[-1]) == chunk
        # References from before the chunks were copied go on to be valid, in reads and in rows.
        lengths = [len(ledger.read(ref)) for ref in refs]
        assert lengths == [12 + 8 * (number + 1) for number in range(pieces)]
        each = trajectory([0] * sum(number + 1 for number in range(pieces)), reward=None)
        ledger.answered(0, b"".join(refs), encode(each.header))
        await pass_by(ledger, 401, 200)
        assert len(ledger.read(b"".join(refs))) == sum(lengths)

    in_ledger(tmp_path, act, segment_bytes=SEGMENT)
    recovered, [chunks] = open_and_close(tmp_path)
    assert recovered.notes == []
    assert len(chunks) == sum(12 + 8 * (number + 1) for number in range(pieces))


def test_chunks_are_copied_as_often_as_necessary(tmp_path):
    """Ready groups, as the control core holds them: their references are those of the beginning."""
    held: dict[int, bytes] = {}

    async def act(ledger: Ledger) -> None:
        for id_ in range(300):
            segment, offset = ledger.append(b"%08d" % id_)
            ref = REF.pack(segment, offset, 8, zlib.crc32(b"%08d" % id_))
            ledger.admitted(Ticket(id_, 0), id_)
            ledger.piece(id_ * SAMPLES, 0, ref, piece_header((0, 1)))
            ledger.append(b"x" * 900)  # of leases that have ended
            if id_ % 50 == 0:
                held[id_] = ref
            else:
                ledger.lost(id_, Loss.STALE)
            await ledger.flushed()
            assert {i: ledger.read(ref) for i, ref in held.items()} == {i: b"%08d" % i for i in held}

    in_ledger(tmp_path, act, segment_bytes=SEGMENT)
    assert len(segments(tmp_path)) <= SPARSE_SEGMENTS + 4
    ledger, recovered = open_ledger(tmp_path, **BATCH)
    [*pieces] = [group.samples[0].pieces[0][0] for group in recovered.open]
    assert [ledger.read(ref) for ref in pieces] == [b"%08d" % id_ for id_ in held]
    ledger.close()


def test_frames_of_leases_that_have_ended_are_forgotten(tmp_path):
    async def act(ledger: Ledger) -> None:
        for _ in range(100):
            ledger.append(b"x" * 500)
            await ledger.flushed()

    in_ledger(tmp_path, act, segment_bytes=SEGMENT)
    assert len(segments(tmp_path)) <= 4


@pytest.mark.parametrize("call", ["_forget", "_delete"])
def test_a_crash_while_segments_are_dropped_or_copied_loses_nothing(tmp_path, call):
    process = child(
        f"""
        from slipstream.rollout.ledger.writing import store
        from tests.unit.test_ledger_space import SEGMENT, pass_by
        before = store.Store.{call}
        calls = 0
        def dying(self, segments):
            global calls
            calls += 1
            if calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            before(self, segments)
        store.Store.{call} = dying

        async def main():
            ledger, _ = open_ledger(Path({str(tmp_path)!r}), **BATCH, segment_bytes=SEGMENT)
            ledger.admitted(Ticket(0, 0), 0)
            for number in range(400):
                add_piece(ledger, 0, number, 0, 1)
                await pass_by(ledger, 1 + number, 1)
                print(number, flush=True)
        asyncio.run(main())
        """
    )
    output, errors = process.communicate(timeout=120)
    assert process.returncode == -9, errors
    acknowledged = output.split()
    recovered, _ = open_and_close(tmp_path)
    assert recovered.notes == []
    [group, *_] = recovered.open
    assert group.id == 0 and len(group.samples[0].pieces) > int(acknowledged[-1])
    assert audit_ledger(tmp_path)[0].discrepancies == []
    known = {f"{segment:08d}" for (segment,) in query(tmp_path, "SELECT segment FROM segments")}
    assert set(segments(tmp_path)) == known


def test_the_log_is_written_back_before_it_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.rollout.ledger.writing.store.LOG_BYTES", 200_000)
    sizes: list[int] = []

    async def act(ledger: Ledger) -> None:
        for id_ in range(200):
            ready_group(ledger, id_, [0] * 10)
            await ledger.flushed()
            sizes.append(os.stat(tmp_path / "ledger.sqlite-wal").st_size)

    in_ledger(tmp_path, act)
    assert max(sizes) < 400_000
    assert in_ledger(tmp_path, nothing).notes == []


def test_many_segments_are_read_with_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.rollout.ledger.storage.segments.OPEN_FILES", 3)

    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        refs = [add_piece(ledger, 0, number, 0, 400) for number in range(20)]
        await ledger.flushed()
        assert len(segments(tmp_path)) >= 10
        files = len(os.listdir("/proc/self/fd"))
        for ref in [*refs, *refs[::-1]]:
            assert len(ledger.read(ref)) == 12 + 8 * 400
        assert len(os.listdir("/proc/self/fd")) <= files + 3

    in_ledger(tmp_path, act, segment_bytes=SEGMENT)


def test_a_segment_that_vanishes_is_noticed_when_it_is_read(tmp_path):
    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        ref = add_piece(ledger, 0, 0, 0, 3)
        await ledger.flushed()
        [segment] = (tmp_path / FOLDER).iterdir()
        segment.unlink()
        with pytest.raises(LedgerError, match="the file is missing"):
            ledger.read(ref)

    in_ledger(tmp_path, act)
