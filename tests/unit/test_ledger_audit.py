"""The audit: clean for what runs do, and one finding for every way in which an account can be wrong."""

import asyncio
import sqlite3

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from slipstream.rollout.control.core import Expired, Loss, Ticket
from slipstream.rollout.ledger.audit import audit_ledger
from slipstream.rollout.ledger.recovery import open_ledger
from tests.unit.test_ledger import BATCH, completion, in_ledger, nothing, ready_group


@pytest.fixture
def path(tmp_path):
    """A run with every kind of group and one restart."""
    path = tmp_path / "ledger.sqlite"

    async def first_life(ledger):
        for version in range(1, 4):
            group = ready_group(ledger, version - 1, [version - 1], version - 1)
            ledger.step_begins(version, version)
            ledger.published(version, [group])
        ledger.admitted(Ticket(3, 3), 3)
        ledger.partial(3, 0, 0, (), completion((3, 4)), done=False)
        ledger.admitted(Ticket(4, 3), 4)
        ledger.expired(Expired(4, Loss.REQUEUED, None))
        ledger.admitted(Ticket(5, 3, requeued_from=4), 4)
        ledger.admitted(Ticket(6, 3), 5)
        ledger.lost(6, Loss.FILTERED)
        ledger.step_begins(4, 4)

    in_ledger(path, first_life)

    async def second_life(ledger):
        group = ready_group(ledger, 7, [5], 5)
        ledger.step_begins(6, 3)
        ledger.published(6, [group])

    in_ledger(path, second_life, restored=2, step=2)
    return path


def test_a_run_as_it_should_be_is_clean(path):
    audit, _, _ = audit_ledger(path)
    # The prompts 0 to 5 were drawn by the first seven groups; the fixture's group 7 draws position 7.
    assert audit.discrepancies == ["prompts were not drawn in order: draw 6 has the position 7"]
    sqlite3.connect(path).execute("UPDATE groups SET position = 6 WHERE id = 7").connection.commit()
    audit, lineage, _ = audit_ledger(path)
    assert audit.discrepancies == []
    assert lineage.versions == [1, 2, 6]
    assert (audit.steps, audit.steps_lost, audit.starts, audit.max_head_lag) == (3, 1, 2, 0)
    assert audit.groups == {"admitted": 2, "expired": 1, "filtered": 1, "ready": 1, "trained": 3}
    assert [lineage.trained_by(version) for version in (0, 1, 2, 6)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        ("DELETE FROM groups WHERE id = 3", "1 are missing"),
        ("UPDATE groups SET position = 9 WHERE id = 3", "draw 3 has the position 9"),
        ("UPDATE groups SET position = 9 WHERE id = 5", "another prompt than the requeued group"),
        ("UPDATE groups SET requeued_from = 4 WHERE id = 6", "requeued more than once"),
        ("UPDATE groups SET state = 'gone' WHERE id = 3", "a state that does not exist: 3"),
        ("UPDATE groups SET loss = 'stale' WHERE id = 3", "a reason for their loss that does not fit"),
        ("UPDATE groups SET state = 'failed' WHERE id = 6", "a reason for their loss that does not fit"),
        ("UPDATE groups SET step = 3 WHERE id = 3", "a training step without being trained"),
        ("INSERT INTO trainings VALUES (6, 0, 0, 1, 0)", "trained twice by the steps behind the weights: 0"),
        (
            "DELETE FROM trainings WHERE group_id = 7",
            "count as trained, but by no step behind the weights: 7",
        ),
        ("UPDATE groups SET state = 'ready', step = NULL WHERE id = 0", "not counted as trained: 0"),
        ("UPDATE steps SET published = 0 WHERE version = 1", "version 1 was not published, but the next"),
        ("DELETE FROM steps WHERE version = 1", "found version 2 (step 2), expected version 1"),
        ("UPDATE epochs SET version = 7 WHERE epoch = 1", "begins with version 7, expected 5"),
        ("UPDATE trainings SET head_lag = 3 WHERE group_id = 7", "beyond the bound that was in force: 7"),
        ("DELETE FROM trajectories WHERE key = 2 * 65536", "do not have exactly 2 trajectories: 2"),
        ("UPDATE trajectories SET payload = x'00' WHERE key = 7 * 65536", "cannot be read: 7.0"),
        ("UPDATE partials SET tokens = 5", "3.0 (4 tokens, not 5)"),
    ],
)
def test_each_discrepancy_is_found(path, damage, finding):
    connection = sqlite3.connect(path)
    connection.execute("UPDATE groups SET position = 6 WHERE id = 7")
    connection.execute(damage)
    connection.commit()
    connection.close()
    audit, _, _ = audit_ledger(path)
    assert any(finding in text for text in audit.discrepancies), audit.discrepancies


def test_batches_of_the_wrong_size_are_found(path):
    connection = sqlite3.connect(path)
    connection.execute("UPDATE meta SET value = 2 WHERE key = 'batch_size'")
    connection.commit()
    connection.close()
    assert any("3 steps did not train 2 groups" in text for text in audit_ledger(path)[0].discrepancies)


def test_whatever_a_run_does_its_ledger_is_clean(tmp_path):
    """Random events, restarts from any version of the line, releases; audited after each life."""
    run_state_machine_as_test(
        lambda: Life(tmp_path),
        settings=settings(max_examples=30, stateful_step_count=40, deadline=None, database=None),
    )


class Life(RuleBasedStateMachine):
    def __init__(self, folder) -> None:
        super().__init__()
        Life.number = getattr(Life, "number", 0) + 1
        self.path = folder / f"{Life.number}.sqlite"
        self.line = {0: 0}
        self.published: list[int] = []
        self.runner = asyncio.Runner()
        self.open(0)

    def open(self, restored: int) -> None:
        self.ledger, recovered = open_ledger(self.path, **BATCH, restored=restored, step=self.line[restored])
        self.version, self.step = recovered.restart.version, recovered.step
        self.line = {v: step for v, step in self.line.items() if v <= restored} | {self.version: self.step}
        self.published = [v for v in self.published if v <= restored]
        self.next = recovered.counts.admitted
        self.position = recovered.position
        self.ready = []
        self.open_ids = []
        self.unstarted = [(group.id, group.position) for group in recovered.open]
        for group in recovered.open:
            self.ledger.discarded(group.id, group.tokens)
        self.wait()

    def wait(self) -> None:
        self.runner.run(self.ledger.flushed())

    @rule()
    def admit(self):
        if self.unstarted:
            id_, position = self.unstarted.pop(0)
            self.ledger.admitted(Ticket(id_, self.version), position)
            self.open_ids.append(id_)
            return
        self.ledger.admitted(Ticket(self.next, self.version), self.position)
        self.open_ids.append(self.next)
        self.next, self.position = self.next + 1, self.position + 1

    @rule(data=st.data(), end=st.sampled_from(["ready", "ready", "partial", *Loss]))
    @precondition(lambda self: self.open_ids)
    def go_on(self, data, end):
        id_ = data.draw(st.sampled_from(self.open_ids))
        if end == "partial":
            self.ledger.partial(id_, 0, 0, (), completion((self.version, 3)), done=False)
            return
        if end is Loss.REQUEUED:
            return
        self.open_ids.remove(id_)
        if end == "ready":
            self.ready.append(self.finish(id_))
        else:
            self.ledger.lost(id_, end)

    def finish(self, id_):
        from slipstream.rollout.trajectory import Group, Prompt
        from tests.unit.test_ledger import trajectory

        group = Group(id_, Prompt(0, "?"), self.version, (trajectory([self.version]),) * 2)
        for sample, each in enumerate(group.trajectories):
            self.ledger.trajectory(id_, sample, each)
        self.ledger.ready(group)
        return group

    @rule(complete=st.booleans())
    @precondition(lambda self: self.ready)
    def train(self, complete):
        group = self.ready.pop(0)
        if self.version - group.admitted_at > BATCH["bound"]:
            self.ledger.lost(group.id, Loss.STALE)
            return
        self.step += 1
        self.ledger.step_begins(self.version + 1, self.step)
        if not complete:
            self.restart(None)
            return
        self.version += 1
        self.line[self.version] = self.step
        self.published.append(self.version)
        self.ledger.published(self.version, [group])

    @rule(data=st.data())
    def release(self, data):
        self.wait()
        self.ledger.release(data.draw(st.sampled_from(sorted(self.line))))

    @rule(data=st.data())
    def restart_from_somewhere(self, data):
        self.restart(data)

    def restart(self, data):
        self.wait()
        self.ledger.close()
        self.audit()
        versions = sorted(self.line)
        self.open(versions[-1] if data is None else data.draw(st.sampled_from(versions)))

    def audit(self):
        audit, lineage, _ = audit_ledger(self.path)
        assert audit.discrepancies == []
        assert lineage.versions == self.published

    def teardown(self):
        self.wait()
        self.ledger.close()
        self.audit()
        self.runner.close()
        self.path.unlink()


def test_an_empty_run_is_clean(tmp_path):
    in_ledger(tmp_path / "ledger.sqlite", nothing)
    audit, _, _ = audit_ledger(tmp_path / "ledger.sqlite")
    assert (audit.discrepancies, audit.max_head_lag, audit.groups) == ([], None, {})
