"""Copies what is still needed out of segments of which little is needed."""

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from slipstream.rollout.ledger.rows.samples import SAMPLES, Fold, SampleRow, StoredRow
from slipstream.rollout.ledger.storage.database import LedgerError, few
from slipstream.rollout.ledger.storage.segments import Part, Segments
from slipstream.rollout.tokens.record import REF

Place = tuple[int, int]
"""Segment and offset of a chunk."""


class Moved:
    """The present places of chunks that were moved, by every place that they had before."""

    def __init__(self) -> None:
        self._places: dict[Place, Place] = {}
        self._of_group: dict[int, list[Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, places: dict[int, dict[Place, Place]]) -> None:
        """Note new places of chunks, by group and present place."""
        for group, moved in places.items():
            before = self._of_group.setdefault(group, [])
            for place in before:
                self._places[place] = moved.get(self._places[place], self._places[place])
            self._places.update(moved)
            before += moved

    def place(self, segment: int, offset: int) -> Place:
        """Return where a chunk is now."""
        return self._places.get((segment, offset), (segment, offset))

    def present(self, refs: bytes) -> bytes:
        """Return references with the present places of their chunks."""
        return b"".join(
            [
                REF.pack(*self.place(segment, offset), *rest)
                for segment, offset, *rest in REF.iter_unpack(refs)
            ]
        )

    def forget(self, group: int) -> None:
        """Forget the places of a group that needs nothing any more."""
        for place in self._of_group.pop(group, ()):
            del self._places[place]


@dataclass
class Gathered:
    """The needed rows of some groups, with the places of chunks that were copied."""

    rows: list[SampleRow] = field(default_factory=list[SampleRow])
    """Rows that make the samples anew."""
    places: dict[int, dict[Place, Place]] = field(default_factory=dict[int, dict[Place, Place]])
    """Old and new places of the chunks that were moved, by group."""


def gather(
    connection: sqlite3.Connection,
    groups: Collection[int],
    segments: Segments,
    leaving: Collection[int],
    part: Part,
) -> Gathered:
    """Copy the chunks of ``groups`` in the ``leaving`` segments into ``part``, which is not written yet.

    A damaged chunk is copied as it is: its next reader finds the damage. Raises LedgerError when a row is
    damaged.
    """
    fold = Fold()
    for row in rows_of(connection, groups):
        fold.add(row)
    if fold.wrong:
        raise LedgerError(
            f"table samples: {few(list(fold.wrong.values()))}: go on with `slipstream train RECIPE "
            "--resume`, which generates again what is damaged"
        )
    gathered = Gathered()
    for key, sample in fold.samples.items():
        places = gathered.places.setdefault(key // SAMPLES, {})
        for state_row in sample.rows(key):
            _, state, base, refs, header = state_row
            if refs:
                refs = b"".join(copied(refs, segments, leaving, part, places))
            gathered.rows.append((key, state, base, refs, header))
    return gathered


def copied(
    refs: bytes, segments: Segments, leaving: Collection[int], part: Part, places: dict[Place, Place]
) -> Iterator[bytes]:
    """Yield each reference, with the new place of what is copied from ``leaving`` segments into ``part``."""
    for segment, offset, size, crc in REF.iter_unpack(refs):
        place = (segment, offset)
        if segment in leaving:
            if place not in places:
                places[place] = (part.segment, part.add(segments.raw(segment, offset, size)))
            place = places[place]
        yield REF.pack(*place, size, crc)


def rows_of(connection: sqlite3.Connection, groups: Iterable[int]) -> Iterator[StoredRow]:
    """Yield the rows of the samples of ``groups`` that are not void, in order."""
    # CROSS: SQLite takes the tables in this order, and reads the rows once.
    yield from connection.execute(
        f"SELECT s.* FROM samples s CROSS JOIN groups g ON g.id = s.key / {SAMPLES} AND s.id >= g.since "
        "WHERE g.id IN (SELECT value FROM json_each(?)) ORDER BY s.id",
        (json.dumps(list(groups)),),
    )
