"""Two ranks, each with a folder that stands for the disk of its node, through kill -9, a lost disk, damage.
Ranks that are started again have bit for bit what was saved."""

import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from slipstream.backend.checkpoint.node_folder import NodeFolder, Share, node_folder
from slipstream.backend.cluster.local_ranks import RankFailed
from slipstream.backend.megatron.export_plan import export_plan
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.memory.verdict import share_bytes
from slipstream.bridge.families import model_spec
from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.configs.schema import RunConfig
from tests.integration.test_trainer_checkpoint import Case, draw, own_weights, train, trainer_of
from tests.models import make_checkpoint
from tests.ranks import run_ranks

REST = "rest"
TOKENS = {version: f"token {version}" for version in (1, 2, 3)}


@dataclass(frozen=True)
class Disks:
    root: Path

    def node(self, rank: int) -> Path:
        return self.root / f"node{rank}"

    def shared(self, version: int) -> Path:
        return self.root / "shared" / f"v{version}"

    def line(self, rank: int) -> Path:
        return self.root / f"line-{rank}"

    def config(self, config: RunConfig, rank: int) -> RunConfig:
        """Return the recipe of a rank, whose node has a disk of its own."""
        local = config.checkpoint.model_copy(update={"local_dir": self.node(rank)})
        return config.model_copy(update={"checkpoint": local})

    def folder(self, config: RunConfig, rank: int) -> NodeFolder:
        folder = node_folder(self.config(config, rank))
        assert folder
        return folder


def save(trainer: Any, disks: Disks, version: int) -> list[str]:
    kept = {number: TOKENS.get(number, "token") for number in range(1, version + 1)}
    trainer.begin_checkpoint(disks.shared(version), kept)
    return trainer.finish_checkpoint()


def killed_while_it_writes(rank: RankSpec, config: RunConfig, disks: Disks) -> None:
    """Save versions 1 and 2, train on, and kill rank 1 while it writes its share of version 3."""
    write = NodeFolder.write

    def write_or_die(folder: NodeFolder, share: Share, chunks: Any) -> None:
        if share.version == 3 and rank.rank == share.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, share, chunks)

    with trainer_of(rank, disks.config(config, rank.rank)) as trainer:
        for version in (1, 2):
            train(trainer, 1)
            assert save(trainer, disks, version) == []
        saved = own_weights(trainer), draw(), train(trainer, 1)
        disks.line(rank.rank).write_bytes(pickle.dumps(saved))
        with patch.object(NodeFolder, "write", write_or_die):
            save(trainer, disks, 3)


def restored(rank: RankSpec, config: RunConfig, disks: Disks) -> dict[str, Any]:
    """Restore new ranks after each of several mishaps."""
    import torch.distributed as dist

    folders = [disks.folder(config, node) for node in (0, 1)]
    found: dict[str, Any] = {}

    def after(mishap: Callable[[], object]) -> tuple[int | None, Any, Any]:
        dist.barrier()
        if rank.rank == 0:
            mishap()
        dist.barrier()
        version, notes = trainer.restore_from_nodes(TOKENS)
        return version, notes, own_weights(trainer)

    def damage(node: int, share: int) -> None:
        path = folders[node].data(2, share)
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)

    def damage_both() -> None:
        damage(0, 1)
        damage(1, 1)

    def lose_all() -> None:
        for node in (0, 1):
            shutil.rmtree(folders[node].path)
        disks.node(1).rmdir()

    with trainer_of(rank, disks.config(config, rank.rank)) as trainer:
        found["killed"] = after(lambda: None)
        found["next step"] = draw(), train(trainer, 1)
        found["damaged"] = after(lambda: damage(0, 0))
        found["share"] = folders[rank.rank].share(2, rank.rank)
        found["mended"] = folders[0].problem(2, 0, TOKENS[2])
        found["lost"] = after(lambda: shutil.rmtree(folders[1].path))
        found["both damaged"] = after(damage_both)
        found["step"] = trainer.step
        before = own_weights(trainer)
        found["all lost"] = *after(lose_all), before
        found["problems"] = save(trainer, disks, 4)
        found["from the run folder"] = trainer.restore(disks.shared(4))
    return found


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Disks:
    disks = Disks(tmp_path_factory.mktemp("disks"))
    for version in (1, 2, 3, 4):
        disks.shared(version).mkdir(parents=True)
    for rank in (0, 1):
        disks.node(rank).mkdir()
    return disks


@pytest.fixture(scope="module")
def config(disks: Disks) -> RunConfig:
    make_checkpoint(disks.root / "tied", tied=True, num_hidden_layers=2)
    return Case({"data": 2}, dtype="bfloat16", distributed=True, others=True).config(disks.root)


@pytest.fixture(scope="module")
def found(disks: Disks, config: RunConfig) -> list[dict[str, Any]]:
    with pytest.raises(RankFailed):
        run_ranks(2, killed_while_it_writes, config, disks)
    return run_ranks(2, restored, config, disks)


@pytest.fixture
def lines(disks: Disks, found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [pickle.loads(disks.line(rank).read_bytes()) for rank in (0, 1)]


def assert_equal(weights: dict[str, np.ndarray], saved: dict[str, np.ndarray]) -> None:
    assert weights.keys() == saved.keys()
    for name, value in saved.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_after_kill_9_the_newest_whole_version_goes_on_bit_for_bit(found, lines):
    for rank, (weights, drawn, metrics) in zip(found, lines, strict=True):
        version, notes, restored_weights = rank["killed"]
        assert version == 2
        assert (
            "version 3 on the disks of the trainer's nodes is passed over: rank 1: its share is not"
            in notes[0]
        )
        assert_equal(restored_weights, weights)
        assert rank["next step"] == (drawn, metrics)


@pytest.mark.parametrize("mishap", ["damaged", "lost"])
def test_a_damaged_share_and_a_lost_disk_are_made_up_for_by_the_next_nodes_copy(found, lines, mishap: str):
    for rank, (weights, *_) in zip(found, lines, strict=True):
        version, _, restored_weights = rank[mishap]
        assert version == 2
        assert_equal(restored_weights, weights)
        assert rank["mended"] is None


def test_a_share_has_the_bytes_that_the_plan_states(found, config: RunConfig):
    """The plan counts the padding of Megatron's buffers, and the rank that holds most."""
    plan = export_plan(config.actor, "bfloat16", config.weights.transport, model_spec(config.model.path))
    stated = share_bytes(config.actor, config.critic, "bfloat16", plan)
    shares = [rank["share"].tensors for rank in found]
    written = [
        sum(prod(shape) * ITEMSIZE[dtype] for name, (dtype, shape, _) in tensors.items() if name != REST)
        for tensors in shares
    ]
    assert max(written) <= stated
    assert stated == pytest.approx(max(written), rel=0.1)


def test_without_a_sound_copy_an_older_version_is_taken(found):
    for rank in found:
        version, notes, _ = rank["both damaged"]
        assert version == rank["step"] == 1
        assert "version 2" in notes[1] and "rank 1: " in notes[1] and "has a wrong checksum" in notes[1]


def test_without_any_version_nothing_is_changed(found):
    for rank in found:
        version, notes, weights, before = rank["all lost"]
        assert version is None and len(notes) == 3
        assert_equal(weights, before)


def test_a_disk_that_is_missing_harms_no_checkpoint_of_the_run_folder(found):
    first, second = found
    assert first["problems"] == []
    assert len(second["problems"]) == 2, "its own share, and the copy of the other one"
    assert all("node1 is no folder on" in problem for problem in second["problems"])
    assert first["from the run folder"] == second["from the run folder"] == 1
