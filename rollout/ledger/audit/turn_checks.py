"""Audits the turns of live users: each ends once, is trained once, and never beyond the bound.

Lags of trainings are recomputed with those of groups, in ``training_checks``.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from slipstream.rollout.ledger.audit.records import Records
from slipstream.rollout.ledger.audit.training_checks import tokens_by_version
from slipstream.rollout.ledger.lineage import INITIAL, BrokenTree
from slipstream.rollout.ledger.rows.stored_turns import (
    KEPT,
    TurnHead,
    TurnRow,
    decode_head,
    decode_verdict,
    entry_of,
    gateway_of,
)
from slipstream.rollout.ledger.storage.database import TURN_STATES, BrokenSeal, crc_of, few, unsealed
from slipstream.rollout.ledger.storage.segments import FOLDER, Segments
from slipstream.rollout.tokens.record import REF, CorruptRecord, decode_chunks, decode_scores

NEVER_TRAINED = "state IN ('side', 'cancelled', 'filtered', 'unpaired')"


def entries_count_once(records: Records) -> Iterator[str]:
    """Each turn is an entry that its gateway was told is in the ledger."""
    gateways: dict[int, int] = records.numbers("SELECT id, durable FROM gateways")
    if sorted(gateways) != list(range(1, len(gateways) + 1)):
        yield f"gateways are numbered {few(sorted(gateways))}, expected 1 to {len(gateways)}"
    names = [name for (name,) in records.connection.execute("SELECT name FROM gateways")]
    if len(set(names)) != len(names):
        yield "two gateways have the same name"
    beyond: list[int] = []
    rows: Iterable[tuple[int]] = records.connection.execute("SELECT id FROM turns")
    for (id_,) in rows:
        if id_ >= 0 or not 1 <= entry_of(id_) <= gateways.get(gateway_of(id_), 0):
            beyond.append(id_)
    if beyond:
        yield f"{len(beyond)} turns are no acknowledged entries of any gateway: {few(beyond)}"
    yield from records.examples(
        "turns continue a turn of another session or a later one, or none that there is",
        "SELECT t.id FROM turns t LEFT JOIN turns p ON p.id = t.parent "
        "WHERE t.parent IS NOT NULL AND (p.id IS NULL OR p.session != t.session OR p.id <= t.id)",
    )


def turns_end_once(records: Records) -> Iterator[str]:
    """A turn is in one state, which fits everything else that is recorded of it."""
    yield from records.examples(
        "turns are in a state that does not exist", f"SELECT id FROM turns WHERE state NOT IN {TURN_STATES}"
    )
    yield from records.examples(
        "turns have a training step without being trained, or are trained without having one",
        "SELECT id FROM turns WHERE (step IS NOT NULL) != (state = 'trained')",
    )
    yield from records.examples(
        "turns were trained or are ready without a score",
        "SELECT id FROM turns WHERE state IN ('trained', 'ready') AND verdict IS NULL",
    )
    yield from records.examples(
        "turns that are never trained were trained",
        f"SELECT id FROM turns WHERE {NEVER_TRAINED} AND id IN (SELECT group_id FROM trainings)",
    )
    yield from records.examples(
        "turns wait for a verdict, and nothing came after them",
        "SELECT id FROM turns WHERE state = 'unjudged' AND next IS NULL",
    )
    yield from records.examples(
        "turns that go on or may be trained again are in no session",
        "SELECT id FROM turns WHERE (state IN ('waiting', 'unjudged', 'ready') "
        f"OR state = 'trained' AND step > {records.stamp.released}) "
        "AND session NOT IN (SELECT id FROM sessions)",
    )
    yield from records.examples(
        "turns have ended as forgotten, and their payload is to be kept",
        "SELECT id FROM turns WHERE state = 'forgotten' AND gone != 2",
    )
    yield from records.examples(
        "turns go on although they are forgotten",
        "SELECT id FROM turns WHERE gone = 2 AND state IN ('waiting', 'unjudged', 'ready')",
    )


def turns_are_trained_once(records: Records) -> Iterator[str]:
    """A turn is `trained` if and only if exactly one of its trainings led to today's weights."""
    line = set(records.line)
    trainings: dict[int, list[int]] = {}
    rows: Iterable[tuple[int, int]] = records.connection.execute(
        "SELECT version, group_id FROM trainings WHERE group_id < 0"
    )
    for version, id_ in rows:
        if version in line:
            trainings.setdefault(id_, []).append(version)
    twice = [id_ for id_, versions in trainings.items() if len(versions) > 1]
    if twice:
        yield f"{len(twice)} turns were trained twice by the steps that led to the weights: {few(twice)}"
    trained = records.numbers("SELECT id, step FROM turns WHERE state = 'trained'")
    missing = [id_ for id_, step in trained.items() if step not in trainings.get(id_, [])]
    if missing:
        yield f"{len(missing)} turns count as trained, but by no step that led to the weights: {few(missing)}"
    forgotten = [id_ for id_ in trainings if id_ not in trained]
    if forgotten:
        yield f"{len(forgotten)} turns trained the weights, but are not counted as trained: {few(forgotten)}"


def turns_are_whole(records: Records) -> Iterator[str]:
    """Heads, scores and payload can be read, and fit what was trained and what has expired."""
    auditor = _Auditor(records)
    rows: Iterable[tuple[Any, ...]] = records.connection.execute(
        f"SELECT {', '.join(TurnRow._fields)} FROM turns WHERE gone = {KEPT}"
    )
    for row in rows:
        auditor.check(TurnRow(*row))
    if auditor.broken:
        yield f"{len(auditor.broken)} stored turns cannot be read: {few(auditor.broken)}"
    if auditor.mislabelled:
        yield f"{len(auditor.mislabelled)} turns are labelled wrong: {few(auditor.mislabelled)}"


class _Auditor:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._segments = Segments(records.folder / FOLDER, records.stamp.run)
        self._bounds = {epoch.number: epoch.bound for epoch in records.epochs}
        self._epochs = {version.number: version.epoch for version in records.versions}
        self.broken: list[str] = []
        self.mislabelled: list[str] = []

    def check(self, turn: TurnRow) -> None:
        try:
            head = decode_head(unsealed(turn.head, crc_of(turn.id)))
            if turn.verdict is not None:
                decode_verdict(unsealed(turn.verdict, crc_of(turn.id, 1)))
            # What has ended as failed may have done so because it is damaged.
            if turn.state != "failed":
                self._check_payload(turn, head)
        except (BrokenSeal, CorruptRecord) as error:
            self.broken.append(f"{turn.id} ({error})")
            return
        try:
            problem = self._problem(turn, head)
        except (BrokenSeal, BrokenTree) as error:
            problem = str(error)
        if problem is not None:
            self.mislabelled.append(f"{turn.id} ({problem})")

    def _check_payload(self, turn: TurnRow, head: TurnHead) -> None:
        for ref in turn.refs:
            if ref is not None and (len(ref) != REF.size or not self._segments.has(*REF.unpack(ref))):
                raise CorruptRecord("its payload is damaged")
        if turn.teacher is not None:
            segment, offset, size, _ = REF.unpack(turn.teacher)
            decode_scores(self._segments.raw(segment, offset, size), head.sampled)
        if turn.chunk is None:
            return
        segment, offset, size, _ = REF.unpack(turn.chunk)
        chunks = list(decode_chunks(self._segments.raw(segment, offset, size)))
        lengths = sum(len(chunk.context) for chunk in chunks), sum(len(chunk.tokens) for chunk in chunks)
        if lengths != (head.context, head.sampled):
            raise CorruptRecord(
                f"{lengths[0]} tokens of context and {lengths[1]} sampled ones, but its head has "
                f"{head.context} and {head.sampled}"
            )

    def _problem(self, turn: TurnRow, head: TurnHead) -> str | None:
        """Return what is wrong with the labels of a turn, if anything."""
        if turn.sampled != head.sampled:
            return f"{turn.sampled} sampled tokens are recorded, its head has {head.sampled}"
        if turn.state == "trained" and turn.step is not None:
            return self._problem_of_training(turn.id, turn.step, head)
        if turn.state == "expired":
            return self._problem_of_expiry(turn, head)
        return None

    def _problem_of_training(self, id_: int, step: int, head: TurnHead) -> str | None:
        row = self._records.connection.execute(
            "SELECT version, group_id, head_lag, tokens, masked, versions FROM trainings "
            "WHERE version = ? AND group_id = ?",
            (step, id_),
        ).fetchone()
        if row is None:
            return None  # turns_are_trained_once finds it
        recorded = tokens_by_version(row[:5], row[5])
        start = self._records.parents.get(step, INITIAL)
        bound = self._bounds.get(self._epochs.get(step, -1), -1)
        expected: dict[int, int] = {}
        for version, tokens in head.spans:
            if tokens and self._records.distance(version, start) <= bound:
                expected[version] = expected.get(version, 0) + tokens
        if recorded != expected:
            return f"trained tokens by version: {recorded} are recorded, its spans give {expected}"
        return None

    def _problem_of_expiry(self, turn: TurnRow, head: TurnHead) -> str | None:
        if turn.version is None or turn.lag is None:
            return "it has expired, but nothing says how old it was"
        lags = [self._records.distance(version, turn.version) for version in head.versions]
        bound = min(self._bounds.values(), default=-1)
        if min(lags, default=-1) != turn.lag:
            return f"it has expired with a lag of {turn.lag}, the tree has {min(lags, default=-1)}"
        if turn.lag <= bound:
            return f"it has expired with a lag of {turn.lag}, within the bound of {bound}"
        return None


CHECKS = (entries_count_once, turns_end_once, turns_are_trained_once, turns_are_whole)
