"""Ranks of a real Ray that hang in a step: one that is stopped, and its peer that waits for it."""

import asyncio
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from slipstream.backend.cluster.actors import create_ranks
from slipstream.backend.cluster.placement import place
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.ray_cluster import ray_cluster
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.configs.schema import RunConfig
from tests.unit.test_rollout_gpu_environment import VALID


class Rank:
    """Stands where a rank is, and never gets through a step."""

    def __init__(self, config: RunConfig, spec: object) -> None:
        """There is nothing to build."""

    def pid(self) -> int:
        return os.getpid()

    def train(self) -> None:
        _meets_its_peers()


def _meets_its_peers() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # in C, as a collective


@pytest.mark.timeout(600)
def test_a_rank_that_is_stopped_is_named_and_its_peer_shows_where_it_waits(tmp_path: Path):
    actor = {**VALID.get("actor", {}), "parallel": {"data": 2}}
    config = RunConfig.model_validate(
        {**VALID, "actor": actor, "cluster": {"type": "local", "device": "cpu"}}
    )

    async def hang(group: RankGroup) -> None:
        await group.connect()
        _, second = await group.call("asking for the processes", "pid")
        assert isinstance(second, int)
        os.kill(second, signal.SIGSTOP)
        await group.call("the training step from version 3", "train", timeout_s=8)

    with ray_cluster(config, batch_bytes=1, note=print) as nodes:
        make = partial(create_ranks, config, place(nodes, config), tmp_path, rank_class=f"{__name__}.Rank")
        group = RankGroup(make, timeout_s=500, logs=tmp_path)
        try:
            with pytest.raises(TrainerFailed, match=r"ranks 0, 1 have not answered since \d\d:") as found:
                asyncio.run(hang(group))
        finally:
            group.kill()
    assert "; rank 1 is stopped by a signal (stacks of all ranks: " in str(found.value)
    assert "rank 0 " not in str(found.value)
    assert "in _meets_its_peers" in (tmp_path / "stacks/trainer-0.txt").read_text()
    assert "in hang" in (tmp_path / "stacks/driver.txt").read_text()
