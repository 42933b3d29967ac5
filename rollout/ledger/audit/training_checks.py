"""Audits versions and trainings: who descends from whom, who was trained on what, and with which lag.

Lags are distances in the tree of versions. They are computed here from the rows, with the code of
``lineage``: not with that of the control core, whose results they check.
"""

from collections.abc import Iterable, Iterator
from struct import iter_unpack

from slipstream.rollout.ledger.audit.records import Epoch, Records, Version
from slipstream.rollout.ledger.lineage import INITIAL, BrokenTree
from slipstream.rollout.ledger.reading.history import batch_groups
from slipstream.rollout.ledger.storage.database import BrokenSeal, crc_of, few, unsealed


def versions_follow_each_other(records: Records) -> Iterator[str]:
    """Numbers count up without a gap. Within a start, each version continues the one published before."""
    numbers = [version.number for version in records.versions]
    if numbers != list(range(1, len(numbers) + 1)):
        missing = next(number for number, version in enumerate([*numbers, -1], start=1) if number != version)
        yield f"version {missing} is missing: each number is begun once, and none is left out"
    by_epoch: dict[int, list[Version]] = {}
    for version in records.versions:
        by_epoch.setdefault(version.epoch, []).append(version)
    starts = {epoch.number for epoch in records.epochs}
    if starts != set(range(len(records.epochs))):
        yield f"the starts are numbered {few(sorted(starts))}, expected 0 to {len(records.epochs) - 1}"
    for unknown in sorted(set(by_epoch) - starts):
        yield f"version {by_epoch[unknown][0].number} was begun in start {unknown}, which is not recorded"
    before = 0
    for epoch in records.epochs:
        begun = by_epoch.get(epoch.number, [])
        yield from _start_is_right(records, epoch, before)
        yield from _line_is_unbroken(epoch, begun, before)
        before = max([before, *(version.number for version in begun)])


def _start_is_right(records: Records, epoch: Epoch, before: int) -> Iterator[str]:
    """``before``: largest version begun before the start."""
    restored = epoch.restored
    if restored != INITIAL and (restored not in records.published or restored > before):
        yield f"start {epoch.number}: it restores version {restored}, which had not been published"
    step = records.updates(restored)
    if epoch.step != step:
        yield (
            f"start {epoch.number}: {epoch.step} training steps are recorded for version {restored}, "
            f"but the tree has {step}"
        )


def _line_is_unbroken(epoch: Epoch, begun: list[Version], before: int) -> Iterator[str]:
    tip = epoch.restored
    for version in begun:
        if version.number <= before:
            yield (
                f"start {epoch.number}: version {version.number} was begun after version {before} of an "
                "earlier start"
            )
        if version.parent != tip:
            yield (
                f"start {epoch.number}: version {version.number} has the parent {version.parent}, "
                f"expected {tip}"
            )
        if version.is_published:
            tip = version.number


def trained_once(records: Records) -> Iterator[str]:
    """A group is `trained` if and only if exactly one of its trainings led to today's weights.

    The weights are those of the last published version: steps that only the next restart undoes still count.
    """
    line = set(records.line)
    trainings: dict[int, list[int]] = {}
    rows: Iterable[tuple[int, int]] = records.connection.execute(
        "SELECT version, group_id FROM trainings WHERE group_id >= 0"
    )
    for version, id_ in rows:
        if version in line:
            trainings.setdefault(id_, []).append(version)
    twice = [id_ for id_, versions in trainings.items() if len(versions) > 1]
    if twice:
        yield f"{len(twice)} groups were trained twice by the steps that led to the weights: {few(twice)}"
    trained = records.numbers("SELECT id, step FROM groups WHERE state = 'trained'")
    missing = [id_ for id_, step in trained.items() if step not in trainings.get(id_, [])]
    if missing:
        yield (
            f"{len(missing)} groups count as trained, but by no step that led to the weights: {few(missing)}"
        )
    forgotten = [id_ for id_ in trainings if id_ not in trained]
    if forgotten:
        yield f"{len(forgotten)} groups trained the weights, but are not counted as trained: {few(forgotten)}"


def batches_are_trained(records: Records) -> Iterator[str]:
    """Each published version but copies was trained on its batch, and no other version on any group or turn.

    A batch has as many groups as the recipe says, and any number of turns. It must not be empty.
    """
    batches: dict[int, tuple[int, ...]] = {}
    rows: Iterable[tuple[int, bytes]] = records.connection.execute("SELECT version, groups FROM batches")
    for version, blob in rows:
        try:
            batches[version] = batch_groups(version, blob)
        except BrokenSeal as error:
            yield f"the batch of version {version} cannot be read: {error}"
    unpublished = [version for version in records.trained if version not in records.published]
    if unpublished:
        yield f"{len(unpublished)} versions were trained but not published: {few(unpublished)}"
    trained: dict[int, list[int]] = {}
    pairs: Iterable[tuple[int, int]] = records.connection.execute(
        "SELECT version, group_id FROM trainings ORDER BY version, group_id"
    )
    for version, id_ in pairs:
        trained.setdefault(version, []).append(id_)
    wrong = [
        version
        for version in sorted(records.published)
        if sorted(batches.get(version, ())) != trained.get(version, [])
    ]
    if wrong:
        yield f"{len(wrong)} steps did not train the groups of their batch: versions {few(wrong)}"
    if trained_copies := sorted(records.copies.intersection(batches)):
        yield f"{len(trained_copies)} copies have a batch of their own: versions {few(trained_copies)}"
    size = records.meta("batch_size")
    if empty := [version for version, batch in batches.items() if not batch]:
        yield f"{len(empty)} steps had an empty batch: versions {few(empty)}"
    odd = [version for version, batch in batches.items() if sum(id_ >= 0 for id_ in batch) != size]
    if odd:
        yield f"{len(odd)} steps did not train {size} groups: versions {few(odd)}"


def lags_are_right(records: Records) -> Iterator[str]:
    """The recorded head lags are the distances in the tree, and within the bound that was in force."""
    versions = {version.number: version for version in records.versions}
    bounds = {epoch.number: epoch.bound for epoch in records.epochs}
    distances: dict[tuple[int, int], int] = {}
    wrong: list[str] = []
    beyond: list[int] = []
    rows: Iterable[tuple[int, int, int, int, int, bytes]] = records.connection.execute(
        "SELECT version, group_id, head_lag, tokens, masked, versions FROM trainings"
    )
    for version, id_, head_lag, tokens, masked, blob in rows:
        label = f"{'group' if id_ >= 0 else 'turn'} {id_} in version {version}"
        try:
            trained = tokens_by_version((version, id_, head_lag, tokens, masked), blob)
            lag = -1
            for token_version in trained:
                pair = (token_version, records.parents.get(version, -1))
                if pair not in distances:
                    distances[pair] = records.distance(*pair)
                lag = max(lag, distances[pair])
        except (BrokenSeal, BrokenTree) as error:
            wrong.append(f"{label}: {error}")
            continue
        if lag != head_lag:
            wrong.append(f"{label}: the head lag {head_lag} is recorded, the tree has {lag}")
        if sum(trained.values()) != tokens:
            wrong.append(f"{label}: {tokens} trained tokens are recorded, by version {sum(trained.values())}")
        known = versions.get(version)
        if known is None or lag > bounds.get(known.epoch, -2):
            beyond.append(id_)
    if wrong:
        yield f"{len(wrong)} trainings are labelled wrong: {few(wrong)}"
    if beyond:
        yield f"{len(beyond)} groups or turns were trained beyond the bound that was in force: {few(beyond)}"


def tokens_by_version(row: tuple[int, int, int, int, int], blob: bytes) -> dict[int, int]:
    """Return the number of tokens that carried loss, by version, from a row of trainings. Raises BrokenSeal.

    ``row``: its other columns.
    """
    data = unsealed(blob, crc_of(*row))
    if len(data) % 16:
        raise BrokenSeal(f"{len(data)} bytes are no pairs of version and tokens")
    return dict(iter_unpack("<2q", data))
