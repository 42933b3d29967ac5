"""Brings the ledger back at every start of a trainer: a new start of the run, or one in a running process.

    begin_epoch ──► undo_trainings ──► read ──► recovered

The run goes on from a version that was published before. Trainings of versions that are not on its line are
undone: their groups are ready again, with the completions that they had. A process that resumes a run does
this when it opens the ledger (``recovery``), a process whose trainer has died in its writer thread
(``store``).
"""

import json
import os
import socket
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from slipstream.rollout.control.ends import GroupCounts, Loss
from slipstream.rollout.ledger.reading.contents import Contents, OpenGroup, RequeuedGroup, read_contents
from slipstream.rollout.ledger.reading.history import History
from slipstream.rollout.ledger.reading.turn_contents import read_turns, trained_turns, undo_turn_trainings
from slipstream.rollout.ledger.rows.samples import SAMPLES, stored
from slipstream.rollout.ledger.rows.stored_turns import RecoveredTurns
from slipstream.rollout.ledger.storage.database import RESTORE, LedgerError, few
from slipstream.rollout.ledger.storage.segments import Segments
from slipstream.rollout.ledger.storage.stamp import Stamp


@dataclass
class Recovered:
    """The state from which a run goes on."""

    epoch: int
    restored: int
    """Version that the run goes on from."""
    step: int
    """Number of training steps that led to the restored version."""
    versions: list[tuple[int, int]]
    """(version, parent) of every version that was ever begun, in ascending order."""
    copies: set[int]
    """The versions whose weights are those of their parents."""
    position: int
    """Number of prompts drawn from the prompt set."""
    counts: GroupCounts
    losses: Counter[Loss]
    open: list[OpenGroup]
    """All groups that have not ended, by id."""
    requeued: list[RequeuedGroup]
    """All expired groups whose prompts are to be admitted again, by id."""
    failures: list[tuple[int, ...]]
    """Each training step in which the trainer died or raised, unless a quarantined group was in it: its
    groups without those that were trained since. In order."""
    notes: list[str]
    """Messages about damage, for the user."""
    live: RecoveredTurns = field(default_factory=RecoveredTurns)


class Restart:
    """One start. The methods are called in their order, within one transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        segments: Segments,
        history: History,
        stamp: Stamp,
        n_samples: int,
    ) -> None:
        """``stamp``: the stamp to go on with. ``n_samples``: trajectories of a group."""
        self.connection = connection
        self.path = path
        self.segments = segments
        self.history = history
        self.epoch = history.epochs
        self.stamp: Stamp = stamp
        self.notes: list[str] = []
        self.restored = 0
        self._n_samples = n_samples
        self._line: list[int] = []
        self._step = 0

    def begin_epoch(self, restored: int, bound: int) -> None:
        """Begin an epoch that goes on from ``restored``."""
        self._line = self.history.line_of(restored)
        self._step = len(set(self._line) - self.history.copies)
        self.restored = restored
        self.connection.execute(
            "INSERT INTO epochs VALUES (?, ?, ?, ?, ?, ?)",
            (
                self.epoch,
                restored,
                self._step,
                bound,
                datetime.now(UTC).isoformat(timespec="seconds"),
                f"{socket.gethostname()}:{os.getpid()}",
            ),
        )

    def undo_trainings(self) -> None:
        """Make groups ready again that were trained off the line. Those that were released start again."""
        line = json.dumps(self._line)
        undone = "state = 'trained' AND step NOT IN (SELECT value FROM json_each(:line))"
        released = f"{undone} AND step <= :released"
        values = {
            "line": line,
            "epoch": self.epoch,
            "rows": self.stamp.rows,
            "released": self.stamp.released,
        }
        self.connection.execute(
            f"INSERT INTO discards SELECT id, :epoch, tokens FROM groups WHERE {released}", values
        )
        self.connection.execute(
            "UPDATE groups SET state = 'admitted', step = NULL, tokens = NULL, since = :rows "
            f"WHERE {released}",
            values,
        )
        self.connection.execute(f"UPDATE groups SET state = 'ready', step = NULL WHERE {undone}", values)
        undo_turn_trainings(self.connection, self._line, self.stamp.released)

    def read(self) -> Contents:
        """Read what exists of the groups that go on. Give up what is damaged."""
        contents = read_contents(
            self.connection, self.path, self.segments, self._n_samples, self.stamp.released
        )
        self.notes += contents.notes
        for problem, ids in contents.damage.items():
            self.notes.append(
                f"{problem}: what is lost of {len(ids)} groups is generated again: {few(sorted(ids))}"
            )
        first = self.stamp.rows
        rows = [stored(id_, row) for id_, row in enumerate(contents.voids, first)]
        self.connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.stamp = replace(self.stamp, rows=first + len(rows))
        newest = contents.eras.newest
        for key, *_ in contents.voids:
            if newest is not None:
                contents.holds.need(key // SAMPLES, newest)
        self.connection.executemany(
            "INSERT INTO discards VALUES (?, ?, ?)",
            [(id_, self.epoch, tokens) for id_, tokens in contents.given_up.items()],
        )
        incomplete = [(group.id,) for group in contents.incomplete]
        self.connection.executemany(
            "UPDATE groups SET state = 'admitted', tokens = NULL WHERE id = ?", incomplete
        )
        return contents

    def read_turns(self, contents: Contents) -> RecoveredTurns:
        """Read what exists of live users. What is damaged ends as failed."""
        trained = dict(contents.trained)
        for step, turns in trained_turns(self.connection, self.stamp.released):
            trained[step] = [*trained.get(step, []), *turns]
        contents.trained = sorted(trained.items())
        return read_turns(self.connection, self.path, self.segments, contents.holds, self.notes)

    def recovered(self, contents: Contents, live: RecoveredTurns) -> Recovered:
        """Return the state from which the run goes on."""
        states = dict(self._counts("SELECT state, count(*) FROM groups GROUP BY state"))
        losses = self._counts("SELECT loss, count(*) FROM groups WHERE loss IS NOT NULL GROUP BY loss")
        position: int
        (position,) = self.connection.execute("SELECT coalesce(max(position) + 1, 0) FROM groups").fetchone()
        ends = (states.get(end, 0) for end in ("trained", "filtered", "expired", "failed"))
        try:
            counted = Counter({Loss(loss): number for loss, number in losses})
        except ValueError as error:
            raise LedgerError(f"{self.path}: {error}: the file is damaged: {RESTORE}") from error
        return Recovered(
            epoch=self.epoch,
            restored=self.restored,
            step=self._step,
            versions=sorted(self.history.parents.items()),
            copies=self.history.copies,
            position=position,
            counts=GroupCounts(sum(states.values()), *ends),
            losses=counted,
            open=contents.open,
            requeued=contents.requeued,
            failures=self._unexplained_failures(),
            notes=self.notes,
            live=live,
        )

    def _unexplained_failures(self) -> list[tuple[int, ...]]:
        failures: list[tuple[int, ...]] = []
        for step in self.history.failed_steps:
            rows: list[tuple[int, str, str | None]] = self.connection.execute(
                "WITH batch AS (SELECT value FROM json_each(:ids)) "
                "SELECT id, state, loss FROM groups WHERE id IN batch UNION ALL "
                "SELECT id, state, loss FROM turns WHERE id IN batch",
                {"ids": json.dumps(step.groups)},
            ).fetchall()
            left = tuple(id_ for id_, state, _ in rows if state != "trained")
            if left and not any(loss == Loss.QUARANTINED for _, _, loss in rows):
                failures.append(left)
        return failures

    def known_segments(self) -> set[int]:
        rows: Iterable[tuple[int]] = self.connection.execute("SELECT segment FROM segments")
        return {segment for (segment,) in rows}

    def _counts(self, query: str) -> list[tuple[str, int]]:
        return self.connection.execute(query).fetchall()
