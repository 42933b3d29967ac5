"""The generated samples as a log of rows: each row goes on with a sample, replaces it, or makes it void.

A row is never changed. Rows of a sample that is over stay until the segment of their time is dropped, so that
neither writing nor forgetting touches any page of the database but the newest. The state of a sample is what
``fold`` makes of its rows in the order of arrival.

    GROWING   piece number ``base``; pieces from this number on are void
    ANSWERED  the whole trajectory, not judged yet
    JUDGED    the whole trajectory with its reward. Without refs: the chunks of before
    VOID      pieces from number ``base`` on, and the whole trajectory, are forgotten
"""

import zlib
from dataclasses import dataclass, field

from slipstream.rollout.ledger.storage.database import BrokenSeal, unsealed
from slipstream.rollout.tokens.record import REF
from slipstream.rollout.tokens.trajectory import TrajectoryHeader

SAMPLES = 1 << 16
"""Largest number of samples of a group. Keys of samples are group id * SAMPLES + sample."""

GROWING, ANSWERED, JUDGED, VOID = range(4)
WHOLE = -1
"""``base`` of a row that is no piece."""

SampleRow = tuple[int, int, int, bytes | None, bytes]
"""key, state, base, refs, header"""
StoredRow = tuple[int, int, int, int, bytes | None, bytes]
"""id, key, state, base, refs, sealed header"""


def _start(id_: int, key: int, state: int, base: int, refs: bytes | None) -> int:
    """Return the start of a row's seal, which stands for its other columns."""
    kind = state * 2 + (refs is None)
    start = (id_ * 2_246_822_519 + key * 2_654_435_761 + kind * 40_503 + base) & 0xFFFF_FFFF
    return zlib.crc32(refs, start) if refs else start


def stored(id_: int, row: SampleRow) -> StoredRow:
    """Return the row as it is stored: with its id, and with its header sealed."""
    key, state, base, refs, header = row
    crc = zlib.crc32(header, _start(id_, key, state, base, refs))
    return id_, key, state, base, refs, header + crc.to_bytes(4, "little")


@dataclass(slots=True)
class OpenSample:
    """The recorded part of one sample of an open group, as the ledger and the driver hold it."""

    state: int = GROWING
    """GROWING, ANSWERED or JUDGED."""
    refs: bytes = b""
    """``record.REF`` of each chunk of a whole trajectory, one after the other; empty while it grows."""
    header: bytes | None = None
    """Encoded ``TrajectoryHeader`` of a whole trajectory."""
    pieces: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    """Packed ``record.REF`` and encoded ``PieceHeader`` of each piece, while it grows."""
    judged: TrajectoryHeader | None = field(default=None, compare=False)
    """The decoded header of a judged one, where the driver holds it."""

    @property
    def is_whole(self) -> bool:
        """True if the whole trajectory is there, judged or not."""
        return self.header is not None

    @property
    def is_empty(self) -> bool:
        return self.header is None and not self.pieces

    @property
    def all_refs(self) -> bytes:
        """References to everything that exists."""
        return self.refs if self.header is not None else b"".join([ref for ref, _ in self.pieces])

    def cut(self, pieces: int) -> None:
        """Forget the whole trajectory, and all but the first ``pieces`` pieces."""
        self.state, self.refs, self.header, self.judged = GROWING, b"", None, None
        del self.pieces[pieces:]

    def add(self, state: int, base: int, refs: bytes | None, header: bytes) -> str | None:
        """Take in the next row. Return what is wrong with it, if anything: then it is left out."""
        if state == VOID:
            self.cut(base)
        elif state == GROWING:
            if not 0 <= base <= len(self.pieces):
                return f"piece {base} follows on {len(self.pieces)} pieces"
            self.cut(base)
            self.pieces.append((refs or b"", header))
        elif state in (ANSWERED, JUDGED):
            if refs is None and self.is_empty:
                return "the reward of a trajectory that is not there"
            self.refs = self.all_refs if refs is None else refs
            self.state, self.header, self.pieces = state, header, []
        else:
            return f"a row has the state {state}"
        return None

    def rows(self, key: int) -> list[SampleRow]:
        """Return rows that make this state from any other one."""
        if self.header is not None:
            return [(key, self.state, WHOLE, self.refs, self.header)]
        pieces: list[SampleRow] = [
            (key, GROWING, number, ref, header) for number, (ref, header) in enumerate(self.pieces)
        ]
        return pieces or [(key, VOID, 0, None, b"")]


def is_intact(row: StoredRow) -> bool:
    """True if a row is as it was written."""
    id_, key, state, base, refs, blob = row
    try:
        unsealed(blob, _start(id_, key, state, base, refs))
    except (BrokenSeal, TypeError, OverflowError):
        return False
    return True


class Fold:
    """Samples, made of their rows in the order of arrival."""

    def __init__(self) -> None:
        self.samples: dict[int, OpenSample] = {}
        """By key."""
        self.wrong: dict[int, str] = {}
        """Errors in the rows of a sample, by key. Nothing is left of the sample then.

        A sample that was made anew later is not wrong: its earlier rows may be gone in part, with their
        segments.
        """

    def add(self, row: StoredRow) -> None:
        """Take in the next row."""
        _, key, state, base, refs, _ = row
        sample = self.samples.get(key)
        if sample is None:
            sample = self.samples[key] = OpenSample()
        if problem := _fold(sample, row):
            self.wrong[key] = problem
        elif self.wrong and (base == 0 or (refs is not None and state in (ANSWERED, JUDGED))):
            self.wrong.pop(key, None)


def _fold(sample: OpenSample, row: StoredRow) -> str | None:
    """Take in the next row of a sample. Return what is wrong with the row, if anything.

    A damaged row is left out, and all that was there before it is forgotten: it may have been void.
    """
    id_, key, state, base, refs, blob = row
    problem: str | None = None
    try:
        header = unsealed(blob, _start(id_, key, state, base, refs))
        if refs is not None and len(refs) % REF.size:
            problem = f"{len(refs)} bytes of references are not a multiple of {REF.size}"
        else:
            problem = sample.add(state, base, refs, header)
    except (BrokenSeal, TypeError, OverflowError):
        problem = f"row {id_} does not have the checksum that it carries"
    if problem:
        sample.cut(0)
    return problem
