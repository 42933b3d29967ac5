"""Damage to the files of a ledger: it is never silent, and never a traceback.

Whatever happens to the files, opening the ledger ends in one of three ways: with everything that was there;
with less, and a note that names the file and the groups; or with a LedgerError that says what to do.
"""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.reading.history import history_of
from slipstream.rollout.ledger.recovery import LEDGER, Recovered, open_ledger
from slipstream.rollout.ledger.rows.samples import JUDGED, WHOLE, stored
from slipstream.rollout.ledger.storage.database import FAILURES, PAGE_BYTES, LedgerError, open_without_log
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing import store
from slipstream.rollout.ledger.writing.writer import SAMPLES, Ledger
from slipstream.rollout.tokens.record import REF, encode, encode_trajectory
from tests.unit.test_ledger import (
    BATCH,
    add_piece,
    appended,
    child,
    in_ledger,
    judge,
    query,
    ready_group,
    train,
    trajectory,
)

LOG = f"{LEDGER}-wal"
SEGMENT = 1_500
RESTORED = 2
"""Version that every restart of this module goes on from."""

Truth = dict[int, tuple[bool, dict[int, tuple[str, bytes]]]]
"""By group: whether it is ready; and the state and all chunks of each sample."""


@dataclass(frozen=True)
class Copies:
    """Copies of one run's folder, as a crash would leave them at two times, and as it is when the run has
    ended.
    """

    early: Path
    late: Path
    closed: Path


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Copies:
    folder = tmp_path_factory.mktemp("run")
    root = tmp_path_factory.mktemp("copies")

    async def act(ledger: Ledger) -> None:
        for id_ in range(3):
            ready_group(ledger, id_, [id_] * 5, id_)
            train(ledger, id_ + 1, id_, id_, [id_] * 5)
        ledger.admitted(Ticket(3, 3), 3)
        ledger.lost(3, Loss.FAILED, note="a reason")
        ready_group(ledger, 4, [3, 3], 3)
        await ledger.flushed()
        shutil.copytree(folder, root / "early")
        await written_back(ledger)
        ledger.admitted(Ticket(5, 3), 5)
        for number in range(4):
            add_piece(ledger, 5 * SAMPLES, number, 3, 10)
            await ledger.flushed()
        ready_group(ledger, 6, [3] * 40, 3)
        ledger.admitted(Ticket(7, 3), 7)
        each = trajectory([3] * 12, reward=None)
        [ref] = appended(ledger, encode_trajectory(each))
        ledger.answered(7 * SAMPLES + 1, ref, encode(each.header))
        ledger.step_begins(4, 3, [4])
        await ledger.flushed()
        shutil.copytree(folder, root / "late")

    in_ledger(folder, act, segment_bytes=SEGMENT)
    shutil.copytree(folder, root / "closed")
    return Copies(root / "early", root / "late", root / "closed")


async def written_back(ledger: Ledger) -> None:
    """Have SQLite's log written back into the file, and a new log begun."""
    before, store.LOG_BYTES = store.LOG_BYTES, 0
    for _ in range(2):  # the writer thread tidies up after a commit, before the next one
        ledger.release(0)
        await ledger.flushed()
    store.LOG_BYTES = before
    ledger.release(0)
    await ledger.flushed()


def state_of(folder: Path, restored: int = RESTORED) -> tuple[Recovered, Truth]:
    """Open the ledger. Return what is recovered, with all chunks."""
    ledger, recovered = open_ledger(folder, **BATCH, restored=restored)
    try:
        return recovered, {
            group.id: (
                group.is_ready,
                {
                    number: (sample.state, ledger.read(sample.all_refs))
                    for number, sample in group.samples.items()
                },
            )
            for group in recovered.open
        }
    finally:
        ledger.close()


@pytest.fixture(scope="module")
def truth(copies, tmp_path_factory) -> tuple[Recovered, Truth]:
    folder = tmp_path_factory.mktemp("truth") / "run"
    shutil.copytree(copies.late, folder)
    recovered, truth = state_of(folder)
    assert recovered.notes == []
    assert {id_: ready for id_, (ready, _) in truth.items()} == {
        2: True,
        4: True,
        5: False,
        6: True,
        7: False,
    }
    return recovered, truth


def check_outcome(folder: Path, truth: tuple[Recovered, Truth], *words: str) -> str:
    """Open a damaged ledger. Return the error or the notes, or an empty text if everything is there.

    ``words``: what the error or the notes must say.
    """
    before, whole = truth
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-audited"))
    try:
        recovered, present = state_of(folder)
    except LedgerError as error:
        text = str(error)
        assert str(folder) in text, text
        assert any(advice in text for advice in ("restore", "check", "give the", "remount", "delete")), text
        assert all(word in text for word in words), text
        with pytest.raises(LedgerError):  # and it stays so: nothing was made up
            state_of(folder)
        return text
    text = "\n".join(recovered.notes)
    assert all(word in text for word in words), text
    different = [id_ for id_ in {*whole, *present} if whole.get(id_) != present.get(id_)]
    if different or recovered.counts != before.counts or recovered.position != before.position:
        assert str(folder) in text, (different, text)
    for id_ in different:
        lost = "has lost its transactions" in text or "ends within transaction" in text
        assert lost or str(id_) in text, (id_, text)
        _, samples = present.get(id_, (False, {}))
        for number, (_, chunks) in samples.items():
            assert whole[id_][1][number][1].startswith(chunks), "what is left is what was there"
    assert_goes_on(folder, recovered, copy)
    return text


def assert_goes_on(folder: Path, recovered: Recovered, copy: Path) -> None:
    """The run goes on with what is left: nothing is noted a second time, and the audit is clean.

    It may find damage to the records of trainings, which opening does not need, if it found that before in
    ``copy``.
    """
    number = recovered.counts.admitted

    async def go_on(ledger: Ledger) -> None:
        ledger.admitted(Ticket(number, RESTORED), recovered.position)
        judge(ledger, number, [RESTORED])
        ledger.ready(number, 2)
        ledger.release(RESTORED)  # what was trained may be damaged as well, but is not needed any more

    again = in_ledger(folder, go_on, restored=RESTORED)
    assert again.notes == []
    assert [group.id for group in again.open] == [group.id for group in recovered.open]
    assert state_of(folder)[1][number][0]
    discrepancies = audit_ledger(folder)[0].discrepancies
    if discrepancies:
        assert set(discrepancies) <= set(audit_ledger(copy)[0].discrepancies)
        assert all("trainings" in text or "batch" in text for text in discrepancies), discrepancies


@pytest.fixture
def folder(copies, tmp_path) -> Path:
    """What a crash leaves."""
    shutil.copytree(copies.late, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def closed(copies, tmp_path) -> Path:
    """What a run leaves that has ended."""
    shutil.copytree(copies.closed, tmp_path / "closed")
    return tmp_path / "closed"


def test_without_damage_everything_is_there(folder, closed, truth):
    assert check_outcome(folder, truth) == ""
    assert check_outcome(closed, truth) == ""


# ---- ledger.sqlite


def cut(path: Path, size: int) -> None:
    os.truncate(path, max(0, path.stat().st_size + size if size < 0 else size))


def zero(path: Path, start: int = 0, size: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    end = len(data) if size is None else start + size
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES, 9 * PAGE_BYTES, -PAGE_BYTES, -1])
def test_a_truncated_file_is_refused(closed, truth, size):
    cut(closed / LEDGER, size)
    assert check_outcome(closed, truth) or size == -1, "the last byte may be of a page that is not used"


def test_a_zeroed_file_is_refused(closed, truth):
    zero(closed / LEDGER)
    assert check_outcome(closed, truth, LEDGER, "damaged")


def test_no_zeroed_page_goes_unnoticed(copies, tmp_path, truth):
    pages = (copies.closed / LEDGER).stat().st_size // PAGE_BYTES
    noticed = 0
    for page in range(pages):
        folder = tmp_path / str(page)
        shutil.copytree(copies.closed, folder)
        zero(folder / LEDGER, page * PAGE_BYTES, PAGE_BYTES)
        noticed += bool(check_outcome(folder, truth))
    assert noticed == pages


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_of_the_database_are_noticed_or_change_nothing(copies, tmp_path, truth, seed):
    """At random offsets. A flipped bit that opening does not notice has changed nothing that the run uses."""
    rng = random.Random(seed)
    original = dump(copies.closed)
    size = (copies.closed / LEDGER).stat().st_size
    for number in range(12):
        folder = tmp_path / str(number)
        shutil.copytree(copies.closed, folder)
        offset, bit = rng.randrange(size), rng.randrange(8)
        flip(folder / LEDGER, offset, bit)
        try:
            changed = dump(folder) != original
        except FAILURES:
            changed = True
        text = check_outcome(folder, truth)
        if changed and not text:
            copy = folder.with_name(f"{number}-audited")
            assert audit_ledger(copy)[0].discrepancies, f"bit {bit} of byte {offset}"


COSMETIC = {"epochs": ("began", "process"), "groups": ("note",), "failures": ("reason",)}
"""Columns that nothing depends on."""


def dump(folder: Path) -> dict[str, list[tuple]]:
    """All rows of all tables, without touching the file."""
    connection = open_without_log(folder / LEDGER)
    try:
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        rows = {}
        for table in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            names = ", ".join(name for name in columns if name not in COSMETIC.get(table, ()))
            rows[table] = sorted(connection.execute(f"SELECT {names} FROM {table}"), key=repr)
        return rows
    finally:
        connection.close()


def test_rows_that_point_outside_cost_only_their_sample(closed, truth):
    [(id_, key, refs)] = query(closed, f"SELECT id, key, refs FROM samples WHERE key = {6 * SAMPLES}")
    [(other_id, other_key, other_refs)] = query(
        closed, f"SELECT id, key, refs FROM samples WHERE key = {4 * SAMPLES + 1}"
    )
    segment, offset, size, crc = REF.unpack(refs)
    missing = stored(
        id_, (key, JUDGED, WHOLE, REF.pack(99, offset, size, crc), encode(trajectory([3]).header))
    )
    segment, offset, size, crc = REF.unpack(other_refs)
    beyond = REF.pack(segment, offset + 10**7, size, crc)
    outside = stored(other_id, (other_key, JUDGED, WHOLE, beyond, encode(trajectory([3]).header)))
    connection = sqlite3.connect(closed / LEDGER)
    connection.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?)", [missing, outside])
    connection.commit()
    connection.close()
    text = check_outcome(closed, truth)
    assert "00000099: the file is missing: what is lost of 1 groups is generated again: 6" in text
    assert "before all that was written to it: what is lost of 1 groups is generated again: 4" in text


# ---- ledger.sqlite-wal


def test_a_lost_log_is_noted_and_its_versions_are_never_used_again(folder, truth):
    (folder / LOG).unlink()
    text = check_outcome(folder, truth, "has lost its transactions")
    assert len(text.splitlines()) == 1
    assert max(history_of(folder).parents) == 4, "version 4 was begun by a lost transaction"


@pytest.mark.parametrize("size", [0, 20, 5_000, -10, -PAGE_BYTES - 100])
def test_a_truncated_log_is_noted(folder, truth, size):
    cut(folder / LOG, size)
    text = check_outcome(folder, truth)
    assert "has lost its transactions" in text or "ends within transaction" in text


def test_a_zeroed_log_is_noted(folder, truth):
    zero(folder / LOG)
    check_outcome(folder, truth, "has lost its transactions")


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_of_the_log_are_noticed_or_change_nothing(copies, tmp_path, truth, seed):
    rng = random.Random(seed)
    size = (copies.late / LOG).stat().st_size
    for number in range(8):
        folder = tmp_path / str(number)
        shutil.copytree(copies.late, folder)
        flip(folder / LOG, rng.randrange(size), rng.randrange(8))
        check_outcome(folder, truth)


def test_a_log_from_an_earlier_time_is_refused(copies, closed, folder, truth):
    shutil.copy(copies.early / LOG, folder / LOG)
    before = (folder / LEDGER).read_bytes(), (folder / LOG).read_bytes()
    check_outcome(folder, truth, "is from another time than", "restore both from the same copy")
    assert ((folder / LEDGER).read_bytes(), (folder / LOG).read_bytes()) == before, "nothing was mixed"
    shutil.copy(copies.late / LOG, closed / LOG)
    check_outcome(closed, truth)


def test_a_log_from_a_later_time_is_refused(copies, folder, truth):
    shutil.copy(copies.early / LEDGER, folder / LEDGER)
    check_outcome(folder, truth, "is from another time than")


def test_the_log_of_another_run_is_refused(copies, folder, truth, tmp_path):
    async def act(ledger: Ledger) -> None:
        for id_ in range(5):
            ready_group(ledger, id_, [0])
        await ledger.flushed()
        shutil.copy(tmp_path / "other" / LOG, folder / LOG)

    (tmp_path / "other").mkdir()
    in_ledger(tmp_path / "other", act)
    check_outcome(folder, truth, "belongs to another run")


def test_an_older_copy_of_the_ledger_is_noted(copies, folder, truth):
    """The file and its log fit together, but the segments know better."""
    shutil.copy(copies.early / LEDGER, folder / LEDGER)
    shutil.copy(copies.early / LOG, folder / LOG)
    check_outcome(folder, truth, "has lost its transactions")


# ---- payload


def segments(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).iterdir())


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "the file is missing"),
    "empty": (lambda path: cut(path, 0), "does not begin as this segment of this run does"),
    "truncated": (lambda path: cut(path, path.stat().st_size // 2), "before all that was written to it"),
    "one byte short": (lambda path: cut(path, -1), "before all that was written to it"),
    "zeroed": (zero, "does not begin as this segment of this run does"),
    "zeroed behind the header": (lambda path: zero(path, 36), "its bytes are damaged"),
    "flipped": (lambda path: flip(path, path.stat().st_size - 5), "its bytes are damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_segments_cost_only_what_was_in_them(copies, tmp_path, truth, kind):
    damage, words = DAMAGE[kind]
    for number, segment in enumerate(segments(copies.late)):
        folder = tmp_path / str(number)
        shutil.copytree(copies.late, folder)
        damage(folder / FOLDER / segment.name)
        text = check_outcome(folder, truth, words)
        assert segment.name in text


def test_all_segments_missing(folder, truth):
    shutil.rmtree(folder / FOLDER)
    text = check_outcome(folder, truth, "the file is missing")
    assert "2, 4" in text.replace("\n", ", ")


def test_segments_of_another_run_are_not_read(copies, folder, truth, tmp_path):
    (tmp_path / "other").mkdir()

    async def act(ledger: Ledger) -> None:
        for id_ in range(9):
            ready_group(ledger, id_, [0] * 20)
            await ledger.flushed()

    in_ledger(tmp_path / "other", act, segment_bytes=SEGMENT)
    for path in segments(folder):
        shutil.copy(tmp_path / "other" / FOLDER / path.name, path)
    check_outcome(folder, truth, "does not begin as this segment of this run does")


def test_segments_from_an_earlier_time_cost_what_was_added_since(copies, folder, truth):
    shutil.rmtree(folder / FOLDER)
    shutil.copytree(copies.early / FOLDER, folder / FOLDER)
    text = check_outcome(folder, truth)
    assert "generated again" in text


def test_bytes_behind_the_last_row_are_normal(folder, truth):
    """A crash between payload and rows leaves them, and a segment of which no row knows."""
    with segments(folder)[-1].open("ab") as file:
        file.write(os.urandom(500))
    (folder / FOLDER / "00000044").write_bytes(b"slipseg1" + os.urandom(50))
    (folder / FOLDER / "00000045").touch()
    assert check_outcome(folder, truth) == ""
    assert not (folder / FOLDER / "00000044").exists()


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_of_segments_are_noticed_or_change_nothing(copies, tmp_path, truth, seed):
    rng = random.Random(seed)
    for number in range(8):
        folder = tmp_path / str(number)
        shutil.copytree(copies.late, folder)
        path = rng.choice(segments(folder))
        flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
        check_outcome(folder, truth)


# ---- permissions, mounts, room


NOBODY = 65534


@pytest.fixture
def public(copies) -> Iterator[Path]:
    """What a run leaves that has ended, in a folder that any user may reach."""
    with TemporaryDirectory() as name:
        shutil.copytree(copies.closed, Path(name) / "run")
        os.chmod(name, 0o755)
        yield Path(name) / "run"


def opened_as_nobody(folder: Path) -> str:
    """Open the ledger as a user who may do only what permissions allow. Return the LedgerError."""
    if os.getuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
    process = child(
        f"""
        if os.getuid() == 0:
            os.seteuid({NOBODY})
        try:
            open_ledger(Path({str(folder)!r}), **BATCH, restored=2)
        except LedgerError as error:
            print(error)
        """
    )
    output, errors = process.communicate(timeout=240)
    assert output, errors
    return output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (LEDGER, "check its permissions and its mount"),
        (FOLDER, "give the user of this run access to the file"),
    ],
)
def test_files_that_must_not_be_read_are_named(public, name, words):
    path = public / name
    for file in path.iterdir() if path.is_dir() else [path]:
        file.chmod(0)
    text = opened_as_nobody(public)
    assert words in text
    assert str(path) in text


def test_a_folder_that_cannot_be_reached_is_named(public):
    public.chmod(0o000)
    assert "give the user of this run write access" in opened_as_nobody(public)


def test_a_folder_that_cannot_be_written_is_named(public):
    public.chmod(0o555)
    assert "give the user of this run write access" in opened_as_nobody(public)


@pytest.mark.parametrize("limit", [1 << 16, 1 << 18, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 20_000])
def test_a_full_disk_ends_in_an_error_and_an_intact_ledger(tmp_path, limit, tokens):
    """A child process may write files of this size only. Payload fills a segment, many rows fill the
    database.
    """
    process = child(
        f"""
        async def main():
            ledger, _ = open_ledger(Path({str(tmp_path)!r}), **BATCH)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
            for id_ in range(10**6):
                ready_group(ledger, id_, [0] * {tokens})
                await ledger.flushed()
                print(id_, flush=True)
        try:
            asyncio.run(main())
        except LedgerError as error:
            print(error)
        """
    )
    output, errors = process.communicate(timeout=120)
    assert output.splitlines(), errors
    *acknowledged, error = output.splitlines()
    # SQLite says only that the disk is full; of the segments the error is known.
    assert "make room" in error or "the limit on file sizes" in error, output + errors
    recovered, _ = state_of(tmp_path, restored=0)
    assert [group.id for group in recovered.open][: len(acknowledged)] == list(range(len(acknowledged)))
    assert all(group.is_ready and len(group.samples) == 2 for group in recovered.open)
    assert all("ends within transaction" in note for note in recovered.notes)
