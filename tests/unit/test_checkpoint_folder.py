"""The folder of checkpoints: whole or not there, damage found before use, and what is kept; and how the
driver waits for the ranks."""

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.backend.checkpoint import manifest as manifests
from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.checkpoint.manifest import CheckpointRecord
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.driver.weights.ranked_trainer import RankedTrainer
from slipstream.backend.megatron.optimizer_state import rectangles
from slipstream.configs.schema.checkpoint import CheckpointConfig


def record(version: int, step: int | None = None) -> CheckpointRecord:
    return CheckpointRecord(version, version if step is None else step, 1, 10 * version, {"watermark": 3})


def fill(partial: Path, content: bytes = b"weights") -> None:
    (partial / "__0_0.distcp").write_bytes(content * 100)
    (partial / ".metadata").write_bytes(content)
    (partial / "empty").touch()


def commit(folder: CheckpointFolder, version: int, step: int | None = None) -> Path:
    fill(folder.begin(version))
    return folder.commit(record(version, step))


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep_last=2)


def test_a_committed_checkpoint_is_found_with_its_record(folder: CheckpointFolder, tmp_path: Path):
    assert folder.latest() is None
    path = commit(folder, 8)
    assert path == tmp_path / "checkpoints" / "v00000008"
    latest = folder.latest()
    assert latest and (latest.path, latest.record, latest.warnings) == (path, record(8), ())
    assert folder.verify(path) == []


def test_the_manifest_lists_every_other_file(folder: CheckpointFolder):
    path = commit(folder, 8)
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert {listed["name"] for listed in manifest["files"]} == {"__0_0.distcp", ".metadata", "empty"}
    assert manifest["format"] == 2


def test_files_in_subfolders_belong_to_the_checkpoint(folder: CheckpointFolder):
    partial = folder.begin(8)
    (partial / "extra").mkdir()
    (partial / "extra" / "part").write_bytes(b"x")
    path = folder.commit(record(8))
    (path / "extra" / "part").write_bytes(b"y")
    assert folder.verify(path) == ["extra/part has a wrong checksum"]


# ---- a kill between any two steps


def intermediate_states() -> dict[str, Callable[[CheckpointFolder], None]]:
    def written(folder: CheckpointFolder) -> Path:
        partial = folder.begin(9)
        fill(partial)
        return partial

    def manifest_half_written(folder: CheckpointFolder) -> None:
        (written(folder) / ".checkpoint.json.tmp").write_text('{"format": 1, "ver')

    def not_renamed(folder: CheckpointFolder) -> None:
        path = commit(folder, 9)
        path.rename(path.with_name(path.name + ".partial"))

    def removal_begun(folder: CheckpointFolder) -> None:
        path = commit(folder, 9)
        path.rename(path.with_name(path.name + ".removing"))

    def removal_halfway(folder: CheckpointFolder) -> None:
        path = commit(folder, 9)
        (path / ".metadata").unlink()
        path.rename(path.with_name(path.name + ".removing"))

    return {
        "begun": lambda folder: folder.begin(9) and None,
        "files written": lambda folder: written(folder) and None,
        "manifest half written": manifest_half_written,
        "all but the rename": not_renamed,
        "removal begun": removal_begun,
        "removal halfway": removal_halfway,
    }


@pytest.mark.parametrize("state", intermediate_states())
def test_a_kill_leaves_the_checkpoint_before_as_the_latest(folder: CheckpointFolder, state: str):
    before = commit(folder, 8)
    intermediate_states()[state](folder)
    latest = folder.latest()
    assert latest and latest.path == before and latest.warnings == ()
    assert folder.all() == [before] and folder.versions() == [8]


@pytest.mark.parametrize("state", intermediate_states())
def test_what_a_kill_left_is_gone_after_the_next_begin(folder: CheckpointFolder, state: str, tmp_path: Path):
    commit(folder, 8)
    intermediate_states()[state](folder)
    partial = folder.begin(12)
    assert list(partial.iterdir()) == []
    assert {path.name for path in partial.parent.iterdir()} == {"v00000008", "v00000012.partial"}


def test_beginning_again_empties_what_was_begun_before(folder: CheckpointFolder):
    fill(folder.begin(8))
    assert list(folder.begin(8).iterdir()) == []


def test_every_file_is_on_disk_before_the_rename(folder: CheckpointFolder, monkeypatch):
    synced, rename = set(), Path.rename
    fsync = os.fsync

    def recording_fsync(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def checking_rename(path: Path, target: Path) -> Path:
        if path.suffix == ".partial":
            names = {Path(name).name for name in synced}
            assert names >= {"__0_0.distcp", ".metadata", "empty", ".checkpoint.json.tmp", path.name}
            synced.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", checking_rename)
    path = commit(folder, 8)
    assert str(path.parent) in synced  # and the rename itself


# ---- damage


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing file": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "short file": (
        lambda p: os.truncate(p / "__0_0.distcp", 99),
        "__0_0.distcp has 99 bytes instead of 700",
    ),
    "long file": (lambda p: (p / "empty").write_bytes(b"x"), "empty has 1 bytes instead of 0"),
    "wrong byte": (lambda p: flip_a_byte(p / "__0_0.distcp"), "__0_0.distcp has a wrong checksum"),
    "no manifest": (lambda p: (p / "checkpoint.json").unlink(), "checkpoint.json is missing"),
    "half a manifest": (
        lambda p: os.truncate(p / "checkpoint.json", 60),
        "checkpoint.json cannot be understood",
    ),
    "manifest of another kind": (
        lambda p: (p / "checkpoint.json").write_text("[1]"),
        "checkpoint.json cannot be understood",
    ),
    "manifest changed": (
        lambda p: (p / "checkpoint.json").write_text(
            (p / "checkpoint.json").read_text().replace('"step": 9', '"step": 8')
        ),
        "checkpoint.json has a wrong checksum",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(folder: CheckpointFolder, kind: str):
    before, newest = commit(folder, 8), commit(folder, 9)
    damage, problem = DAMAGE[kind]
    damage(newest)
    latest = folder.latest()
    assert latest and latest.path == before
    assert latest.warnings == (f"checkpoint v00000009 is damaged: {problem}",)
    assert folder.verify(newest) == [problem]
    assert folder.versions() == [8]


def test_a_checkpoint_of_a_later_format_is_not_read(folder: CheckpointFolder, monkeypatch):
    path = commit(folder, 8)
    monkeypatch.setattr(manifests, "FORMAT", 0)
    assert folder.verify(path) == ["checkpoint.json has format 2; this program reads 0"]


def test_to_start_over_when_all_are_damaged_is_left_to_the_user(folder: CheckpointFolder):
    for version in (8, 9):
        (commit(folder, version) / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"v00000009.*v00000008.*move the folder away"):
        folder.latest()


def test_a_rejected_checkpoint_is_passed_over_without_reading_it(folder: CheckpointFolder, monkeypatch):
    commit(folder, 8)
    newest = commit(folder, 9)
    monkeypatch.setattr(folder, "verify", lambda path: pytest.fail("read") if path == newest else [])
    latest = folder.latest(lambda record: "another line" if record.version == 9 else None)
    assert latest and latest.record.version == 8
    assert latest.warnings == ("checkpoint v00000009 is passed over: another line",)
    assert folder.versions() == [8]
    assert folder.latest(lambda record: "another line") is None


# ---- retention


def names(folder: CheckpointFolder) -> list[int]:
    return [int(path.name[1:]) for path in folder.all()]


def test_the_newest_are_kept(folder: CheckpointFolder):
    for version in (1, 2, 3, 4):
        commit(folder, version)
    assert [path.name for path in folder.prune()] == ["v00000001", "v00000002"]
    assert names(folder) == [3, 4]
    assert folder.prune() == []


def test_milestones_go_by_the_step_not_by_the_version(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_every=10)
    for version, step in ((11, 10), (20, 15), (27, 20), (33, 26)):
        commit(folder, version, step)
    folder.prune()
    assert names(folder) == [11, 27, 33]


def test_damaged_ones_do_not_count_and_go_once_a_newer_one_is_sound(folder: CheckpointFolder):
    paths = {version: commit(folder, version) for version in (1, 2, 3, 4, 5)}
    flip_a_byte(paths[3] / "__0_0.distcp")
    folder.verify(paths[3])  # now it is known
    (paths[5] / ".metadata").unlink()  # seen without reading the files
    folder.prune()
    assert names(folder) == [2, 4, 5]
    commit(folder, 6)
    folder.prune()
    assert names(folder) == [4, 6]


def test_rejected_ones_do_not_count(folder: CheckpointFolder):
    for version in (1, 2, 3):
        commit(folder, version)
    folder.latest(lambda record: "another line" if record.version > 1 else None)
    commit(folder, 4)
    folder.prune()
    assert names(folder) == [1, 4]


def test_nothing_is_removed_when_none_is_sound(folder: CheckpointFolder):
    for version in (1, 2, 3):
        (commit(folder, version) / ".metadata").unlink()
    assert folder.prune() == []
    assert names(folder) == [1, 2, 3]


def test_a_removal_is_a_rename_first(folder: CheckpointFolder, monkeypatch):
    for version in (1, 2, 3):
        commit(folder, version)
    removed = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path.name))
    folder.prune()
    assert removed == ["v00000001.removing"]
    assert names(folder) == [2, 3]


def test_versions_of_more_than_eight_digits_sort_by_number(folder: CheckpointFolder):
    for version in (99_999_999, 100_000_000, 100_000_001):
        commit(folder, version)
    folder.prune()
    assert names(folder) == [100_000_000, 100_000_001]


# ---- refusals


def test_a_version_is_never_used_twice(folder: CheckpointFolder):
    commit(folder, 8)
    with pytest.raises(CheckpointError, match="must not be used twice"):
        folder.begin(8)


def test_an_empty_checkpoint_is_not_committed(folder: CheckpointFolder):
    folder.begin(8)
    with pytest.raises(CheckpointError, match="nothing was written"):
        folder.commit(record(8))


def test_a_failed_checkpoint_can_be_discarded(folder: CheckpointFolder):
    fill(folder.begin(8))
    folder.discard(8)
    folder.discard(8)
    assert folder.latest() is None


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "remount it"), (errno.EACCES, "write access")],
)
def test_errors_of_the_disk_say_what_to_do(folder: CheckpointFolder, monkeypatch, number: int, advice: str):
    fill(folder.begin(8))

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=rf"v00000008: {os.strerror(number)}.*{advice}"):
        folder.commit(record(8))
    monkeypatch.undo()
    assert folder.latest() is None


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_folder_that_cannot_be_listed_costs_no_run(folder: CheckpointFolder, monkeypatch, number: int):
    fill(folder.begin(8))
    folder.commit(record(8))

    def fail(path: Path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "iterdir", fail)
    for ask in (folder.prune, folder.versions, folder.latest):
        with pytest.raises(CheckpointError, match=rf"cannot list .*{os.strerror(number)}"):
            ask()
    monkeypatch.undo()
    assert folder.versions() == [8]


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        CheckpointFolder(tmp_path / "file" / "checkpoints", keep_last=1).begin(1)


def test_the_settings_default_to_a_checkpoint_every_ten_steps():
    assert CheckpointConfig().model_dump() == {
        "every": 10,
        "keep_last": 2,
        "keep_every": None,
        "timeout_s": 1800,
    }


@pytest.mark.parametrize("shape", [(1, 7), (4, 1), (3, 5)])
def test_any_range_of_a_matrix_is_at_most_three_rectangles_in_order(shape: tuple[int, int]):
    matrix = np.arange(shape[0] * shape[1]).reshape(shape)
    for start in range(matrix.size + 1):
        for end in range(start, matrix.size + 1):
            pieces = list(rectangles(start, end, columns=shape[1]))
            parts = [matrix[r.row : r.row + r.rows, r.column : r.column + r.columns] for r in pieces]
            assert len(parts) <= 3
            assert [int(x) for part in parts for x in part.flatten()] == list(range(start, end))


# ---- the trainer's side, seen from the driver


class Rank:
    """Looks like the handle of a trainer actor; each verb has a queue of answers."""

    def __init__(self, **answers: list[Any]) -> None:
        self.calls: list[str] = []
        queues = {verb: iter(queue) for verb, queue in answers.items()}

        async def answer(verb: str) -> Any:
            value = next(queues[verb])
            if isinstance(value, Exception):
                raise value
            return value

        def remote(verb: str, *_: Any) -> Any:
            self.calls.append(verb)
            return asyncio.ensure_future(answer(verb))

        self.call = type("Method", (), {"remote": staticmethod(remote)})


def trainer(*ranks: Rank) -> RankedTrainer:
    group = RankGroup(lambda: ranks, timeout_s=60, logs=Path("logs"))
    return RankedTrainer(group, step_timeout_s=60)


def ray_error(cause: Exception) -> Exception:
    from ray.exceptions import RayTaskError

    return RayTaskError("method", "traceback", cause)


def test_the_driver_asks_each_rank_until_it_has_written(monkeypatch):
    monkeypatch.setattr("slipstream.backend.driver.weights.ranked_trainer.POLL_S", 0.001)
    fast, slow = Rank(checkpoint_done=[True]), Rank(checkpoint_done=[False, False, True])
    asyncio.run(trainer(fast, slow).checkpoint_written())
    assert (len(fast.calls), len(slow.calls)) == (1, 3)


def test_other_calls_reach_the_ranks_while_the_driver_waits(monkeypatch):
    monkeypatch.setattr("slipstream.backend.driver.weights.ranked_trainer.POLL_S", 0.01)
    rank = Rank(checkpoint_done=[False] * 3 + [True], export_hf=[None])

    async def both() -> None:
        whole = trainer(rank)
        waiting = asyncio.create_task(whole.checkpoint_written())
        await asyncio.sleep(0.005)
        await whole.export_hf(Path("x"))
        assert not waiting.done()
        await waiting

    asyncio.run(both())
    assert rank.calls.index("export_hf") < len(rank.calls) - 1


def test_a_failed_checkpoint_is_told_from_a_failed_trainer():
    full = ray_error(CheckpointError("rank 1: No space left on device"))
    rank = Rank(finish_checkpoint=[full, ray_error(RuntimeError("NCCL"))])
    whole = trainer(rank)
    with pytest.raises(CheckpointError, match="No space left"):
        asyncio.run(whole.finish_checkpoint())
    with pytest.raises(TrainerFailed, match="NCCL"):
        asyncio.run(whole.finish_checkpoint())


def test_restoring_gives_the_step():
    assert asyncio.run(trainer(Rank(restore=[4]), Rank(restore=[4])).restore(Path("v4"))) == 4


def test_what_has_failed_on_disks_of_nodes_names_the_rank():
    first, second = Rank(finish_checkpoint=[[]]), Rank(finish_checkpoint=[["the disk is full", "no copy"]])
    problems = asyncio.run(trainer(first, second).finish_checkpoint())
    assert problems == ["rank 1: the disk is full", "rank 1: no copy"]


def test_restoring_from_nodes_gives_the_version_and_what_was_passed_over():
    answer = (4, ["version 5 is passed over"])
    ranks = [Rank(restore_from_nodes=[answer]) for _ in "12"]
    assert asyncio.run(trainer(*ranks).restore_from_nodes({4: "a", 5: "b"})) == answer
