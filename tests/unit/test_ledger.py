"""The ledger: acknowledged events are read again, under the names that versions have, exactly once."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.ledger.recovery import LEDGER, Recovered, open_ledger
from slipstream.rollout.ledger.rows.samples import ANSWERED, GROWING, JUDGED, OpenSample
from slipstream.rollout.ledger.storage.database import LedgerBusy, LedgerError, open_for_reading
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing.writer import COMMIT_DELAY_S, SAMPLES, Ledger, Training
from slipstream.rollout.tokens.record import (
    REF,
    PieceHeader,
    decode_header,
    decode_piece,
    decode_trajectory,
    encode,
    encode_chunk,
    encode_trajectory,
)
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Trajectory
from tests.selection import shortened

BATCH = {"batch_size": 1, "n_samples": 2, "bound": 2}
ROOT = Path(__file__).parents[2]


# ---- what is written


def trajectory(versions: Sequence[int], reward: float | None = 1.0) -> Trajectory:
    """A trajectory with one token of context, and one sampled token for each of ``versions``."""
    versions_T = np.array([UNSAMPLED, *versions], np.int32)
    n = len(versions_T)
    return Trajectory(
        np.arange(n) + 7,
        versions_T != UNSAMPLED,
        np.linspace(-3, -1, n).astype(np.float32) * (versions_T != UNSAMPLED),
        versions_T,
        Finish.LENGTH,
        3,
        reward,
    )


def appended(ledger: Ledger, *chunks: bytes) -> list[bytes]:
    """Append chunks as one frame. Return the reference to each."""
    segment, offset = ledger.append(memoryview(b"".join(chunks)))
    refs = []
    for chunk in chunks:
        refs.append(REF.pack(segment, offset, len(chunk), zlib.crc32(chunk)))
        offset += len(chunk)
    return refs


def piece_header(*spans: tuple[int, int], call: int = 0) -> bytes:
    return encode(PieceHeader(call, b"digest", spans))


def add_piece(ledger: Ledger, key: int, base: int, version: int, tokens: int) -> bytes:
    [ref] = appended(ledger, encode_chunk([1], range(tokens), [-0.5] * tokens))
    ledger.piece(key, base, ref, piece_header((version, tokens)))
    return ref


def judge(ledger: Ledger, id_: int, versions: Sequence[int], samples: int = 2) -> None:
    """Record all trajectories of a group as judged."""
    each = trajectory(versions)
    for sample, ref in enumerate(appended(ledger, *[encode_trajectory(each)] * samples)):
        ledger.judged(id_ * SAMPLES + sample, ref, encode(each.header))


def ready_group(ledger: Ledger, id_: int, versions: Sequence[int], version: int = 0) -> None:
    """Admit a group, and make it ready with trajectories whose tokens are of ``versions``."""
    ledger.admitted(Ticket(id_, version), id_)
    judge(ledger, id_, versions)
    ledger.ready(id_, 2 * len(versions))


def training(id_: int, versions: Sequence[int], lag: int, masked: int = 0) -> Training:
    """The training of a group of ``ready_group``."""
    tokens = tuple((version, 2 * list(versions).count(version)) for version in dict.fromkeys(versions))
    n = 2 * len(versions)
    return Training(id_, lag, n, masked, n + masked, tokens)


def train(ledger: Ledger, version: int, parent: int, id_: int, versions: Sequence[int], lag: int = 0) -> None:
    """Train a version on one ready group."""
    ledger.step_begins(version, parent, [id_])
    ledger.published(version, [training(id_, versions, lag)])


# ---- the ledger


def in_ledger(folder: Path, act, **state) -> Recovered:
    """Open, run ``act`` on the ledger, flush, close. Return what opening recovered."""
    ledger, recovered = open_ledger(folder, **(BATCH | state))

    async def run():
        await act(ledger)
        await ledger.flushed()

    try:
        asyncio.run(run())
    finally:
        ledger.close()
    return recovered


async def nothing(ledger: Ledger) -> None:
    pass


def query(folder: Path, sql: str) -> list[tuple]:
    connection = open_for_reading(folder / LEDGER)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def child(program: str) -> subprocess.Popen:
    """Start a process that has everything of this module."""
    preamble = (
        "import asyncio, os, resource, signal\n"
        "from pathlib import Path\n"
        "from tests.unit.test_ledger import *\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", preamble + textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


# ---- groups that end untrained


def test_a_lost_group_is_read_before_it_is_forgotten_and_handed_over_when_its_end_is_on_disk(tmp_path):
    """Its segment is deleted in the same breath: with segments this small nothing of it is left."""
    got: list[tuple] = []

    async def act(ledger: Ledger) -> None:
        for id_ in range(6):
            ledger.admitted(Ticket(id_, 0), id_)
            refs = [add_piece(ledger, id_ * SAMPLES, 0, 0, 50), add_piece(ledger, id_ * SAMPLES, 1, 0, 3)]
            if id_ % 2:
                await ledger.flushed()  # read from the segment, and not from memory
            expected = [ledger.read(b"".join(refs)), ledger.read(refs[1])]
            damaged = REF.pack(*REF.unpack(refs[0])[:3], 7)
            ledger.read_lost(
                [b"".join(refs), refs[1], damaged],
                lambda chunks, id_=id_, expected=expected: got.append((id_, chunks, expected, states())),
            )
            ledger.lost(id_, Loss.FILTERED, 53)
        await ledger.flushed()

    def states() -> dict[int, str]:
        """What a kill at this moment would leave."""
        copy = tmp_path / "copy"
        copy.mkdir(exist_ok=True)
        for file in tmp_path.glob(f"{LEDGER}*"):
            shutil.copy(file, copy)
        return dict(query(copy, "SELECT id, state FROM groups"))

    in_ledger(tmp_path, act, segment_bytes=64)
    assert [id_ for id_, *_ in got] == list(range(6))
    for id_, chunks, expected, seen in got:
        assert chunks == [*expected, None]
        assert seen[id_] == "filtered"


# ---- groups and samples


def test_every_kind_of_group_is_found_again(tmp_path):
    refs: dict[str, bytes] = {}

    async def act(ledger: Ledger) -> None:
        for id_ in range(7):
            ledger.admitted(Ticket(id_, 0), id_ + 10)
        refs["first"] = add_piece(ledger, 1 * SAMPLES, 0, 0, 3)
        await ledger.flushed()
        refs["second"] = add_piece(ledger, 1 * SAMPLES, 1, 0, 2)
        each = trajectory([0, 0], reward=None)
        [refs["whole"]] = appended(ledger, encode_trajectory(each))
        ledger.answered(1 * SAMPLES + 1, refs["whole"], encode(each.header))
        judge(ledger, 2, [0], samples=1)
        ledger.lost(3, Loss.FILTERED, 2)
        ledger.lost(4, Loss.FAILED, note="the workflow raised KeyError")
        ledger.lost(5, Loss.STALE, 1)

    in_ledger(tmp_path, act)
    recovered = in_ledger(tmp_path, nothing)
    assert (recovered.epoch, recovered.restored, recovered.step, recovered.position) == (1, 0, 0, 17)
    assert recovered.counts == GroupCounts(7, 0, 1, 1, 1)
    assert recovered.losses == {Loss.FILTERED: 1, Loss.FAILED: 1, Loss.STALE: 1}
    assert recovered.notes == []
    assert [(group.id, group.position, group.version) for group in recovered.open] == [
        (0, 10, 0),
        (1, 11, 0),
        (2, 12, 0),
        (6, 16, 0),
    ]
    empty, begun, half, _ = recovered.open
    assert empty.samples == {}
    assert begun.samples[0] == OpenSample(
        pieces=[(refs["first"], piece_header((0, 3))), (refs["second"], piece_header((0, 2)))]
    )
    assert (begun.samples[1].state, begun.samples[1].refs) == (ANSWERED, refs["whole"])
    assert decode_header(begun.samples[1].header).reward is None
    assert (half.samples[0].state, half.is_ready) == (JUDGED, False)
    assert query(tmp_path, "SELECT note FROM groups WHERE id = 4") == [("the workflow raised KeyError",)]


def test_a_trajectory_comes_back_as_it_was(tmp_path):
    written = trajectory([3, 3, 4])

    async def write(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        [ref] = appended(ledger, encode_trajectory(written))
        ledger.judged(0, ref, encode(written.header))

    in_ledger(tmp_path, write)
    ledger, recovered = open_ledger(tmp_path, **BATCH)
    sample = recovered.open[0].samples[0]
    read = decode_trajectory(ledger.read(sample.refs), decode_header(sample.header))
    ledger.close()
    assert read.header == written.header
    for name in ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T"):
        assert np.array_equal(getattr(read, name), getattr(written, name)), name


def test_pieces_from_the_base_on_are_void(tmp_path):
    refs: list[bytes] = []

    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        for base, tokens in ((0, 1), (1, 2), (2, 3), (1, 4)):
            refs.append(add_piece(ledger, 0, base, 0, tokens))

    in_ledger(tmp_path, act)
    [group] = in_ledger(tmp_path, nothing).open
    assert [ref for ref, _ in group.samples[0].pieces] == [refs[0], refs[3]]


def test_a_whole_trajectory_replaces_its_pieces_and_a_reward_keeps_its_chunks(tmp_path):
    refs: dict[int, bytes] = {}

    async def act(ledger: Ledger) -> None:
        each = trajectory([0])
        for id_ in range(4):
            ledger.admitted(Ticket(id_, 0), id_)
            refs[id_] = add_piece(ledger, id_ * SAMPLES, 0, 0, 3)
        unjudged = encode(trajectory([0], reward=None).header)
        ledger.answered(1 * SAMPLES, refs[1], unjudged)
        ledger.answered(2 * SAMPLES, refs[2], unjudged)
        await ledger.flushed()
        ledger.judged(2 * SAMPLES, None, encode(each.header))
        ledger.judged(3 * SAMPLES, refs[3] * 2, encode(each.header))

    in_ledger(tmp_path, act)
    samples = [group.samples[0] for group in in_ledger(tmp_path, nothing).open]
    assert [sample.state for sample in samples] == [GROWING, ANSWERED, JUDGED, JUDGED]
    assert [sample.refs for sample in samples] == [b"", refs[1], refs[2], refs[3] * 2]
    assert [len(sample.pieces) for sample in samples] == [1, 0, 0, 0]
    assert decode_header(samples[2].header).reward == 1.0


def test_a_sample_that_is_given_up_begins_anew(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        await ledger.flushed()
        add_piece(ledger, 1, 0, 5, 2)

    in_ledger(tmp_path, act)
    [group] = in_ledger(tmp_path, nothing).open
    assert (group.samples[0].state, group.samples[1].state) == (JUDGED, GROWING)
    assert decode_piece(group.samples[1].pieces[0][1]).spans == ((5, 2),)


def test_a_group_that_starts_again_forgets_what_it_had(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        ledger.admitted(Ticket(1, 0), 1)
        add_piece(ledger, SAMPLES, 0, 0, 3)
        ledger.discarded(1, 3)
        ledger.discarded(0, 2)
        add_piece(ledger, 0, 0, 4, 1)
        ledger.admitted(Ticket(0, 5), 0)

    in_ledger(tmp_path, act)
    again, other = in_ledger(tmp_path, nothing).open
    assert (again.is_ready, again.version) == (False, 5)
    assert {number: len(sample.pieces) for number, sample in again.samples.items()} == {0: 1}
    assert other.samples == {}
    assert query(tmp_path, "SELECT group_id, epoch, tokens FROM discards") == [(1, 0, 3), (0, 0, 2)]


def test_rows_of_groups_that_were_never_admitted_or_have_ended_are_ignored(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        ledger.lost(0, Loss.STALE)
        await ledger.flushed()
        judge(ledger, 0, [0])
        judge(ledger, 5, [0])

    in_ledger(tmp_path, act)
    assert query(tmp_path, "SELECT count(*) FROM samples") == [(2,)]
    assert in_ledger(tmp_path, nothing).open == []


@given(st.lists(st.tuples(st.sampled_from("pajv"), st.integers(0, 3)), max_size=12))
@settings(deadline=None)
def test_rows_that_make_a_sample_make_the_same_sample_from_any_other(steps):
    """What compaction relies on: the rows of ``OpenSample.rows`` leave nothing of what was there before."""
    sample, other = OpenSample(), OpenSample()
    for kind, base in steps:
        row = {
            "p": (0, base, b"r" * REF.size, b"piece"),
            "a": (1, -1, b"w" * REF.size, b"answer"),
            "j": (2, -1, None if base else b"x" * REF.size, b"judged"),
            "v": (3, base, None, b""),
        }[kind]
        sample.add(*row)
        other.add(0, len(other.pieces), b"o" * REF.size, b"other")
    for _, *row in sample.rows(7):
        assert other.add(*row) is None
    assert other == sample


# ---- policy versions


def test_the_restored_version_is_served_under_its_own_name_and_later_trainings_are_undone(tmp_path):
    async def train_four(ledger: Ledger) -> None:
        for id_ in range(4):
            ready_group(ledger, id_, [id_], id_)
            train(ledger, id_ + 1, id_, id_, [id_])
        ledger.step_begins(5, 4, [])

    in_ledger(tmp_path, train_four)
    recovered = in_ledger(tmp_path, nothing, restored=2)
    assert (recovered.restored, recovered.step, recovered.counts.trained) == (2, 2, 2)
    assert recovered.versions == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)], (
        "5 was begun: an engine may have it"
    )
    assert [(group.id, group.is_ready, group.version) for group in recovered.open] == [
        (2, True, 2),
        (3, True, 3),
    ]
    header = decode_header(recovered.open[1].samples[0].header)
    assert header.trained_tokens == {3: 1}, "tokens keep the names of their versions"

    async def branch(ledger: Ledger) -> None:
        train(ledger, 6, 2, 2, [2])

    in_ledger(tmp_path, branch, restored=2)
    with pytest.raises(LedgerError, match="the run has gone on from an older version since version 4"):
        open_ledger(tmp_path, **BATCH, restored=4)
    again = in_ledger(tmp_path, nothing, restored=6)
    assert (again.step, again.counts.trained) == (3, 3)
    assert [group.id for group in again.open] == [3]
    # From version 2 again: the branch of 6 is left, and 3 and 4 were left before.
    assert [group.id for group in in_ledger(tmp_path, nothing, restored=2).open] == [2, 3]


def test_a_version_that_the_ledger_does_not_know_is_not_restored(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        ledger.step_begins(1, 0, [0])

    in_ledger(tmp_path, act)
    before = (tmp_path / LEDGER).read_bytes()
    with pytest.raises(LedgerError, match=r"no published version 1, .* older than the checkpoint"):
        open_ledger(tmp_path, **BATCH, restored=1)
    assert (tmp_path / LEDGER).read_bytes() == before


def test_released_trajectories_are_gone_and_their_groups_start_from_the_prompt(tmp_path):
    async def act(ledger: Ledger) -> None:
        for version in (1, 2):
            ready_group(ledger, version - 1, [version - 1], version - 1)
            train(ledger, version, version - 1, version - 1, [version - 1])
        await ledger.flushed()
        ledger.release(1)

    in_ledger(tmp_path, act)
    recovered = in_ledger(tmp_path, nothing)
    assert [(g.id, g.is_ready, len(g.samples)) for g in recovered.open] == [(0, False, 0), (1, True, 2)]
    assert query(tmp_path, "SELECT group_id, tokens FROM discards") == [(0, 2)]


def test_a_training_is_recorded_with_its_lag_and_its_versions(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0, 1, 3])
        ledger.step_begins(1, 0, [0])
        ledger.published(1, [Training(0, 2, 4, 2, 6, ((1, 2), (3, 2)))])

    in_ledger(tmp_path, act)
    rows = query(tmp_path, "SELECT version, group_id, head_lag, tokens, masked FROM trainings")
    assert rows == [(1, 0, 2, 4, 2)]
    assert query(tmp_path, "SELECT state, step, tokens FROM groups") == [("trained", 1, 6)]


def test_failed_steps_are_remembered_until_their_groups_have_ended(tmp_path):
    async def act(ledger: Ledger) -> None:
        for id_ in range(3):
            ready_group(ledger, id_, [0])
        ledger.step_begins(1, 0, [0, 1])
        await ledger.flushed()
        ledger.step_failed(1, "rank 3: CUDA error: an illegal memory access")
        ledger.step_begins(2, 0, [2])
        ledger.step_failed(2, "rank 0 was killed")
        ledger.lost(2, Loss.QUARANTINED, note="rank 0 was killed")

    in_ledger(tmp_path, act, batch_size=2)
    recovered = in_ledger(tmp_path, nothing, batch_size=2)
    assert recovered.failures == [(0, 1)], "the other one is explained by the quarantined group"
    assert recovered.losses == {Loss.QUARANTINED: 1}
    assert recovered.counts.failed == 1


# ---- reading while the ledger is written


def test_chunks_are_read_whether_they_are_on_disk_or_not(tmp_path):
    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        chunks = [bytes([number]) * (number + 1) for number in range(20)]
        early = appended(ledger, *chunks[:10])
        await ledger.flushed()
        late = appended(ledger, *chunks[10:])
        assert ledger.read(b"".join(early + late)) == b"".join(chunks)
        assert [ledger.read(ref) for ref in early + late] == chunks
        await ledger.flushed()
        assert ledger.read(b"".join(late + early)) == b"".join(chunks[10:] + chunks[:10])

    in_ledger(tmp_path, act)


def test_any_thread_reads_while_the_ledger_is_written(tmp_path):
    refs: list[tuple[bytes, bytes]] = []
    is_over = threading.Event()
    wrong: list[object] = []

    async def act(ledger: Ledger) -> None:
        def read() -> None:
            number = 0
            while not is_over.is_set() or number < len(refs):
                if number < len(refs):
                    ref, chunk = refs[number]
                    try:
                        if ledger.read(ref) != chunk:
                            wrong.append(ref)
                    except LedgerError as error:
                        wrong.append(error)
                    number += 1

        thread = threading.Thread(target=read)
        thread.start()
        ledger.admitted(Ticket(0, 0), 0)
        for number in range(3000):
            chunk = number.to_bytes(4, "little") * 50
            [ref] = appended(ledger, chunk)
            refs.append((ref, chunk))
            if number % 7 == 0:
                await asyncio.sleep(0)
        is_over.set()
        await asyncio.to_thread(thread.join)

    in_ledger(tmp_path, act, segment_bytes=20_000)
    assert wrong == []
    assert len(refs) == 3000


def test_damaged_chunks_and_senseless_references_are_refused(tmp_path):
    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        segment, offset = ledger.append(b"0123456789")
        for beyond in ("is missing", "ends after"):  # before and after the file is written
            with pytest.raises(LedgerError, match="damaged"):
                ledger.read(REF.pack(segment, offset, 10, 1))
            with pytest.raises(LedgerError, match=beyond):
                ledger.read(REF.pack(segment, offset + 5, 1000, 1))
            with pytest.raises(LedgerError, match="is missing"):
                ledger.read(REF.pack(77, 2**63, 2**32 - 1, 1))
            with pytest.raises(LedgerError, match="not a multiple of 20"):
                ledger.read(b"x" * 21)
            await ledger.flushed()

    in_ledger(tmp_path, act)


# ---- durability


def test_callbacks_come_once_everything_before_them_is_on_disk(tmp_path):
    order: list[object] = []

    async def act(ledger: Ledger) -> None:
        def note(what: object) -> None:
            order.append((what, ledger.backlog))

        ledger.admitted(Ticket(0, 0), 0)
        appended(ledger, b"x" * 100)
        ledger.when_durable(lambda: note("first"))
        ledger.when_durable(lambda: note("second"))
        order.append(ledger.backlog)
        await ledger.flushed()
        appended(ledger, b"x" * 50)
        ledger.when_durable(lambda: note("third"))
        await ledger.flushed()

    in_ledger(tmp_path, act)
    assert order == [100, ("first", 0), ("second", 0), ("third", 0)]


def test_a_callback_that_fails_keeps_nothing_from_being_written(tmp_path):
    heard: list[object] = []

    async def act(ledger: Ledger) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: heard.append(context["message"])
        )
        ledger.admitted(Ticket(0, 0), 0)
        ledger.when_durable(lambda: 1 / 0)
        ledger.when_durable(lambda: ledger.admitted(Ticket(1, 0), 1))
        await ledger.flushed()
        await ledger.flushed()

    in_ledger(tmp_path, act)
    assert heard == ["a callback of the ledger has failed"]
    assert [group.id for group in in_ledger(tmp_path, nothing).open] == [0, 1]


def test_the_guard_stops_the_ledger_before_it_writes(tmp_path):
    class Fenced(LedgerError):
        """Another driver has the run."""

    is_fenced: list[bool] = []

    def guard() -> None:
        if is_fenced:
            raise Fenced("another driver has the run")

    heard: list[str] = []
    ledger, _ = open_ledger(tmp_path, **BATCH, guard=guard)

    async def run() -> None:
        ledger.admitted(Ticket(0, 0), 0)
        await ledger.flushed()
        ledger.admitted(Ticket(1, 0), 1)
        is_fenced.append(True)
        ledger.when_durable(lambda: heard.append("durable"))
        with pytest.raises(Fenced):
            await ledger.flushed()
        with pytest.raises(Fenced):
            ledger.admitted(Ticket(2, 0), 2)

    asyncio.run(run())
    with pytest.raises(Fenced):
        ledger.close()
    assert heard == []
    # The connection stays open: SQLite would write when it closes the file.
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert [group.id for group in in_ledger(copy, nothing).open] == [0]


def test_a_closed_ledger_refuses_further_events(tmp_path):
    ledger, _ = open_ledger(tmp_path, **BATCH)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.admitted(Ticket(0, 0), 0)


def test_events_from_outside_an_event_loop_are_written_with_the_next_ones(tmp_path):
    ledger, _ = open_ledger(tmp_path, **BATCH)
    ledger.admitted(Ticket(0, 0), 0)

    async def flush() -> None:
        await ledger.flushed()

    asyncio.run(flush())
    ledger.admitted(Ticket(1, 0), 1)
    ledger.close()
    assert [group.id for group in in_ledger(tmp_path, nothing).open] == [0, 1]


def test_a_second_process_is_refused_while_the_first_one_runs(tmp_path):
    ledger, _ = open_ledger(tmp_path, **BATCH)
    try:
        for opener in (lambda: open_ledger(tmp_path, **BATCH), lambda: open_for_reading(tmp_path / LEDGER)):
            with pytest.raises(LedgerBusy, match="another process is running this run"):
                opener()
        other = child(f"open_ledger(Path({str(tmp_path)!r}), **BATCH)")
        assert "LedgerBusy" in other.communicate(timeout=240)[1]
    finally:
        ledger.close()
    open_for_reading(tmp_path / LEDGER).close()


@pytest.mark.parametrize("seed", shortened(range(4), [0]))
def test_what_was_acknowledged_survives_kill_9(tmp_path, seed):
    """Three lives, each killed while it writes. Each goes on with the group that the one before has left."""
    program = f"""
        async def main():
            ledger, recovered = open_ledger(Path({str(tmp_path)!r}), **BATCH, segment_bytes=5_000)
            for id_ in range(sum(group.is_ready for group in recovered.open), 10**6):
                ready_group(ledger, id_, [0] * 50)
                ledger.admitted(Ticket(id_ + 1, 0), id_ + 1)
                if id_ % 3 == 0:
                    await ledger.flushed()
                    print(id_, flush=True)
        asyncio.run(main())
    """
    for life in range(3):
        process = child(program)
        assert process.stdout and process.stderr
        read = [process.stdout.readline() for _ in range(5 + seed * 17 + life)]
        os.kill(process.pid, 9)
        rest, errors = process.communicate()
        acknowledged = "".join([*read, rest]).split()
        assert acknowledged, errors
        recovered = in_ledger(tmp_path, nothing)
        ready = [group.id for group in recovered.open if group.is_ready]
        assert ready == list(range(len(ready))), "a prefix of what was given"
        assert len(ready) > int(acknowledged[-1]), "with everything that was acknowledged"
        assert recovered.counts.admitted <= len(ready) + 1
        assert all("ends within transaction" in note for note in recovered.notes)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "COMMIT", "after"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_crash_between_payload_and_rows_leaves_a_sound_ledger(tmp_path, call, number):
    """The process dies at the given call of the given transaction."""
    process = child(
        f"""
        from slipstream.rollout.ledger.storage import segments
        from slipstream.rollout.ledger.writing import store
        count = 0
        def die(done=None):
            global count
            count += 1
            if count == {number}:
                os.kill(os.getpid(), signal.SIGKILL)
        def dying(before, after):
            def call(*arguments):
                if after: result = before(*arguments)
                die()
                return result if after else before(*arguments)
            return call
        call = {call!r}
        if call in ("pwritev", "fdatasync"):
            setattr(segments.os, call, dying(getattr(os, call), False))
        else:
            store.Store._write_steps = dying(store.Store._write_steps, True)
            if call == "after":
                store.Store.tidy = dying(lambda self: None, True)
                store.Store._write_steps = lambda self, events: None

        async def main():
            ledger, _ = open_ledger(Path({str(tmp_path)!r}), **BATCH)
            for id_ in range(20):
                ready_group(ledger, id_, [0] * 9)
                await ledger.flushed()
                print(id_, flush=True)
        asyncio.run(main())
        """
    )
    output, errors = process.communicate(timeout=240)
    assert process.returncode == -9, errors
    acknowledged = output.split()
    written: list[int] = []

    async def go_on(ledger: Ledger) -> None:
        ready_group(ledger, len(written), [0])

    recovered, _ = open_and_close(tmp_path)
    written += [group.id for group in recovered.open]
    assert written == list(range(number if call == "after" else number - 1))
    assert len(acknowledged) <= len(written)
    assert all(group.is_ready for group in recovered.open)
    assert recovered.notes == []
    in_ledger(tmp_path, go_on)
    assert [group.is_ready for group in in_ledger(tmp_path, nothing).open] == [True] * (len(written) + 1)


def open_and_close(folder: Path, **state) -> tuple[Recovered, list[bytes]]:
    """Open and close a ledger. Return what was recovered, and the chunks of all whole trajectories."""
    ledger, recovered = open_ledger(folder, **(BATCH | state))
    chunks = [ledger.read(sample.refs) for group in recovered.open for sample in group.samples.values()]
    ledger.close()
    return recovered, chunks


# ---- the files


def test_a_growing_completion_is_written_once(tmp_path):
    """A completion of 32,768 tokens that is flushed every 256 tokens.

    It used to be written whole every two seconds: 33.8 MB for 0.26 MB.
    """
    chunk = encode_chunk((), range(256), [-0.5] * 256)

    async def act(ledger: Ledger) -> None:
        ledger.admitted(Ticket(0, 0), 0)
        await ledger.flushed()
        before = written_bytes()
        for number in range(128):
            [ref] = appended(ledger, chunk)
            ledger.piece(0, number, ref, piece_header((0, 256)))
            await ledger.flushed()
        assert written_bytes() - before <= 3 * 128 * len(chunk)

    in_ledger(tmp_path, act)
    [group] = in_ledger(tmp_path, nothing).open
    assert len(group.samples[0].pieces) == 128


def test_many_trajectories_are_written_with_few_bytes_about_them(tmp_path):
    """Everything but the trajectories themselves takes less than a tenth of their bytes."""
    each = trajectory([0] * 512)
    chunk, header = encode_trajectory(each), encode(each.header)

    async def act(ledger: Ledger) -> None:
        before = written_bytes()
        for first in range(0, 2048, 64):
            for id_, ref in enumerate(appended(ledger, *[chunk] * 64), first):
                ledger.admitted(Ticket(id_, 0), id_)
                ledger.judged(id_ * SAMPLES, ref, header)
                ledger.ready(id_, 512)
            await ledger.flushed()
        assert written_bytes() - before <= 1.1 * 2048 * len(chunk)

    in_ledger(tmp_path, act, n_samples=1)


def written_bytes() -> int:
    """Bytes that this process has given to the operating system to write."""
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
    return int(line.split()[1])


def test_the_ledger_of_an_archived_run_can_be_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    in_ledger(tmp_path, nothing)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = sorted(tmp_path.iterdir())
    assert query(tmp_path, "SELECT * FROM groups") == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / LEDGER).write_bytes(b"something else" * 1000)
    with pytest.raises(LedgerError, match="not a database: the file is damaged"):
        open_ledger(tmp_path, **BATCH)
    with pytest.raises(LedgerError, match="does not exist"):
        open_for_reading(tmp_path / "none.sqlite")
    (tmp_path / LEDGER).unlink()
    sqlite3.connect(tmp_path / LEDGER).execute("CREATE TABLE meta (key, value)").connection.commit()
    with pytest.raises(LedgerError, match="has the format none"):
        open_ledger(tmp_path, **BATCH)


def test_a_crash_while_the_ledger_is_created_leaves_none(tmp_path):
    process = child(
        f"""
        os.link = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
        open_ledger(Path({str(tmp_path)!r}), **BATCH)
        """
    )
    process.communicate(timeout=240)
    assert process.returncode == -9
    assert not (tmp_path / LEDGER).exists()
    assert in_ledger(tmp_path, nothing).epoch == 0


def test_payload_without_its_ledger_is_refused(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])

    in_ledger(tmp_path, act)
    (tmp_path / LEDGER).unlink()
    with pytest.raises(LedgerError, match=f"is missing, but there is .*{FOLDER}.*: restore the file"):
        open_ledger(tmp_path, **BATCH)


def test_events_that_come_together_are_committed_together(tmp_path):
    async def act(ledger: Ledger) -> None:
        first = ledger.watermark().sequence
        for id_ in range(1000):
            ready_group(ledger, id_, [0])
        await asyncio.sleep(3 * COMMIT_DELAY_S)
        await ledger.flushed()
        assert ledger.watermark().sequence - first <= 3

    in_ledger(tmp_path, act)
