"""Audits what is stored: every trajectory and every piece can be read, and is what its header says.

The headers of trained trajectories are compared with what the training step has recorded about them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from slipstream.rollout.ledger.audit.records import Records
from slipstream.rollout.ledger.audit.training_checks import tokens_by_version
from slipstream.rollout.ledger.lineage import INITIAL, BrokenTree
from slipstream.rollout.ledger.rows.samples import (
    JUDGED,
    SAMPLES,
    Fold,
    OpenSample,
    StoredRow,
    is_intact,
)
from slipstream.rollout.ledger.storage.database import BrokenSeal, LedgerError, few
from slipstream.rollout.ledger.storage.segments import FOLDER, Segments
from slipstream.rollout.tokens.record import (
    REF,
    CorruptRecord,
    check_routes,
    count_chunk_tokens,
    decode_header,
    decode_piece,
)
from slipstream.rollout.tokens.trajectory import UNSAMPLED, TrajectoryHeader


@dataclass
class _Group:
    """The stored rows of a group."""

    id: int
    state: str
    step: int | None
    tokens: int | None
    since: int
    samples: dict[int, OpenSample] = field(default_factory=dict[int, OpenSample])


def payload_is_whole(records: Records) -> Iterator[str]:
    """Whatever a restart may need is complete, undamaged, and labelled with versions that were begun."""
    stored = _Stored(records)
    stored.read_rows()
    for group in stored.groups.values():
        stored.check(group)
    number = records.meta("n_samples_per_prompt")
    if stored.incomplete:
        yield (
            f"{len(stored.incomplete)} ready or trained groups do not have exactly {number} trajectories: "
            + few(stored.incomplete)
        )
    if stored.broken:
        yield f"{len(stored.broken)} stored trajectories or pieces cannot be read: {few(stored.broken)}"
    if stored.mislabelled:
        yield f"{len(stored.mislabelled)} stored groups are labelled wrong: {few(stored.mislabelled)}"


class _Stored:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._segments = Segments(records.folder / FOLDER, records.stamp.run)
        self._samples = records.meta("n_samples_per_prompt")
        self._versions = {INITIAL, *records.parents}
        self._bounds = {epoch.number: epoch.bound for epoch in records.epochs}
        self._epochs = {version.number: version.epoch for version in records.versions}
        self.incomplete: list[int] = []
        self.broken: list[str] = []
        self.mislabelled: list[str] = []
        rows: Iterable[tuple[int, str, int | None, int | None, int]] = records.connection.execute(
            "SELECT id, state, step, tokens, since FROM groups WHERE state IN ('admitted', 'ready') "
            "OR state = 'trained' AND step > ?",
            (records.stamp.released,),
        )
        self.groups = {row[0]: _Group(*row) for row in rows}

    def read_rows(self) -> None:
        rows: Iterable[StoredRow] = self._records.connection.execute("SELECT * FROM samples ORDER BY id")
        fold = Fold()
        for row in rows:
            id_, key = row[0], row[1]
            group = self.groups.get(key // SAMPLES)
            if group is None or id_ < group.since:
                if not is_intact(row):
                    self.broken.append(f"row {id_}")
                continue
            fold.add(row)
        for key, sample in fold.samples.items():
            if not sample.is_empty:
                self.groups[key // SAMPLES].samples[key % SAMPLES] = sample
        self.broken += [f"{_name(key)} ({problem})" for key, problem in fold.wrong.items()]

    def check(self, group: _Group) -> None:
        """Check one group: each of its samples, and what they are together."""
        headers: list[TrajectoryHeader] = []
        for number, sample in group.samples.items():
            try:
                if sample.header is None:
                    self._check_pieces(sample)
                else:
                    headers.append(self._checked_header(sample))
            except (CorruptRecord, LedgerError) as error:
                self.broken.append(f"{_name(group.id * SAMPLES + number)} ({error})")
        unknown = {v for header in headers for v, _, _ in header.runs} - self._versions - {UNSAMPLED}
        if unknown:
            self.mislabelled.append(f"{group.id} (versions {few(sorted(unknown))} were never begun)")
        if group.state == "admitted":
            return
        judged = [sample for sample in group.samples.values() if sample.state == JUDGED]
        if len(judged) != self._samples or len(judged) != len(group.samples):
            self.incomplete.append(group.id)
        elif len(headers) == len(judged):
            self._check_group(group, headers)

    def _check_pieces(self, sample: OpenSample) -> None:
        for ref, header in sample.pieces:
            piece = decode_piece(header)
            _, sampled = count_chunk_tokens(b"".join(self._segments.read(*r) for r in REF.iter_unpack(ref)))
            spans = sum(tokens for _, tokens in piece.spans)
            if sampled != spans:
                raise CorruptRecord(f"{sampled} sampled tokens, and spans of {spans}")
            unknown = {version for version, _ in piece.spans} - self._versions
            if unknown:
                raise CorruptRecord(f"versions {few(sorted(unknown))} were never begun")

    def _checked_header(self, sample: OpenSample) -> TrajectoryHeader:
        header = decode_header(sample.header or b"")
        chunks = b"".join(self._segments.read(*ref) for ref in REF.iter_unpack(sample.refs))
        lengths = count_chunk_tokens(chunks)
        check_routes(chunks)
        expected = header.length - header.sampled_length, header.sampled_length
        if lengths != expected:
            raise CorruptRecord(
                f"{lengths[0]} tokens of context and {lengths[1]} sampled ones, but its header has "
                f"{expected[0]} and {expected[1]}"
            )
        return header

    def _check_group(self, group: _Group, headers: list[TrajectoryHeader]) -> None:
        """Compare the headers of a complete group with what is recorded about the group."""
        sampled = sum(header.sampled_length for header in headers)
        if group.tokens != sampled:
            self.mislabelled.append(
                f"{group.id} ({group.tokens} sampled tokens are recorded, its trajectories have {sampled})"
            )
        if group.step is None:
            return
        tokens: Counter[int] = Counter()
        for header in headers:
            tokens.update(header.trained_tokens)
        recorded = self._recorded(group)
        try:
            expected = {
                version: n for version, n in tokens.items() if self._is_within_bound(version, group.step)
            }
        except BrokenTree as error:
            self.mislabelled.append(f"{group.id} ({error})")
            return
        if recorded is not None and recorded != expected:
            self.mislabelled.append(
                f"{group.id} (trained tokens by version: {recorded} are recorded, its trajectories have "
                f"{expected})"
            )

    def _recorded(self, group: _Group) -> dict[int, int] | None:
        """Return the tokens that were trained, by version; None if the training cannot be read."""
        row = self._records.connection.execute(
            "SELECT version, group_id, head_lag, tokens, masked, versions FROM trainings "
            "WHERE version = ? AND group_id = ?",
            (group.step, group.id),
        ).fetchone()
        try:
            return None if row is None else tokens_by_version(row[:5], row[5])
        except BrokenSeal:
            return None

    def _is_within_bound(self, version: int, step: int) -> bool:
        """True if tokens of ``version`` carry loss in the step that made version ``step``."""
        start = self._records.parents.get(step, INITIAL)
        bound = self._bounds.get(self._epochs.get(step, -1), -1)
        return self._records.distance(version, start) <= bound


def _name(key: int) -> str:
    return f"{key // SAMPLES}.{key % SAMPLES}"
