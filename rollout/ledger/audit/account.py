"""Recounts a run from its ledger: no group or turn lost, none trained twice, none trained beyond the bound.

Every check is a query, or a walk over rows, that uses none of the run's own counts.

account          groups: their ids, states, ends
training_checks  versions, batches, trainings, lags
payload_checks   trajectories and pieces, in rows and segments
turn_checks      turns of live users: entries, states, ends, payload
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.rollout.ledger.audit import turn_checks
from slipstream.rollout.ledger.audit.payload_checks import payload_is_whole
from slipstream.rollout.ledger.audit.records import Records
from slipstream.rollout.ledger.audit.training_checks import (
    batches_are_trained,
    lags_are_right,
    trained_once,
    versions_follow_each_other,
)
from slipstream.rollout.ledger.lineage import INITIAL, deepest_line
from slipstream.rollout.ledger.storage.database import (
    FAILURES,
    LEDGER,
    STATES,
    LedgerError,
    damage,
    exists,
    explained,
    open_for_reading,
)
from slipstream.rollout.ledger.storage.stamp import read_stamp
from slipstream.rollout.ledger.storage.write_ahead_log import checked_log


@dataclass(frozen=True)
class Lineage:
    """The training steps that today's weights descend from."""

    versions: list[int]
    """Versions that these steps published, and copies between them."""
    trained: dict[int, int]
    """Number of groups trained, by version, also of steps that a restart has undone."""
    parents: dict[int, int]
    """Parent of every version."""

    def trained_by(self, version: int) -> int:
        """Return the number of groups that ``version`` was trained on, its ancestors included."""
        return sum(self.trained.get(each, 0) for each in deepest_line(self.parents, version))

    def is_ancestor(self, version: int) -> bool:
        """True if today's weights are those of ``version`` or descend from them."""
        return version == INITIAL or version in self.versions


@dataclass
class Audit:
    """The findings of an audit."""

    groups: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups, by state."""
    losses: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups that were never trained, by reason."""
    turns: dict[str, int] = field(default_factory=dict[str, int])
    """Number of turns of live users, by state."""
    starts: int = 0
    """Starts of the run, and of its trainer while the run went on."""
    steps: int = 0
    """Number of training steps that led to today's weights."""
    steps_lost: int = 0
    """Training steps that were published and then undone by a restart."""
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Number of tokens that were ``trained``, ``masked`` (too old) and ``discarded`` (by restarts)."""
    max_head_lag: int | None = None
    checkpoints: dict[str, str] = field(default_factory=dict[str, str])
    """State of each checkpoint, by name. A damaged checkpoint is no discrepancy if another is sound."""
    discrepancies: list[str] = field(default_factory=list[str])
    """Sentences that say what is wrong; none in a clean audit."""


def audit_ledger(folder: Path) -> tuple[Audit, Lineage]:
    """Check the ledger in a run folder. Raises LedgerError when it cannot be read at all."""
    path = folder / LEDGER
    if exists(path):
        checked_log(path)
    connection = open_for_reading(path)
    try:
        connection.execute("BEGIN")
        records = Records(connection, folder)
        audit = _measured(records)
        for check in CHECKS:
            audit.discrepancies += check(records)
        return audit, Lineage(records.line, records.trained_groups, records.parents)
    except FAILURES as error:
        raise explained(path, error) from error
    finally:
        connection.close()


def _measured(records: Records) -> Audit:
    steps = records.published - records.copies
    lag: int | None = records.connection.execute("SELECT max(head_lag) FROM trainings").fetchone()[0]
    return Audit(
        groups=records.counts("SELECT state, count(*) FROM groups GROUP BY state ORDER BY state"),
        losses=records.counts("SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss"),
        turns=records.counts("SELECT state, count(*) FROM turns GROUP BY state ORDER BY state"),
        starts=len(records.epochs),
        steps=len(steps.intersection(records.line)),
        steps_lost=len(steps.difference(records.line)),
        tokens={
            "trained": records.number("SELECT sum(tokens) FROM trainings"),
            "masked": records.number("SELECT sum(masked) FROM trainings"),
            "discarded": records.number("SELECT sum(tokens) FROM discards"),
        },
        max_head_lag=None if lag is None or lag < 0 else lag,
    )


# ---- checks: each yields sentences that say what is wrong


def _file_is_whole(records: Records) -> Iterator[str]:
    for problem in damage(records.connection):
        yield f"the file is damaged: {problem}"
    try:
        read_stamp(records.connection, records.path)
    except LedgerError as error:
        yield str(error)


def _no_group_is_missing(records: Records) -> Iterator[str]:
    """Group ids have no gap, and prompts except requeued ones were drawn in order, each position once."""
    count: int
    last: int | None
    count, last = records.connection.execute("SELECT count(*), max(id) FROM groups").fetchone()
    if last is not None and last != count - 1:
        yield f"there are {count} groups, but the last one has the id {last}: {last + 1 - count} are missing"
    positions: list[int] = [
        row[0]
        for row in records.connection.execute(
            "SELECT position FROM groups WHERE requeued_from IS NULL ORDER BY id"
        )
    ]
    if positions != list(range(len(positions))):
        wrong = next(i for i, position in enumerate(positions) if position != i)
        yield f"prompts were not drawn in order: draw {wrong} has the position {positions[wrong]}"
    yield from records.examples(
        "groups have another prompt than the requeued group that they replace",
        "SELECT g.id FROM groups g LEFT JOIN groups o ON o.id = g.requeued_from "
        "WHERE g.requeued_from IS NOT NULL "
        "AND (o.id IS NULL OR o.position != g.position OR o.loss != 'requeued')",
    )
    yield from records.examples(
        "expired groups were requeued more than once",
        "SELECT requeued_from FROM groups WHERE requeued_from IS NOT NULL "
        "GROUP BY requeued_from HAVING count(*) > 1",
    )


def _states_are_possible(records: Records) -> Iterator[str]:
    yield from records.examples(
        "groups are in a state that does not exist",
        f"SELECT id FROM groups WHERE state NOT IN {STATES}",
    )
    yield from records.examples(
        "groups have a reason for their loss that does not fit their state",
        "SELECT id FROM groups WHERE (loss IS NOT NULL) != (state IN ('filtered', 'expired', 'failed')) "
        "OR (state = 'filtered' AND loss != 'filtered') "
        "OR (state = 'failed') != (loss IS NOT NULL AND loss IN ('failed', 'quarantined'))",
    )
    yield from records.examples(
        "groups have a training step without being trained, or are trained without having one",
        "SELECT id FROM groups WHERE (step IS NOT NULL) != (state = 'trained')",
    )


CHECKS: tuple[Callable[[Records], Iterator[str]], ...] = (
    _file_is_whole,
    _no_group_is_missing,
    _states_are_possible,
    versions_follow_each_other,
    trained_once,
    batches_are_trained,
    lags_are_right,
    payload_is_whole,
    *turn_checks.CHECKS,
)
