"""Refuses to go on with a ledger and checkpoints that do not belong together.

Each checkpoint's record has the watermark of the ledger, and the ledger has a row for each committed
checkpoint. Suppose that the ledger were older than the checkpoint that a run goes on from: versions would be
named twice, and groups that are in the weights would be trained again.
"""

from collections.abc import Iterator
from pathlib import Path

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.checkpoint.manifest import CheckpointRecord, record_digest
from slipstream.rollout.ledger.reading.history import History

START_ANEW = "start the run anew under another run.name"


def check_watermarks(history: History, checkpoints: CheckpointFolder) -> None:
    """Raise CheckpointError unless the run can go on with this ledger and these checkpoints.

    Nothing is said here about damage: a checkpoint whose record cannot be read is left out.
    """
    paths = checkpoints.all()
    if history.checkpoints and not paths:
        newest = max(history.checkpoints)
        raise CheckpointError(
            f"{history.path} has recorded {len(history.checkpoints)} committed checkpoints, the last one of "
            f"version {newest}, but none is in {checkpoints.path}: the weights of the run are gone. Restore "
            f"the folder from a copy, or {START_ANEW}"
        )
    sound: list[Path] = []
    wrong: dict[Path, str] = {}
    for path in paths:
        try:
            record = checkpoints.record(path)
        except CheckpointError:
            continue
        if cause := next(_causes(history, record), None):
            wrong[path] = cause
        elif history.is_on_line(record.version):
            sound.append(path)
    if wrong:
        raise CheckpointError(_message(history, wrong, sound))


def _causes(history: History, record: CheckpointRecord) -> Iterator[str]:
    """Yield the reasons why a checkpoint does not belong to the ledger, the most telling one first."""
    mark, stamp = record.ledger, history.stamp
    if mark is None:
        yield "it was written by a run without a ledger"
        return
    if mark.run != stamp.run.hex():
        yield f"it belongs to another run ({mark.run}; the ledger is that of {stamp.run.hex()})"
        return
    if mark.sequence > stamp.sequence:
        yield (
            f"it follows on transaction {mark.sequence} of the ledger, which ends with transaction "
            f"{stamp.sequence}: the ledger is older than the checkpoint"
        )
    if mark.begun > stamp.begun or not history.knows(record.version):
        yield "the ledger does not know all of its versions: the ledger is older than the checkpoint"
        return
    digest = history.checkpoints.get(record.version)
    if digest is not None and digest != record_digest(record):
        yield "it is not the checkpoint of this version that the ledger has recorded"
    trained = history.trained_by(record.version)
    if trained != mark.trained:
        yield f"{mark.trained} groups were trained into it, but the ledger has {trained}"


def _message(history: History, wrong: dict[Path, str], sound: list[Path]) -> str:
    """Return what is wrong, and all ways out."""
    causes = "; ".join(f"checkpoint {path.name}: {cause}" for path, cause in wrong.items())
    names = ", ".join(path.name for path in wrong)
    log = f"{history.path.name}-wal"
    ways = [
        f"restore {history.path.name}, {log} (if there was one) and the folder payload as they were when "
        f"{names} was written, or later"
    ]
    if sound:
        ways.append(f"delete {names} to go on from {sound[-1].name}")
    elif not history.checkpoints:
        ways.append(f"delete {names} to go on from the initial weights")
    ways.append(START_ANEW)
    return (
        f"{history.path} does not fit the checkpoints. {causes}. The ledger or the checkpoints were restored "
        f"from a copy without the other, or the log {log} was lost. Ways out: {'; or '.join(ways)}"
    )
