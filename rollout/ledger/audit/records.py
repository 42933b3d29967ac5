"""The rows of a ledger as an audit reads them: everything but groups and samples at once."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slipstream.rollout.ledger.lineage import deepest_line, distance
from slipstream.rollout.ledger.reading.history import newest_version
from slipstream.rollout.ledger.storage.database import LEDGER, few
from slipstream.rollout.ledger.storage.stamp import Stamp, stored_stamp


class Epoch(NamedTuple):
    """One start of the run."""

    number: int
    restored: int
    step: int
    bound: int


class Version(NamedTuple):
    """One version that was begun."""

    number: int
    parent: int
    epoch: int
    is_copy: bool
    """Its weights are those of its parent."""
    is_published: bool


class Records:
    """The open database of an audit, and what all checks look at."""

    def __init__(self, connection: sqlite3.Connection, folder: Path) -> None:
        self.connection = connection
        self.folder = folder
        self.path = folder / LEDGER
        self.epochs = [
            Epoch(*row)
            for row in connection.execute("SELECT epoch, restored, step, bound FROM epochs ORDER BY epoch")
        ]
        self.versions = [
            Version(number, parent, epoch, bool(is_copy), bool(is_published))
            for number, parent, epoch, is_copy, is_published in connection.execute(
                "SELECT version, parent, epoch, copy, published FROM versions ORDER BY version"
            )
        ]
        self.parents = {version.number: version.parent for version in self.versions}
        self.copies = {version.number for version in self.versions if version.is_copy}
        self.published = {version.number for version in self.versions if version.is_published}
        self.line = deepest_line(self.parents, newest_version(connection))
        """Versions that today's weights descend from, with their own."""
        self.stamp = stored_stamp(connection) or Stamp(b"")
        self.trained = self.numbers("SELECT version, count(*) FROM trainings GROUP BY version")
        """Number of groups and turns trained, by version."""
        self.trained_groups = self.numbers(
            "SELECT version, count(*) FROM trainings WHERE group_id >= 0 GROUP BY version"
        )

    def distance(self, one_end: int, other_end: int) -> int:
        """Return the number of updates on the path between two versions. Raises BrokenTree."""
        return distance(self.parents, self.copies, one_end, other_end)

    def updates(self, version: int) -> int:
        """Return the number of updates that led to a version, as far as its line is known."""
        return len(set(deepest_line(self.parents, version)) - self.copies)

    def meta(self, key: str) -> int | None:
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def number(self, query: str) -> int:
        """Return the only value of a query; NULL counts as 0."""
        return self.connection.execute(query).fetchone()[0] or 0

    def counts(self, query: str) -> dict[str, int]:
        return dict(self.connection.execute(query).fetchall())

    def numbers(self, query: str) -> dict[int, int]:
        return dict(self.connection.execute(query).fetchall())

    def examples(self, finding: str, query: str) -> Iterator[str]:
        """Yield a discrepancy if ``query`` has any rows, which are the ids of groups or turns."""
        ids = [row[0] for row in self.connection.execute(query)]
        if ids:
            yield f"{len(ids)} {finding}: {few(ids)}"
