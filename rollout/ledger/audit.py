"""Recounts a run from its ledger: no group lost, none trained twice, none trained beyond the bound.

Every check is a query, or a walk over rows, that uses none of the run's own counts.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.rollout.control.versions import Restart, survives
from slipstream.rollout.ledger.database import explained, open_for_reading
from slipstream.rollout.ledger.records import CorruptRecord, decode_completion, decode_trajectory
from slipstream.rollout.ledger.recovery import restarts
from slipstream.rollout.ledger.writer import SAMPLES

SHOWN = 5
"""Number of examples that a discrepancy names."""


@dataclass(frozen=True)
class Lineage:
    """The training steps that today's weights descend from."""

    versions: list[int]
    """Versions that these steps published."""
    trained: dict[int, int]
    """Number of groups trained, by version."""

    def trained_by(self, version: int) -> int:
        """Return the number of groups behind the weights of ``version``."""
        return sum(count for trained, count in self.trained.items() if trained <= version)


@dataclass
class Audit:
    """The findings of an audit."""

    groups: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups, by state."""
    losses: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups that were never trained, by reason."""
    starts: int = 0
    steps: int = 0
    """Training steps behind today's weights."""
    steps_lost: int = 0
    """Training steps that were published and then undone by a restart."""
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Number of tokens that were ``trained``, ``masked`` (too old) and ``discarded`` (by restarts)."""
    max_head_lag: int | None = None
    checkpoints: dict[str, str] = field(default_factory=dict[str, str])
    """State of each checkpoint, by name. A damaged checkpoint is no discrepancy if another is sound."""
    discrepancies: list[str] = field(default_factory=list[str])
    """Sentences that say what is wrong; none in a clean audit."""


@dataclass(frozen=True)
class _Run:
    """Everything that a check looks at."""

    connection: sqlite3.Connection
    starts: list[Restart]
    lineage: Lineage

    def meta(self) -> dict[str, int]:
        return dict(self.connection.execute("SELECT key, value FROM meta").fetchall())

    def number(self, query: str) -> int:
        """Return the only value of a query; NULL counts as 0."""
        return self.connection.execute(query).fetchone()[0] or 0

    def counts(self, query: str) -> dict[str, int]:
        return dict(self.connection.execute(query).fetchall())

    def examples(self, finding: str, query: str) -> Iterator[str]:
        """Yield a discrepancy if ``query`` has any rows, which are the ids of groups."""
        ids = [row[0] for row in self.connection.execute(query)]
        if ids:
            yield f"{len(ids)} {finding}: {_few(ids)}"


def audit_ledger(path: Path) -> tuple[Audit, Lineage, list[Restart]]:
    """Check the ledger at ``path``. Raises LedgerError when it cannot be read at all."""
    connection = open_for_reading(path)
    try:
        connection.execute("BEGIN")
        starts = restarts(connection)
        run = _Run(connection, starts, _lineage(connection, starts))
        audit = _measured(run)
        for check in CHECKS:
            audit.discrepancies += check(run)
        return audit, run.lineage, starts
    except sqlite3.Error as error:
        raise explained(path, error) from error
    finally:
        connection.close()


def _lineage(connection: sqlite3.Connection, starts: list[Restart]) -> Lineage:
    published: Iterable[tuple[int, int]] = connection.execute(
        "SELECT version, epoch FROM steps WHERE published = 1 ORDER BY version"
    )
    versions = [version for version, epoch in published if survives(version, epoch, starts)]
    rows: list[tuple[int, int]] = connection.execute(
        "SELECT version, count(*) FROM trainings GROUP BY version"
    ).fetchall()
    counts = dict(rows)
    return Lineage(versions, {version: counts.get(version, 0) for version in versions})


def _measured(run: _Run) -> Audit:
    steps = len(run.lineage.versions)
    lag: int | None = run.connection.execute("SELECT max(head_lag) FROM trainings").fetchone()[0]
    return Audit(
        groups=run.counts("SELECT state, count(*) FROM groups GROUP BY state ORDER BY state"),
        losses=run.counts("SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss"),
        starts=len(run.starts),
        steps=steps,
        steps_lost=run.number("SELECT count(*) FROM steps WHERE published = 1") - steps,
        tokens={
            "trained": run.number("SELECT sum(tokens) FROM trainings"),
            "masked": run.number("SELECT sum(masked) FROM trainings"),
            "discarded": run.number("SELECT sum(tokens) FROM discards"),
        },
        max_head_lag=None if lag is None or lag < 0 else lag,
    )


# ---- checks: each yields sentences that say what is wrong


def _file_is_whole(run: _Run) -> Iterator[str]:
    rows: list[str] = [row[0] for row in run.connection.execute("PRAGMA integrity_check(5)")]
    if rows != ["ok"]:
        yield f"the file is damaged: {'; '.join(rows)}"


def _no_group_is_missing(run: _Run) -> Iterator[str]:
    """Group ids have no gap; but for requeued ones, prompts were drawn in order, each position once."""
    count: int
    last: int | None
    count, last = run.connection.execute("SELECT count(*), max(id) FROM groups").fetchone()
    if last is not None and last != count - 1:
        yield f"there are {count} groups, but the last one has the id {last}: {last + 1 - count} are missing"
    positions: list[int] = [
        row[0]
        for row in run.connection.execute(
            "SELECT position FROM groups WHERE requeued_from IS NULL ORDER BY id"
        )
    ]
    if positions != list(range(len(positions))):
        wrong = next(i for i, position in enumerate(positions) if position != i)
        yield f"prompts were not drawn in order: draw {wrong} has the position {positions[wrong]}"
    yield from run.examples(
        "groups have another prompt than the requeued group that they replace",
        "SELECT g.id FROM groups g LEFT JOIN groups o ON o.id = g.requeued_from "
        "WHERE g.requeued_from IS NOT NULL "
        "AND (o.id IS NULL OR o.position != g.position OR o.loss != 'requeued')",
    )
    yield from run.examples(
        "expired groups were requeued more than once",
        "SELECT requeued_from FROM groups WHERE requeued_from IS NOT NULL "
        "GROUP BY requeued_from HAVING count(*) > 1",
    )


def _states_are_possible(run: _Run) -> Iterator[str]:
    yield from run.examples(
        "groups are in a state that does not exist",
        "SELECT id FROM groups WHERE state NOT IN "
        "('admitted', 'ready', 'trained', 'filtered', 'expired', 'failed')",
    )
    yield from run.examples(
        "groups have a reason for their loss that does not fit their state",
        "SELECT id FROM groups WHERE (loss IS NOT NULL) != (state IN ('filtered', 'expired', 'failed')) "
        "OR (state = 'filtered' AND loss != 'filtered') OR (state = 'failed' AND loss != 'failed')",
    )
    yield from run.examples(
        "groups have a training step without being trained, or are trained without having one",
        "SELECT id FROM groups WHERE (step IS NOT NULL) != (state = 'trained')",
    )


def _trained_once(run: _Run) -> Iterator[str]:
    """A group is `trained` if and only if exactly one of its trainings is behind today's weights.

    The weights are those of the last published version: steps that only the next restart undoes still count.
    """
    alive = set(run.lineage.versions)
    trainings: dict[int, list[int]] = {}
    rows: Iterable[tuple[int, int]] = run.connection.execute("SELECT version, group_id FROM trainings")
    for version, id_ in rows:
        if version in alive:
            trainings.setdefault(id_, []).append(version)
    twice = [id_ for id_, versions in trainings.items() if len(versions) > 1]
    if twice:
        yield f"{len(twice)} groups were trained twice by the steps behind the weights: {_few(twice)}"
    states: list[tuple[int, int]] = run.connection.execute(
        "SELECT id, step FROM groups WHERE state = 'trained'"
    ).fetchall()
    trained = dict(states)
    missing = [id_ for id_, step in trained.items() if step not in trainings.get(id_, [])]
    if missing:
        yield f"{len(missing)} groups count as trained, but by no step behind the weights: {_few(missing)}"
    forgotten = [id_ for id_ in trainings if id_ not in trained]
    if forgotten:
        yield f"{len(forgotten)} groups are behind the weights, but not counted as trained: {_few(forgotten)}"


def _steps_follow_each_other(run: _Run) -> Iterator[str]:
    """Versions within an epoch are consecutive, and steps count on from the restored version."""
    epochs: list[tuple[int, int, int]] = run.connection.execute(
        "SELECT epoch, version, step FROM epochs ORDER BY epoch"
    ).fetchall()
    for epoch, first, first_step in epochs:
        rows: list[tuple[int, int, int]] = run.connection.execute(
            "SELECT version, step, published FROM steps WHERE epoch = ? ORDER BY version", (epoch,)
        ).fetchall()
        for number, (version, step, published) in enumerate(rows, start=1):
            if (version, step) != (first + number, first_step + number):
                yield (
                    f"start {epoch}: found version {version} (step {step}), expected version "
                    f"{first + number} (step {first_step + number})"
                )
                break
            if not published and number < len(rows):
                yield f"start {epoch}: version {version} was not published, but the next version was begun"
    for start, before in zip(run.starts[1:], run.starts, strict=False):
        last: int | None
        (last,) = run.connection.execute(
            "SELECT max(version) FROM steps WHERE epoch = ?", (before.epoch,)
        ).fetchone()
        expected = max(last or 0, before.version) + 1
        if start.version != expected:
            yield f"start {start.epoch}: it begins with version {start.version}, expected {expected}"
    batch_size = run.meta().get("batch_size")
    wrong = [version for version, count in run.lineage.trained.items() if batch_size not in (None, count)]
    if wrong:
        yield f"{len(wrong)} steps did not train {batch_size} groups: versions {_few(wrong)}"


def _bound_is_kept(run: _Run) -> Iterator[str]:
    yield from run.examples(
        "groups were trained beyond the bound that was in force",
        "SELECT t.group_id FROM trainings t LEFT JOIN steps s ON s.version = t.version "
        "LEFT JOIN epochs e ON e.epoch = s.epoch "
        "WHERE t.head_lag > coalesce(e.bound, -2) OR t.head_lag < -1",
    )


def _payloads_are_whole(run: _Run) -> Iterator[str]:
    """A ready group has all its trajectories, and everything that is stored can be read."""
    n = run.meta().get("n_samples_per_prompt", 0)
    yield from run.examples(
        f"ready groups do not have exactly {n} trajectories",
        "SELECT g.id FROM groups g WHERE g.state = 'ready' AND (SELECT count(*) FROM trajectories t "
        f"WHERE t.key >= g.id * {SAMPLES} AND t.key < (g.id + 1) * {SAMPLES}) != {int(n)}",
    )
    broken: list[str] = []
    for table, length_of in LENGTHS.items():
        rows: Iterable[tuple[int, int, bytes]] = run.connection.execute(
            f"SELECT key, tokens, payload FROM {table}"
        )
        for key, tokens, payload in rows:
            try:
                length = length_of(payload)
                if length != tokens:
                    broken.append(f"{key // SAMPLES}.{key % SAMPLES} ({length} tokens, not {tokens})")
            except CorruptRecord as error:
                broken.append(f"{key // SAMPLES}.{key % SAMPLES} ({error})")
    if broken:
        yield f"{len(broken)} stored trajectories or completions cannot be read: {_few(broken)}"


LENGTHS: dict[str, Callable[[bytes], int]] = {
    "trajectories": lambda payload: decode_trajectory(payload).response_length,
    "partials": lambda payload: len(decode_completion(payload).tokens),
}
"""Number of tokens that a payload must have, by table: those that carry loss, or all."""

CHECKS: tuple[Callable[[_Run], Iterator[str]], ...] = (
    _file_is_whole,
    _no_group_is_missing,
    _states_are_possible,
    _trained_once,
    _steps_follow_each_other,
    _bound_is_kept,
    _payloads_are_whole,
)


def _few(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:SHOWN])) + (", ..." if len(items) > SHOWN else "")
