"""Reads what exists of the groups that go on from the rows, and checks it against the segments."""

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from slipstream.rollout.control.ends import Loss
from slipstream.rollout.ledger.rows.holds import Eras, Holds
from slipstream.rollout.ledger.rows.samples import (
    JUDGED,
    SAMPLES,
    VOID,
    Fold,
    OpenSample,
    SampleRow,
    StoredRow,
    is_intact,
)
from slipstream.rollout.ledger.storage.database import few
from slipstream.rollout.ledger.storage.segments import Segments
from slipstream.rollout.tokens.record import REF, CorruptRecord, decode_header, decode_piece


@dataclass
class OpenGroup:
    """A group that has not ended."""

    id: int
    position: int
    """Position of its prompt in the endless order of the prompt set."""
    version: int
    """Policy version at its latest admission."""
    is_ready: bool
    requeues: int = 0
    """Number of times that its prompt was requeued."""
    samples: dict[int, OpenSample] = field(default_factory=dict[int, OpenSample])
    """Recorded parts of the group's samples, by number."""


@dataclass(frozen=True)
class RequeuedGroup:
    """An expired group whose prompt is to be admitted again: no group has replaced it yet."""

    id: int
    position: int
    """Position of its prompt in the endless order of the prompt set."""
    requeues: int
    """Number of times that its prompt was requeued, this time included."""


@dataclass
class Contents:
    """The contents of a ledger."""

    open: list[OpenGroup] = field(default_factory=list[OpenGroup])
    """All groups that have not ended, by id."""
    requeued: list[RequeuedGroup] = field(default_factory=list[RequeuedGroup])
    """By id."""
    trained: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    """Versions whose trajectories are kept for a restart, with the groups trained on each."""
    incomplete: list[OpenGroup] = field(default_factory=list[OpenGroup])
    """Groups that were ready until something of them was given up. They are among the open ones."""
    voids: list[SampleRow] = field(default_factory=list[SampleRow])
    """Rows to write, which make void what was given up."""
    given_up: dict[int, int] = field(default_factory=dict[int, int])
    """Number of sampled tokens given up because of damage, by group."""
    damage: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Groups of which something was given up, by what is damaged."""
    notes: list[str] = field(default_factory=list[str])
    """Messages about damage that costs no group anything."""
    holds: Holds = field(default_factory=Holds)
    eras: Eras = field(default_factory=lambda: Eras(()))


def read_contents(
    connection: sqlite3.Connection, path: Path, segments: Segments, n_samples: int, released: int
) -> Contents:
    """Read everything that the run may go on with. What is damaged is left out, and noted.

    Damaged rows that no open group needs are deleted, so that they are noted once. Every byte is checked that
    the run goes on with. ``released``: version up to which trained trajectories are needed no more.
    Raises LedgerError when a file cannot be read.
    """
    reader = _Reader(connection, path, segments, released)
    reader.read_groups()
    reader.read_segments()
    reader.read_rows()
    reader.check_payload()
    reader.check_ready_groups(n_samples)
    return reader.contents


class _Reader:
    def __init__(self, connection: sqlite3.Connection, path: Path, segments: Segments, released: int) -> None:
        self._released = released
        self._connection = connection
        self._path = path
        self._segments = segments
        self.contents = Contents()
        self._groups: dict[int, OpenGroup] = {}
        self._since: dict[int, int] = {}
        """First row that counts of each group of which something is needed."""
        self._hit: set[int] = set()
        """Groups of which something was given up."""

    def read_groups(self) -> None:
        requeues = self._read_requeues()
        rows: Iterable[tuple[int, int, int, str, int]] = self._connection.execute(
            "SELECT id, position, version, state, since FROM groups "
            "WHERE state IN ('admitted', 'ready') ORDER BY id"
        )
        for id_, position, version, state, since in rows:
            self._groups[id_] = OpenGroup(id_, position, version, state == "ready", requeues.get(id_, 0))
            self._since[id_] = since
        self.contents.open = list(self._groups.values())
        trained: Iterable[tuple[int, int, int]] = self._connection.execute(
            "SELECT step, id, since FROM groups WHERE state = 'trained' AND step > ? ORDER BY step, id",
            (self._released,),
        )
        for step, group in groupby(trained, key=lambda row: row[0]):
            ids: list[int] = []
            for _, id_, since in group:
                self._since[id_] = since
                ids.append(id_)
            self.contents.trained.append((step, ids))
        for id_ in self._since:
            self.contents.holds.begin(id_)

    def _read_requeues(self) -> dict[int, int]:
        """Find the groups that no group has replaced. Return how often the prompt of each group was requeued,
        of those groups whose prompt was.
        """
        replaced: dict[int, int] = dict(
            self._connection.execute("SELECT id, requeued_from FROM groups WHERE requeued_from IS NOT NULL")
        )
        requeues: dict[int, int] = {}
        for id_, before in sorted(replaced.items()):
            requeues[id_] = requeues.get(before, 0) + 1
        requeued: list[tuple[int, int]] = self._connection.execute(
            "SELECT id, position FROM groups WHERE loss = ? ORDER BY id", (Loss.REQUEUED,)
        ).fetchall()
        waiting = {id_ for id_, _ in requeued}.difference(replaced.values())
        self.contents.requeued = [
            RequeuedGroup(id_, position, requeues.get(id_, 0) + 1)
            for id_, position in requeued
            if id_ in waiting
        ]
        return requeues

    def read_segments(self) -> None:
        rows: list[tuple[int, int | None]] = self._connection.execute(
            "SELECT segment, first_row FROM segments"
        ).fetchall()
        for segment, _ in rows:
            self.contents.holds.know(segment)
        self.contents.eras = Eras((segment, row) for segment, row in rows if row is not None)

    def read_rows(self) -> None:
        """Make samples of the rows."""
        fold = Fold()
        unneeded: list[int] = []
        """Damaged rows of groups that need them no more."""
        rows: Iterable[StoredRow] = self._connection.execute("SELECT * FROM samples ORDER BY id")
        for row in rows:
            id_, group, refs = row[0], row[1] // SAMPLES, row[4]
            is_needed = id_ >= self._since.get(group, id_ + 1)
            if is_needed:
                self._hold(group, id_, refs)
            if is_needed and group in self._groups:
                fold.add(row)
            elif not is_intact(row):
                unneeded.append(id_)
        for key, sample in fold.samples.items():
            self._groups[key // SAMPLES].samples[key % SAMPLES] = sample
        for key, problem in fold.wrong.items():
            self.contents.voids.append((key, VOID, 0, None, b""))
            self._give_up(key, f"{self._path}: table samples: {problem}")
        if unneeded:
            self._connection.executemany("DELETE FROM samples WHERE id = ?", [(id_,) for id_ in unneeded])
            self.contents.notes.append(
                f"{self._path}: table samples: damaged rows of groups that seem to need them no more: "
                f"{few(unneeded)}"
            )

    def _hold(self, group: int, id_: int, refs: bytes | None) -> None:
        holds = self.contents.holds
        if (era := self.contents.eras.of(id_)) is not None:
            holds.need(group, era)
        if refs and not len(refs) % REF.size:
            for segment, _, _, _ in REF.iter_unpack(refs):
                if segment in holds.ever:
                    holds.need(group, segment)

    def check_payload(self) -> None:
        """Give up what cannot be read of the samples."""
        for group in self._groups.values():
            for number, sample in list(group.samples.items()):
                self._check_sample(group.id * SAMPLES + number, sample)
                if sample.is_empty:
                    del group.samples[number]

    def _check_sample(self, key: int, sample: OpenSample) -> None:
        if sample.header is not None:
            problem = self._problem_of(sample.refs) or _undecodable(sample.header, decode_header)
            keep = 0
        else:
            problem, keep = None, len(sample.pieces)
            for number, (ref, header) in enumerate(sample.pieces):
                if problem := self._problem_of(ref) or _undecodable(header, decode_piece):
                    keep = number
                    break
        if problem:
            tokens = sampled_tokens(sample)
            sample.cut(keep)
            self.contents.voids.append((key, VOID, keep, None, b""))
            self._give_up(key, problem, tokens - sampled_tokens(sample))

    def _problem_of(self, refs: bytes) -> str | None:
        for segment, offset, size, crc in REF.iter_unpack(refs):
            if not self._segments.has(segment, offset, size, crc):
                path = self._segments.path(segment)
                return f"{path}: {self._segments.problem(segment, offset, size)}"
        return None

    def _give_up(self, key: int, problem: str, tokens: int = 0) -> None:
        id_ = key // SAMPLES
        self._hit.add(id_)
        self.contents.damage[problem].add(id_)
        self.contents.given_up[id_] = self.contents.given_up.get(id_, 0) + tokens

    def check_ready_groups(self, n_samples: int) -> None:
        """Open groups again that were ready and are not complete any more."""
        for group in self.contents.open:
            judged = sum(sample.state == JUDGED for sample in group.samples.values())
            if not group.is_ready or judged == n_samples:
                continue
            group.is_ready = False
            self.contents.incomplete.append(group)
            if group.id not in self._hit:
                problem = f"{self._path}: ready groups do not have all of their {n_samples} trajectories"
                self.contents.damage[problem].add(group.id)


def sampled_tokens(sample: OpenSample) -> int:
    """Return the number of sampled tokens that the headers of a sample name."""
    try:
        if sample.header is not None:
            return decode_header(sample.header).sampled_length
        return sum(tokens for _, header in sample.pieces for _, tokens in decode_piece(header).spans)
    except CorruptRecord:
        return 0


def _undecodable(header: bytes, decode: Callable[[bytes], object]) -> str | None:
    try:
        decode(header)
    except CorruptRecord as error:
        return f"a header in the table samples cannot be read: {error}"
    return None
