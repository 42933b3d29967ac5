"""The audit: clean for what runs do, and one finding for every way in which an account can be wrong."""

import asyncio
import sqlite3
from pathlib import Path
from struct import pack

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from slipstream.rollout.control.core import Ticket
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.control.versions import VersionTree
from slipstream.rollout.ledger.audit.account import audit_ledger
from slipstream.rollout.ledger.recovery import LEDGER, open_ledger
from slipstream.rollout.ledger.rows.samples import JUDGED, WHOLE, stored
from slipstream.rollout.ledger.storage.database import crc_of, sealed
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing.writer import SAMPLES, Ledger, Training
from slipstream.rollout.tokens.record import encode
from tests.tries import tries
from tests.unit.test_ledger import (
    BATCH,
    add_piece,
    in_ledger,
    judge,
    nothing,
    query,
    ready_group,
    train,
    training,
    trajectory,
)


@pytest.fixture
def folder(tmp_path):
    """A run with every kind of group and one restart.

    0 - 1 - 2 - 3       4 was begun and never published
            |
            + - 5
    """

    async def first_life(ledger: Ledger) -> None:
        for version in range(1, 4):
            ready_group(ledger, version - 1, [version - 1], version - 1)
            train(ledger, version, version - 1, version - 1, [version - 1])
        ledger.admitted(Ticket(3, 3), 3)
        add_piece(ledger, 3 * SAMPLES, 0, 3, 4)
        ledger.admitted(Ticket(4, 3), 4)
        ledger.lost(4, Loss.REQUEUED)
        ledger.admitted(Ticket(5, 3, requeued_from=4), 4)
        ledger.admitted(Ticket(6, 3), 5)
        ledger.lost(6, Loss.FILTERED)
        ledger.step_begins(4, 3, [3])

    in_ledger(tmp_path, first_life)

    async def second_life(ledger: Ledger) -> None:
        ledger.admitted(Ticket(7, 2), 6)
        judge(ledger, 7, [3])
        ledger.ready(7, 2)
        train(ledger, 5, 2, 7, [3], lag=1)

    in_ledger(tmp_path, second_life, restored=2)
    return tmp_path


def change(folder: Path, *statements: str, values: tuple = ()) -> None:
    connection = sqlite3.connect(folder / LEDGER)
    for statement in statements:
        connection.execute(statement, values)
    connection.commit()
    connection.close()


def findings(folder: Path) -> list[str]:
    return audit_ledger(folder)[0].discrepancies


def test_a_run_as_it_should_be_is_clean(folder):
    audit, lineage = audit_ledger(folder)
    assert audit.discrepancies == []
    assert lineage.versions == [1, 2, 5]
    assert (audit.steps, audit.steps_lost, audit.starts, audit.max_head_lag) == (3, 1, 2, 1)
    assert audit.groups == {"admitted": 2, "expired": 1, "filtered": 1, "ready": 1, "trained": 3}
    assert [lineage.trained_by(version) for version in (0, 1, 2, 5)] == [0, 1, 2, 3]
    assert [version for version in range(6) if lineage.is_ancestor(version)] == [0, 1, 2, 5]


def versions_blob(version: int, id_: int, lag: int, tokens: int, *numbers: int) -> str:
    """A sealed list of versions and tokens, as SQL."""
    blob = sealed(pack(f"<{len(numbers)}q", *numbers), crc_of(version, id_, lag, tokens, 0))
    return f"x'{blob.hex()}'"


def batch_blob(version: int, *groups: int) -> str:
    return f"x'{sealed(pack(f'<{len(groups)}q', *groups), crc_of(version)).hex()}'"


LAG_3 = f"head_lag = 3, versions = {versions_blob(5, 7, 3, 2, 3, 2)}"
SOLD = f"tokens = 4, versions = {versions_blob(5, 7, 1, 4, 3, 2)}"
RENAMED = f"versions = {versions_blob(5, 7, 1, 2, 1, 2)}"
UNKNOWN = f"versions = {versions_blob(5, 7, 1, 2, 9, 2)}"


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        # groups
        ("DELETE FROM groups WHERE id = 3", "1 are missing"),
        ("UPDATE groups SET position = 9 WHERE id = 3", "draw 3 has the position 9"),
        ("UPDATE groups SET position = 9 WHERE id = 5", "another prompt than the requeued group"),
        ("UPDATE groups SET requeued_from = 4 WHERE id = 6", "requeued more than once"),
        ("UPDATE groups SET state = 'gone' WHERE id = 3", "a state that does not exist: 3"),
        ("UPDATE groups SET loss = 'stale' WHERE id = 3", "a reason for their loss that does not fit"),
        ("UPDATE groups SET state = 'failed' WHERE id = 6", "a reason for their loss that does not fit"),
        ("UPDATE groups SET loss = 'quarantined' WHERE id = 4", "a reason for their loss that does not fit"),
        ("UPDATE groups SET step = 3 WHERE id = 3", "a training step without being trained"),
        # trainings
        (
            f"INSERT INTO trainings VALUES (5, 0, 2, 1, 0, {versions_blob(5, 0, 2, 1, 0, 1)})",
            "trained twice by the steps that led to the weights: 0",
        ),
        (
            "DELETE FROM trainings WHERE group_id = 7",
            "count as trained, but by no step that led to the weights: 7",
        ),
        ("UPDATE groups SET state = 'ready', step = NULL WHERE id = 0", "not counted as trained: 0"),
        (
            f"UPDATE batches SET groups = {batch_blob(5, 3)} WHERE version = 5",
            "the groups of their batch: vers",
        ),
        ("DELETE FROM batches WHERE version = 5", "did not train the groups of their batch: versions 5"),
        ("UPDATE batches SET groups = x'00' WHERE version = 5", "the batch of version 5 cannot be read"),
        ("UPDATE versions SET published = 0 WHERE version = 5", "were trained but not published: 5"),
        # the tree of versions
        ("DELETE FROM versions WHERE version = 1", "version 1 is missing"),
        ("DELETE FROM versions WHERE version = 4", "version 4 is missing"),
        ("UPDATE versions SET parent = 3 WHERE version = 5", "version 5 has the parent 3, expected 2"),
        ("UPDATE versions SET parent = 1 WHERE version = 3", "version 3 has the parent 1, expected 2"),
        ("UPDATE versions SET epoch = 0 WHERE version = 5", "version 5 has the parent 2, expected 3"),
        ("UPDATE versions SET epoch = 9 WHERE version = 5", "begun in start 9, which is not recorded"),
        (
            "UPDATE epochs SET restored = 4 WHERE epoch = 1",
            "restores version 4, which had not been published",
        ),
        ("UPDATE epochs SET restored = 3 WHERE epoch = 1", "version 5 has the parent 2, expected 3"),
        ("UPDATE epochs SET step = 3 WHERE epoch = 1", "3 training steps are recorded for version 2"),
        ("DELETE FROM epochs WHERE epoch = 0", "the starts are numbered 1"),
        # lags
        ("UPDATE trainings SET head_lag = 0 WHERE group_id = 7", "group 7 in version 5: a BLOB"),
        (f"UPDATE trainings SET {LAG_3} WHERE group_id = 7", "head lag 3 is recorded, the tree has 1"),
        (f"UPDATE trainings SET {SOLD} WHERE group_id = 7", "4 trained tokens are recorded, by version 2"),
        (
            f"UPDATE trainings SET {RENAMED} WHERE group_id = 7",
            "{1: 2} are recorded, its trajectories have {3: 2}",
        ),
        (f"UPDATE trainings SET {UNKNOWN} WHERE group_id = 7", "version 9 has no parent"),
        ("UPDATE epochs SET bound = 0 WHERE epoch = 1", "beyond the bound that was in force: 7"),
        # what is stored
        ("DELETE FROM samples WHERE key = 2 * 65536", "do not have exactly 2 trajectories: 2"),
        ("UPDATE samples SET header = x'00' WHERE key = 7 * 65536", "cannot be read: 7.0 (row"),
        ("UPDATE samples SET refs = NULL WHERE key = 7 * 65536", "cannot be read: 7.0 (row"),
        ("UPDATE samples SET key = 6 * 65536 WHERE key = 7 * 65536", "cannot be read: row"),
        (
            "UPDATE groups SET tokens = 3 WHERE id = 7",
            "3 sampled tokens are recorded, its trajectories have 2",
        ),
        ("UPDATE stamp SET data = x'00'", "its stamp is damaged"),
    ],
)
def test_each_discrepancy_is_found(folder, damage, finding):
    change(folder, damage)
    assert any(finding in text for text in findings(folder)), findings(folder)


@pytest.mark.parametrize(
    ("versions", "finding"),
    [
        ([2], "{3: 2} are recorded, its trajectories have {2: 1, 3: 1}"),
        ([9], "7 (versions 9 were never begun)"),
        ([3, 3], "1 tokens of context and 1 sampled ones, but its header has 1 and 2"),
    ],
)
def test_a_header_with_other_runs_is_found(folder, versions, finding):
    """The header is written anew with a right checksum, as a faulty program would."""
    [(id_, refs)] = query(folder, f"SELECT id, refs FROM samples WHERE key = {7 * SAMPLES}")
    row = stored(id_, (7 * SAMPLES, JUDGED, WHOLE, refs, encode(trajectory(versions).header)))
    change(folder, "UPDATE samples SET header = ? WHERE id = ?", values=(row[-1], id_))
    [text] = findings(folder)
    assert finding in text


def test_a_row_that_was_changed_behind_the_program_is_found(folder):
    """Statements of SQL keep the checksums of rows right, unless they see another expression for them."""

    def rewrite(before: str, after: str) -> None:
        connection = sqlite3.connect(folder / LEDGER)
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("UPDATE sqlite_schema SET sql = replace(sql, ?, ?)", (before, after))
        connection.commit()
        connection.close()

    rewrite("* 9", "* 10")
    assert findings(folder) == ["the file is damaged: its tables are not those of a ledger"]
    change(folder, "UPDATE groups SET version = 2 WHERE id = 7")
    rewrite("* 10", "* 9")
    assert findings(folder) == ["the file is damaged: table groups: wrong checksum of id 7"]


def test_missing_and_damaged_payload_is_found(folder):
    segments = sorted((folder / FOLDER).iterdir())
    data = bytearray(segments[-1].read_bytes())
    data[-1] ^= 1
    segments[-1].write_bytes(data)
    assert any("its bytes are damaged" in text for text in findings(folder))
    segments[-1].unlink()
    assert any("2 stored trajectories or pieces cannot be read: 7.0" in text for text in findings(folder))


def test_batches_of_the_wrong_size_are_found(folder):
    change(folder, "UPDATE meta SET value = 2 WHERE key = 'batch_size'")
    assert "5 steps did not train 2 groups: versions 1, 2, 3, 4, 5" in findings(folder)


def copied(folder):
    """Write the ledger of a run that goes on from version 1, whose weights are published as version 4.

    0 - 1 - 2 - 3
        + = 4 - 5 - 6
    """

    async def act(ledger: Ledger) -> None:
        for version in range(1, 4):
            ready_group(ledger, version - 1, [version - 1], version - 1)
            train(ledger, version, version - 1, version - 1, [version - 1])
        await ledger.restarted(1, bound=BATCH["bound"], n_samples=BATCH["n_samples"])
        ledger.copy_begins(4, 1)
        ledger.published(4, [])
        train(ledger, 5, 4, 1, [1], lag=0)
        train(ledger, 6, 5, 2, [2], lag=2)

    in_ledger(folder, act)
    return folder


def test_the_weights_of_a_copy_are_those_of_its_parent(tmp_path):
    audit, lineage = audit_ledger(copied(tmp_path))
    assert audit.discrepancies == []
    assert (audit.steps, audit.steps_lost, audit.max_head_lag) == (3, 2, 2)
    assert lineage.versions == [1, 4, 5, 6]
    assert [lineage.trained_by(version) for version in (1, 4, 5, 6)] == [1, 1, 2, 3]


def test_a_copy_that_is_none_is_found(tmp_path):
    change(copied(tmp_path), "UPDATE versions SET copy = 0 WHERE version = 4")
    assert findings(tmp_path)[:2] == [
        "2 trainings are labelled wrong: group 1 in version 5: the head lag 0 is recorded, the tree has 1, "
        "group 2 in version 6: the head lag 2 is recorded, the tree has 3",
        "1 groups or turns were trained beyond the bound that was in force: 2",
    ]
    change(tmp_path, "UPDATE versions SET copy = 1 WHERE version = 5")
    assert "1 copies have a batch of their own: versions 5" in findings(tmp_path)


def test_tokens_that_were_too_old_are_accounted_for(tmp_path):
    """Tokens of version 0 are three updates old in the step from version 3, beyond the bound of 2."""

    async def act(ledger: Ledger) -> None:
        for version in range(1, 4):
            ready_group(ledger, version - 1, [version - 1], version - 1)
            train(ledger, version, version - 1, version - 1, [version - 1])
        ready_group(ledger, 3, [0, 0, 1], 0)
        ledger.step_begins(4, 3, [3])
        ledger.published(4, [Training(3, 2, 2, 4, 6, ((1, 2),))])

    in_ledger(tmp_path, act)
    audit, _ = audit_ledger(tmp_path)
    assert (audit.discrepancies, audit.tokens["masked"]) == ([], 4)


def test_whatever_a_run_does_its_ledger_is_clean(tmp_path):
    """Random events, restarts from any version of the line, releases; audited after each life."""
    run_state_machine_as_test(
        lambda: Life(tmp_path),
        settings=tries(10, stateful_step_count=30, database=None),
    )


class Life(RuleBasedStateMachine):
    """A run whose lags are those of the control core's tree; the audit finds them with its own code."""

    number = 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        Life.number += 1
        self.folder = folder / str(Life.number)
        self.folder.mkdir()
        self.published = {0}
        self.kept = {0}
        """Versions that the run may be restored from: those not behind a release."""
        self.prompts: dict[int, tuple[int, int]] = {}
        """Position of each group's prompt, and how often the prompt was requeued before."""
        self.owed: list[int] = []
        """Expired groups whose prompts have no group at present, by id."""
        self.sampled: dict[int, int] = {}
        """Version of the tokens of each group that was ever ready."""
        self.runner = asyncio.Runner()
        self.open(0)

    def open(self, restored: int) -> None:
        self.ledger, recovered = open_ledger(self.folder, **BATCH, restored=restored, segment_bytes=2_000)
        assert recovered.notes == []
        self.tree = VersionTree(recovered.versions, recovered.copies)
        assert recovered.step == self.tree.updates(restored)
        self.version = restored
        self.next = recovered.counts.admitted
        self.position = recovered.position
        self.ready: dict[int, list[int]] = {}
        self.open_ids = []
        self.unstarted = []
        assert [(group.id, group.position, group.requeues) for group in recovered.requeued] == [
            (id_, position, requeues + 1) for id_ in self.owed for position, requeues in [self.prompts[id_]]
        ]
        for group in recovered.open:
            assert (group.position, group.requeues) == self.prompts[group.id]
            if group.is_ready and group.id % 2:
                self.ready[group.id] = [self.sampled[group.id]]
            else:
                self.ledger.discarded(group.id, 0)
                self.unstarted.append((group.id, group.position))
        self.wait()

    def wait(self) -> None:
        self.runner.run(self.ledger.flushed())

    @rule()
    def admit(self):
        before = None
        if self.unstarted:
            id_, position = self.unstarted.pop(0)
        elif self.owed:
            id_, before = self.next, self.owed.pop(0)
            position, requeues = self.prompts[before]
            self.prompts[id_] = position, requeues + 1
            self.next += 1
        else:
            id_, position = self.next, self.position
            self.prompts[id_] = position, 0
            self.next, self.position = self.next + 1, self.position + 1
        self.ledger.admitted(Ticket(id_, self.version, before), position)
        self.open_ids.append(id_)

    @rule(data=st.data(), end=st.sampled_from(["ready", "ready", "piece", Loss.REQUEUED, *Loss]))
    @precondition(lambda self: self.open_ids)
    def go_on(self, data, end):
        id_ = data.draw(st.sampled_from(self.open_ids))
        if end == "piece":
            add_piece(self.ledger, id_ * SAMPLES, 0, self.version, 3)
            return
        self.open_ids.remove(id_)
        if end == "ready":
            judge(self.ledger, id_, [self.version])
            self.ledger.ready(id_, 2)
            self.ready[id_] = [self.version]
            self.sampled[id_] = self.version
        else:
            self.ledger.lost(id_, end)
        if end is Loss.REQUEUED:
            self.owed = sorted([*self.owed, id_])

    @rule(complete=st.booleans())
    @precondition(lambda self: self.ready)
    def train(self, complete):
        id_, versions = min(self.ready.items())
        del self.ready[id_]
        lag = self.tree.distance(versions[0], self.version)
        if lag > BATCH["bound"]:
            self.ledger.lost(id_, Loss.STALE)
            return
        version = self.tree.begin(self.version)
        self.ledger.step_begins(version, self.version, [id_])
        if not complete:
            self.restart(self.version)
            return
        self.ledger.published(version, [training(id_, versions, lag)])
        self.version = version
        self.published.add(version)
        self.kept.add(version)

    @rule(complete=st.sampled_from([True, True, True, False]))
    def publish_a_copy(self, complete):
        version = self.tree.begin(self.version, is_copy=True)
        self.ledger.copy_begins(version, self.version)
        if not complete:
            self.restart(self.version)
            return
        self.ledger.published(version, [])
        self.version = version
        self.published.add(version)
        self.kept.add(version)

    @rule(data=st.data())
    def release(self, data):
        self.wait()
        line = [v for v in sorted(self.kept) if self.tree.is_ancestor(v, self.version)]
        version = data.draw(st.sampled_from(line))
        self.ledger.release(version)
        self.kept = {v for v in self.kept if v >= version}

    @rule(data=st.data())
    def restart_from_somewhere(self, data):
        line = [v for v in sorted(self.kept) if self.tree.is_ancestor(v, self.version)]
        self.restart(data.draw(st.sampled_from(line)))

    @rule()
    @precondition(lambda self: self.owed)
    def restart_while_a_requeued_prompt_waits(self):
        self.restart(self.version)

    def restart(self, version):
        self.wait()
        self.ledger.close()
        self.audit()
        self.open(version)

    def audit(self):
        audit, lineage = audit_ledger(self.folder)
        assert audit.discrepancies == []
        assert audit.steps == self.tree.updates(self.version)
        assert lineage.versions == [
            v for v in sorted(self.published) if v and self.tree.is_ancestor(v, self.version)
        ]

    def teardown(self):
        self.restart(self.version)
        self.ledger.close()
        self.runner.close()


def test_an_empty_run_is_clean(tmp_path):
    in_ledger(tmp_path, nothing)
    audit, _ = audit_ledger(tmp_path)
    assert (audit.discrepancies, audit.max_head_lag, audit.groups) == ([], None, {})
