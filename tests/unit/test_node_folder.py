"""Shares on disks of nodes: whole or not counted, who keeps a copy for whom, what the driver counts on."""

import asyncio
import os
import zlib
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.backend.checkpoint.checkpoint_errors import CheckpointError
from slipstream.backend.checkpoint.folder import CheckpointFolder
from slipstream.backend.checkpoint.node_folder import NodeFolder, Share, next_nodes, sources
from slipstream.backend.driver.weights.checkpointing import NoHistory, TrainerCheckpoints
from slipstream.configs.schema.checkpoint import CheckpointConfig
from slipstream.rollout.control.core import GroupCounts

CONTENT = bytes(range(256)) * 40


def share(version: int = 8, rank: int = 0, token: str = "token") -> Share:
    tensors = {"model weight": ("float32", [2, 1280], 0)}
    return Share(version, token, rank, len(CONTENT), zlib.crc32(CONTENT), tensors)


def chunks(content: bytes = CONTENT) -> list[memoryview]:
    return [memoryview(content[:5000]), memoryview(content[5000:])]


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path / "run")
    folder.write(share(), chunks())
    return folder


def test_a_written_share_is_found_again_and_sound(folder: NodeFolder):
    assert asdict(folder.share(8, 0) or share(0)) == asdict(share()) | {
        "tensors": {"model weight": ["float32", [2, 1280], 0]}
    }
    assert folder.problem(8, 0, "token") is None
    assert folder.data(8, 0).read_bytes() == CONTENT


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[77] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flipped, "has a wrong checksum"),
        (
            lambda path: path.write_bytes(CONTENT[:-1]),
            f"has {len(CONTENT) - 1} bytes instead of {len(CONTENT)}",
        ),
        (Path.unlink, "cannot be read: No such file or directory"),
        (lambda path: path.with_suffix(".json").unlink(), "its share is not in"),
        (lambda path: path.with_suffix(".json").write_text('{"version": 8'), "its share is not in"),
    ],
)
def test_damage_is_named(folder: NodeFolder, damage: Any, problem: str):
    damage(folder.data(8, 0))
    assert problem in (folder.problem(8, 0, "token") or "")


def test_the_share_of_another_checkpoint_with_the_same_number_does_not_count(folder: NodeFolder):
    assert "of another checkpoint" in (folder.problem(8, 0, "token of an earlier job") or "")


def test_bytes_that_the_disk_has_otherwise_than_they_were_given_do_not_count(tmp_path: Path):
    folder = NodeFolder(tmp_path / "run")
    wrong = bytes([1, *CONTENT[1:]])
    with pytest.raises(CheckpointError, match="was written and has a wrong checksum"):
        folder.write(share(), chunks(wrong))
    assert folder.share(8, 0) is None


def test_a_full_disk_is_told_and_leaves_nothing_that_counts(folder: NodeFolder):
    path = folder.data(9, 0)
    path.parent.mkdir()
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left on device; free space"):
        folder.write(share(version=9), chunks())
    assert folder.share(9, 0) is None and not draft.is_symlink()
    assert folder.problem(8, 0, "token") is None


def test_a_disk_that_is_missing_is_told(tmp_path: Path):
    with pytest.raises(CheckpointError, match="scratch is no folder on"):
        NodeFolder(tmp_path / "scratch" / "run").write(share(), chunks())
    assert not (tmp_path / "scratch").exists()


def test_other_versions_are_deleted_and_at_the_end_the_folder(folder: NodeFolder):
    folder.write(share(version=9), chunks())
    folder.keep({9, 10})
    assert [path.name for path in folder.path.iterdir()] == ["v00000009"]
    folder.keep(())
    assert not folder.path.exists()


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2, 2], [8, 8, 3], [1, 4]])
def test_every_share_has_its_copy_on_another_node(nodes: list[int]):
    places = [f"node {node}" for node, ranks in enumerate(nodes) for _ in range(ranks)]
    targets = next_nodes(places)
    assert all(target is not None and places[target] != places[rank] for rank, target in enumerate(targets))
    assert next_nodes(["one node"] * 3) == [None] * 3


def test_a_rank_takes_its_own_share_or_else_a_copy():
    assert sources([[0], [1, 0]]) == [0, 1]
    assert sources([[], [1, 0]]) == [1, 1]
    assert sources([[0], []]) is None


# ---- what the driver counts on


class Trainer:
    """Writes down which tokens it is given."""

    def __init__(self, problems: list[str] | None = None) -> None:
        self.kept: list[list[int]] = []
        self.problems = problems or []
        self.did_forget = False
        self.error: CheckpointError | None = None

    async def begin_checkpoint(self, folder: Path, tokens: dict[int, str] | None) -> None:
        self.kept.append([*tokens] if tokens else [])
        (folder / "weights").write_text("weights")

    async def checkpoint_written(self) -> None: ...

    async def finish_checkpoint(self) -> list[str]:
        if self.error:
            raise self.error
        return self.problems

    async def forget_on_nodes(self) -> None:
        self.did_forget = True


class History(NoHistory):
    """Remembers up to which version the ledger may forget what was trained."""

    released = 0

    def release(self, version: int) -> None:
        self.released = version


def checkpoints_of(
    trainer: Trainer,
    folder: Path,
    notes: list[str],
    *,
    on_nodes: bool = True,
    every: int = 1,
    history: NoHistory | None = None,
) -> Any:
    @asynccontextmanager
    async def turn():
        yield

    listener: Any = SimpleNamespace(
        checkpoint_taken=lambda stall_s: None,
        checkpoint_committed=lambda step, seconds: None,
        note=notes.append,
    )
    return TrainerCheckpoints(
        CheckpointConfig(every=every, keep_last=2),
        CheckpointFolder(folder, keep_last=2),
        trainer,  # type: ignore[arg-type]
        turn,
        history or NoHistory(),
        listener,
        on_nodes=on_nodes,
    )


async def steps(checkpoints: Any, versions: range) -> None:
    for version in versions:
        await checkpoints.step_done(
            SimpleNamespace(version=version, step=version, position=0, counts=GroupCounts())
        )
        await checkpoints.settled()


def test_nodes_keep_the_newest_versions_and_the_one_that_is_written(tmp_path: Path):
    trainer = Trainer()
    checkpoints = checkpoints_of(trainer, tmp_path, [])
    asyncio.run(steps(checkpoints, range(1, 5)))
    assert trainer.kept == [[1], [1, 2], [2, 3], [3, 4]]
    assert [*checkpoints.on_nodes()] == [4], "the run folder has the others' successor"
    checkpoints.forget_on_nodes()
    assert checkpoints.on_nodes() == {}


def test_nodes_keep_what_the_run_folder_could_not_take(tmp_path: Path):
    """The ledger can go back to it: what was trained since the run folder's newest checkpoint is kept."""
    trainer, history = Trainer(), History()
    checkpoints = checkpoints_of(trainer, tmp_path, [], history=history)
    asyncio.run(steps(checkpoints, range(1, 3)))
    trainer.error = CheckpointError("the run folder is full")
    asyncio.run(steps(checkpoints, range(3, 6)))
    assert trainer.kept[2:] == [[2, 3], [2, 3, 4], [3, 4, 5]]
    assert [*checkpoints.on_nodes()] == [3, 4, 5]
    assert history.released == 1, "trajectories trained into later versions are still there"
    checkpoints.restored(5)
    trainer.error = None
    asyncio.run(steps(checkpoints, range(6, 7)))
    assert [*checkpoints.on_nodes()] == [6] and history.released == 2


def test_a_version_that_only_nodes_have_is_soon_followed_by_a_checkpoint(tmp_path: Path):
    trainer = Trainer()
    checkpoints = checkpoints_of(trainer, tmp_path, [], every=4)
    asyncio.run(steps(checkpoints, range(4, 5)))
    trainer.error = CheckpointError("the run folder is full")
    asyncio.run(steps(checkpoints, range(8, 9)))
    trainer.error = None
    checkpoints.restored(8)
    asyncio.run(steps(checkpoints, range(9, 10)))
    assert CheckpointFolder(tmp_path, keep_last=2).versions() == [4, 9]


def test_what_fails_on_nodes_is_told_once_and_harms_no_checkpoint(tmp_path: Path):
    notes: list[str] = []
    trainer = Trainer(["rank 1: cannot write /scratch/x: No space left on device"])
    checkpoints = checkpoints_of(trainer, tmp_path, notes)
    asyncio.run(steps(checkpoints, range(1, 4)))
    [note] = notes
    assert note.startswith("checkpoint.local_dir: rank 1: cannot write /scratch/x: No space left on device")
    assert CheckpointFolder(tmp_path, keep_last=2).versions() == [2, 3]


def test_a_new_job_counts_on_the_run_folder_alone(tmp_path: Path):
    asyncio.run(steps(checkpoints_of(Trainer(), tmp_path, []), range(1, 3)))
    assert checkpoints_of(Trainer(), tmp_path, []).on_nodes() == {}


def test_without_the_setting_nodes_get_nothing(tmp_path: Path):
    trainer = Trainer()
    checkpoints = checkpoints_of(trainer, tmp_path, [], on_nodes=False)
    asyncio.run(steps(checkpoints, range(1, 3)))
    assert trainer.kept == [[], []] and checkpoints.on_nodes() == {}


def test_nodes_keep_nothing_after_a_run_that_ends_in_order(tmp_path: Path):
    trainer = Trainer()
    checkpoints = checkpoints_of(trainer, tmp_path, [])
    position = SimpleNamespace(version=1, step=1, position=0, counts=GroupCounts())
    asyncio.run(checkpoints.last(position))
    assert trainer.did_forget and checkpoints.on_nodes() == {}
