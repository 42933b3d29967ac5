"""Ledger and checkpoints that were copied at different times: a run goes on only if they belong together."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CHECKPOINTS, CheckpointFolder
from slipstream.backend.checkpoint.manifest import CheckpointRecord, record_digest
from slipstream.backend.checkpoint.watermarks import check_watermarks
from slipstream.backend.commands.audit import audit_run
from slipstream.backend.driver.weights.checkpointing import TrainerCheckpoints
from slipstream.configs.schema import CheckpointConfig
from slipstream.rollout.control.ends import GroupCounts
from slipstream.rollout.ledger.reading.history import history_of
from slipstream.rollout.ledger.recovery import LEDGER, open_ledger
from slipstream.rollout.ledger.rows.watermark import Watermark
from slipstream.rollout.ledger.storage.segments import FOLDER
from slipstream.rollout.ledger.writing.writer import Ledger
from tests.unit.test_ledger import BATCH, in_ledger, ready_group, train

LOG = f"{LEDGER}-wal"
STEPS = 4


def checkpoints_in(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / CHECKPOINTS, keep_last=9)


async def take_checkpoint(folder: Path, ledger: Ledger, version: int, *, noted: bool = True) -> None:
    """Take a checkpoint in the driver's order. ``noted``: the process lives until the ledger has its row."""
    checkpoints = checkpoints_in(folder)
    mark = ledger.watermark()
    record = CheckpointRecord(version, mark.trained, ledger.epoch, 0, {"trained": mark.trained}, mark)
    (checkpoints.begin(version) / "weights").write_bytes(b"%d" % version)
    await ledger.flushed()
    checkpoints.commit(record)
    if noted:
        ledger.checkpointed(version, record_digest(record))
        await ledger.flushed()


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """Copies of a run of four steps, with a checkpoint after each: what a crash leaves after each step."""
    root, folder = tmp_path_factory.mktemp("copies"), tmp_path_factory.mktemp("run")

    async def act(ledger: Ledger) -> None:
        for version in range(1, STEPS + 1):
            ready_group(ledger, version - 1, [version - 1] * 20, version - 1)
            train(ledger, version, version - 1, version - 1, [version - 1] * 20)
            await take_checkpoint(folder, ledger, version)
            shutil.copytree(folder, root / str(version))

    in_ledger(folder, act, segment_bytes=1_000)
    return root


def mixed(copies: Path, target: Path, *, ledger: int, payload: int, checkpoints: int) -> Path:
    """Make a run folder of copies from different times, given as the number of steps done then."""
    shutil.copytree(copies / str(payload) / FOLDER, target / FOLDER)
    for name in (LEDGER, LOG):
        shutil.copy(copies / str(ledger) / name, target / name)
    shutil.copytree(copies / str(checkpoints) / CHECKPOINTS, target / CHECKPOINTS)
    return target


def check(folder: Path) -> None:
    check_watermarks(history_of(folder), checkpoints_in(folder))


def refusal(folder: Path) -> str:
    """Return why the run is refused. Nothing has changed then."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as raised:
        check(folder)
    after = {path: path.read_bytes() for path in before}
    assert after == before
    text = str(raised.value)
    assert text.count("start the run anew under another run.name") == 1
    return text


def go_on(folder: Path) -> int:
    """Resume the run from its newest checkpoint and train one step. Return the version restored."""
    check(folder)
    history = history_of(folder)
    newest = checkpoints_in(folder).latest(
        lambda record: None if history.is_on_line(record.version) else "on another line"
    )
    restored = newest.record.version if newest else 0
    ledger, recovered = open_ledger(folder, **BATCH, restored=restored)
    version = max([0, *(version for version, _ in recovered.versions)]) + 1

    async def step() -> None:
        id_ = recovered.counts.admitted
        ready_group(ledger, id_, [restored], restored)
        train(ledger, version, restored, id_, [restored])
        await take_checkpoint(folder, ledger, version)

    asyncio.run(step())
    ledger.close()
    return restored


def damage_of(folder: Path) -> list[str]:
    """What the audit finds, without trajectories that an older copy of the payload lacks."""
    return [text for text in audit_run(folder, lambda _: None).discrepancies if "cannot be read" not in text]


@pytest.mark.parametrize("ledger", range(1, STEPS + 1))
@pytest.mark.parametrize("payload", [1, STEPS])
@pytest.mark.parametrize("checkpoints", range(1, STEPS + 1))
def test_a_ledger_older_than_a_checkpoint_is_refused_and_any_other_goes_on(
    copies, tmp_path, ledger, payload, checkpoints
):
    """It used to resume: version numbers were used again, and groups of the checkpoint were trained twice."""
    folder = mixed(copies, tmp_path, ledger=ledger, payload=payload, checkpoints=checkpoints)
    if ledger < checkpoints:
        newer = ", ".join(f"v{version:08d}" for version in range(ledger + 1, checkpoints + 1))
        text = refusal(folder)
        assert "the ledger is older than the checkpoint" in text
        assert f"delete {newer} to go on from v{ledger:08d}" in text
        for version in range(ledger + 1, checkpoints + 1):
            shutil.rmtree(folder / CHECKPOINTS / f"v{version:08d}")
        assert go_on(folder) == ledger
    else:
        assert go_on(folder) == checkpoints
    assert damage_of(folder) == []


@pytest.mark.parametrize("ledger", range(1, STEPS + 1))
def test_a_log_that_is_lost_makes_the_ledger_older(copies, tmp_path, ledger):
    folder = mixed(copies, tmp_path, ledger=ledger, payload=STEPS, checkpoints=STEPS)
    (folder / LOG).unlink()
    text = refusal(folder)
    assert "the ledger is older than the checkpoint" in text
    assert f"or the log {LOG} was lost" in text


def test_checkpoints_that_are_all_gone_are_missed(copies, tmp_path):
    folder = mixed(copies, tmp_path, ledger=4, payload=4, checkpoints=4)
    shutil.rmtree(folder / CHECKPOINTS)
    text = refusal(folder)
    assert "has recorded 4 committed checkpoints, the last one of version 4, but none is in" in text
    assert "Restore the folder from a copy" in text
    assert any("none is in" in finding for finding in audit_run(folder, lambda _: None).discrepancies)


def test_a_run_without_checkpoints_yet_goes_on(tmp_path):
    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        train(ledger, 1, 0, 0, [0])

    in_ledger(tmp_path, act)
    assert go_on(tmp_path) == 0


def test_the_checkpoint_of_another_run_is_refused(copies, tmp_path):
    folder = mixed(copies, tmp_path / "run", ledger=4, payload=4, checkpoints=4)
    other = tmp_path / "other"
    other.mkdir()

    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        train(ledger, 1, 0, 0, [0])
        await take_checkpoint(other, ledger, 1)

    in_ledger(other, act)
    shutil.copytree(other / CHECKPOINTS / "v00000001", folder / CHECKPOINTS / "v00000007")
    text = refusal(folder)
    assert "checkpoint v00000007: it belongs to another run" in text
    assert "delete v00000007 to go on from v00000004" in text


def test_a_checkpoint_of_a_run_without_a_ledger_is_refused(copies, tmp_path):
    folder = mixed(copies, tmp_path, ledger=4, payload=4, checkpoints=4)
    checkpoints = checkpoints_in(folder)
    (checkpoints.begin(9) / "weights").write_bytes(b"9")
    checkpoints.commit(CheckpointRecord(9, 9, 0, 9, {}))
    assert "checkpoint v00000009: it was written by a run without a ledger" in refusal(folder)


def test_another_checkpoint_under_a_recorded_name_is_refused(copies, tmp_path):
    folder = mixed(copies, tmp_path, ledger=4, payload=4, checkpoints=3)
    checkpoints = checkpoints_in(folder)
    record = checkpoints.record(folder / CHECKPOINTS / "v00000003")
    (checkpoints.begin(4) / "weights").write_bytes(b"4")
    checkpoints.commit(CheckpointRecord(4, 4, 0, 99, {"trained": 4}, record.ledger))
    assert "checkpoint v00000004: it is not the checkpoint of this version that the ledger" in refusal(folder)


def test_a_checkpoint_that_counts_other_groups_than_the_ledger_is_refused(copies, tmp_path):
    folder = mixed(copies, tmp_path, ledger=4, payload=4, checkpoints=3)
    history, checkpoints = history_of(folder), checkpoints_in(folder)
    mark = Watermark(history.stamp.run.hex(), history.stamp.sequence, begun=4, trained=9)
    (checkpoints.begin(4) / "weights").write_bytes(b"4")
    checkpoints.commit(CheckpointRecord(4, 4, 0, 4, {"trained": 9}, mark))
    history.checkpoints.clear()
    with pytest.raises(CheckpointError, match="9 groups were trained into it, but the ledger has 4"):
        check_watermarks(history, checkpoints)


def _zero_weights(checkpoint: Path) -> None:
    (checkpoint / "weights").write_bytes(b"0")


def _cut_manifest(checkpoint: Path) -> None:
    (checkpoint / "checkpoint.json").write_text("{")


@pytest.mark.parametrize("damage", [_zero_weights, _cut_manifest])
def test_falling_back_from_a_damaged_checkpoint_stays_legal(copies, tmp_path, damage: Callable[[Path], None]):
    folder = mixed(copies, tmp_path, ledger=4, payload=4, checkpoints=4)
    damage(folder / CHECKPOINTS / "v00000004")
    assert go_on(folder) == 3
    audit = audit_run(folder, lambda _: None)
    assert audit.discrepancies == []
    assert (audit.steps, audit.steps_lost) == (4, 1)


def test_a_checkpoint_that_the_ledger_has_no_row_of_is_used(copies, tmp_path):
    """The process has died between the commit of the checkpoint and the ledger's row."""

    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        train(ledger, 1, 0, 0, [0])
        await take_checkpoint(tmp_path, ledger, 1, noted=False)

    in_ledger(tmp_path, act)
    assert history_of(tmp_path).checkpoints == {}
    assert go_on(tmp_path) == 1
    assert audit_run(tmp_path, lambda _: None).discrepancies == []


def test_the_driver_writes_watermark_and_row(tmp_path):
    """``TrainerCheckpoints`` with a trainer that writes one file."""

    class Trainer:
        async def begin_checkpoint(self, folder: Path, tokens: None) -> None:
            (folder / "weights").write_bytes(b"1")

        async def checkpoint_written(self) -> None: ...
        async def finish_checkpoint(self) -> list[str]:
            return []

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        yield

    notes: list[str] = []
    listener = SimpleNamespace(
        checkpoint_taken=lambda stall_s: None,
        checkpoint_committed=lambda step, seconds: None,
        note=notes.append,
    )

    async def act(ledger: Ledger) -> None:
        ready_group(ledger, 0, [0])
        train(ledger, 1, 0, 0, [0])
        run = SimpleNamespace(version=1, step=1, position=1, counts=GroupCounts(1, 1))
        config = CheckpointConfig(every=1)
        checkpoints = TrainerCheckpoints(config, checkpoints_in(tmp_path), Trainer(), turn, ledger, listener)
        await checkpoints.step_done(run)
        await checkpoints.last(run)

    in_ledger(tmp_path, act)
    assert notes == []
    record = checkpoints_in(tmp_path).record(tmp_path / CHECKPOINTS / "v00000001")
    assert record.ledger and (record.ledger.begun, record.ledger.trained) == (1, 1)
    assert history_of(tmp_path).checkpoints == {1: record_digest(record)}
    assert go_on(tmp_path) == 1
