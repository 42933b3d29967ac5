"""Recounts a run from its ledger: nothing lost, nothing trained twice, nothing beyond the bound.

Every check is a query, or a walk over rows, that does not use what the run itself has counted.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.rollout.control.versions import Restart, survives
from slipstream.rollout.ledger.database import explained, open_for_reading
from slipstream.rollout.ledger.records import CorruptRecord, decode_completion, decode_trajectory
from slipstream.rollout.ledger.recovery import restarts
from slipstream.rollout.ledger.writer import SAMPLES

SHOWN = 5
"""Examples per discrepancy."""


@dataclass(frozen=True)
class Line:
    """The training steps whose weights today's weights descend from, and what they were trained on."""

    versions: list[int]
    trained: dict[int, int]
    """Groups by the version that came of them."""

    def trained_by(self, version: int) -> int:
        """Groups behind the weights of ``version``."""
        return sum(n for at, n in self.trained.items() if at <= version)


@dataclass
class Audit:
    """What an audit found."""

    groups: dict[str, int] = field(default_factory=dict)
    """Prompt instances by state."""
    losses: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    steps: int = 0
    """On the surviving line."""
    steps_lost: int = 0
    """Published, and undone by a restart."""
    tokens: dict[str, int] = field(default_factory=dict)
    """trained, masked; discarded: given up by restarts."""
    max_head_lag: int | None = None
    checkpoints: dict[str, str] = field(default_factory=dict)
    """By name: sound, or what is wrong. One that is damaged is no fault of the account beside a sound one."""
    discrepancies: list[str] = field(default_factory=list)


def audit_ledger(path: Path) -> tuple[Audit, Line, list[Restart]]:
    """Check the ledger at ``path``. Raises LedgerError when it cannot be read at all."""
    connection = open_for_reading(path)
    try:
        connection.execute("BEGIN")
        starts = restarts(connection)
        audit = Audit(starts=len(starts))
        line = _line(connection, starts)
        _measure(connection, audit, line)
        for check in CHECKS:
            audit.discrepancies += check(connection, starts, line)
        return audit, line, starts
    except sqlite3.Error as error:
        raise explained(path, error) from error
    finally:
        connection.close()


def _line(connection: sqlite3.Connection, starts: list[Restart]) -> Line:
    published = connection.execute("SELECT version, epoch FROM steps WHERE published = 1 ORDER BY version")
    versions = [version for version, epoch in published if survives(version, epoch, starts)]
    counts = dict(connection.execute("SELECT version, count(*) FROM trainings GROUP BY version"))
    return Line(versions, {version: counts.get(version, 0) for version in versions})


def _measure(connection: sqlite3.Connection, audit: Audit, line: Line) -> None:
    def one(query: str) -> int:
        return connection.execute(query).fetchone()[0] or 0

    audit.groups = dict(
        connection.execute("SELECT state, count(*) FROM groups GROUP BY state ORDER BY state")
    )
    audit.losses = dict(
        connection.execute("SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss")
    )
    audit.steps = len(line.versions)
    audit.steps_lost = one("SELECT count(*) FROM steps WHERE published = 1") - audit.steps
    audit.tokens = {
        "trained": one("SELECT sum(tokens) FROM trainings"),
        "masked": one("SELECT sum(masked) FROM trainings"),
        "discarded": one("SELECT sum(tokens) FROM discards"),
    }
    lag = connection.execute("SELECT max(head_lag) FROM trainings").fetchone()[0]
    audit.max_head_lag = None if lag is None or lag < 0 else lag


# ---- checks: each yields sentences that say what is wrong


def _file_is_whole(connection: sqlite3.Connection, starts: list[Restart], line: Line) -> Iterator[str]:
    rows = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
    if rows != ["ok"]:
        yield f"the file is damaged: {'; '.join(rows)}"


def _no_instance_is_missing(
    connection: sqlite3.Connection, starts: list[Restart], line: Line
) -> Iterator[str]:
    """Ids have no gap; each position of the prompt set was drawn once, in order, but for requeued ones."""
    count, last = connection.execute("SELECT count(*), max(id) FROM groups").fetchone()
    if count and last != count - 1:
        yield f"{count} groups, but the last one has the number {last}: {last + 1 - count} are missing"
    rows = connection.execute("SELECT position FROM groups WHERE requeued_from IS NULL ORDER BY id")
    positions = [row[0] for row in rows]
    if positions != list(range(len(positions))):
        wrong = next(i for i, position in enumerate(positions) if position != i)
        yield f"prompts were not drawn one after the other: number {wrong} has position {positions[wrong]}"
    yield from _examples(
        connection,
        "requeued groups have a prompt other than that of the group that they replace",
        "SELECT g.id FROM groups g LEFT JOIN groups o ON o.id = g.requeued_from "
        "WHERE g.requeued_from IS NOT NULL "
        "AND (o.id IS NULL OR o.position != g.position OR o.loss != 'requeued')",
    )
    yield from _examples(
        connection,
        "expired groups were requeued more than once",
        "SELECT requeued_from FROM groups WHERE requeued_from IS NOT NULL "
        "GROUP BY requeued_from HAVING count(*) > 1",
    )


def _states_are_possible(connection: sqlite3.Connection, starts: list[Restart], line: Line) -> Iterator[str]:
    yield from _examples(
        connection,
        "groups are in a state that there is not",
        "SELECT id FROM groups WHERE state NOT IN "
        "('admitted', 'ready', 'trained', 'filtered', 'expired', 'failed')",
    )
    yield from _examples(
        connection,
        "groups have a reason to be lost that does not fit their state",
        "SELECT id FROM groups WHERE (loss IS NOT NULL) != (state IN ('filtered', 'expired', 'failed')) "
        "OR (state = 'filtered' AND loss != 'filtered') OR (state = 'failed' AND loss != 'failed')",
    )
    yield from _examples(
        connection,
        "groups have a training step without being trained, or the other way round",
        "SELECT id FROM groups WHERE (step IS NOT NULL) != (state = 'trained')",
    )


def _trained_once(connection: sqlite3.Connection, starts: list[Restart], line: Line) -> Iterator[str]:
    """A group is `trained` if and only if exactly one training of it is behind today's weights.

    The line ends at the last published version: what the next restart will undo still counts.
    """
    alive = set(line.versions)
    trainings: dict[int, list[int]] = {}
    for version, id_ in connection.execute("SELECT version, group_id FROM trainings"):
        if version in alive:
            trainings.setdefault(id_, []).append(version)
    twice = [id_ for id_, versions in trainings.items() if len(versions) > 1]
    if twice:
        yield f"{len(twice)} groups were trained twice on the surviving line: {_few(twice)}"
    trained = dict(connection.execute("SELECT id, step FROM groups WHERE state = 'trained'"))
    missing = [id_ for id_, step in trained.items() if step not in trainings.get(id_, [])]
    if missing:
        yield f"{len(missing)} groups count as trained, but by no surviving step: {_few(missing)}"
    forgotten = [id_ for id_ in trainings if id_ not in trained]
    if forgotten:
        yield f"{len(forgotten)} groups are behind the weights, but not counted as trained: {_few(forgotten)}"


def _steps_follow_each_other(
    connection: sqlite3.Connection, starts: list[Restart], line: Line
) -> Iterator[str]:
    """Versions within an epoch are consecutive, the step count goes on from the restored version's."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    for epoch, first, step in connection.execute("SELECT epoch, version, step FROM epochs ORDER BY epoch"):
        rows = connection.execute(
            "SELECT version, step, published FROM steps WHERE epoch = ? ORDER BY version", (epoch,)
        ).fetchall()
        for number, (version, at, published) in enumerate(rows, start=1):
            if (version, at) != (first + number, step + number):
                yield (
                    f"start {epoch}: version {version} (step {at}) where version {first + number} "
                    f"(step {step + number}) was expected"
                )
                break
            if not published and number < len(rows):
                yield f"start {epoch}: version {version} was not published, but the next one was begun"
    for start, before in zip(starts[1:], starts, strict=False):
        (last,) = connection.execute(
            "SELECT max(version) FROM steps WHERE epoch = ?", (before.epoch,)
        ).fetchone()
        if start.version != max(last or 0, before.version) + 1:
            yield f"start {start.epoch} begins with version {start.version}, not with the next free number"
    wrong = [version for version, n in line.trained.items() if n != meta.get("batch_size", n)]
    if wrong:
        yield f"{len(wrong)} steps have not trained {meta['batch_size']} groups: versions {_few(wrong)}"


def _bound_is_kept(connection: sqlite3.Connection, starts: list[Restart], line: Line) -> Iterator[str]:
    yield from _examples(
        connection,
        "groups were trained beyond the bound of their time",
        "SELECT t.group_id FROM trainings t LEFT JOIN steps s ON s.version = t.version "
        "LEFT JOIN epochs e ON e.epoch = s.epoch "
        "WHERE t.head_lag > coalesce(e.bound, -2) OR t.head_lag < -1",
    )


def _payloads_are_whole(connection: sqlite3.Connection, starts: list[Restart], line: Line) -> Iterator[str]:
    """A ready group has all its trajectories, and whatever is stored can be read."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    n = meta.get("n_samples_per_prompt", 0)
    yield from _examples(
        connection,
        f"ready groups have not exactly their {n} trajectories",
        "SELECT g.id FROM groups g WHERE g.state = 'ready' AND (SELECT count(*) FROM trajectories t "
        f"WHERE t.key >= g.id * {SAMPLES} AND t.key < (g.id + 1) * {SAMPLES}) != {int(n)}",
    )
    broken = []
    for table, decode in (("trajectories", decode_trajectory), ("partials", decode_completion)):
        for key, tokens, payload in connection.execute(f"SELECT key, tokens, payload FROM {table}"):
            try:
                record = decode(payload)
                found = record.response_length if table == "trajectories" else len(record.tokens)
                if found != tokens:
                    broken.append(f"{key // SAMPLES}.{key % SAMPLES} ({found} tokens, not {tokens})")
            except CorruptRecord as error:
                broken.append(f"{key // SAMPLES}.{key % SAMPLES} ({error})")
    if broken:
        yield f"{len(broken)} stored answers cannot be read: {_few(broken)}"


CHECKS = (
    _file_is_whole,
    _no_instance_is_missing,
    _states_are_possible,
    _trained_once,
    _steps_follow_each_other,
    _bound_is_kept,
    _payloads_are_whole,
)


def _examples(connection: sqlite3.Connection, what: str, query: str) -> Iterator[str]:
    ids = [row[0] for row in connection.execute(query)]
    if ids:
        yield f"{len(ids)} {what}: {_few(ids)}"


def _few(items: list) -> str:
    return ", ".join(map(str, items[:SHOWN])) + (", ..." if len(items) > SHOWN else "")
