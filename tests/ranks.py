"""``slipstream.backend.cluster.local_ranks`` with the patience of a test, and many jobs in one start."""

import multiprocessing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import Any, TypeVar

from slipstream.backend.cluster import local_ranks as ranks
from slipstream.backend.megatron.parallel import RankSpec
from tests.ports import held_port

PRELOADED = ("slipstream.backend.trainer.preload", "tests.preload")
"""What ranks share with the process that they are forked from."""

Key = TypeVar("Key", bound=Hashable)


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180, fresh: bool = False
) -> list[Any]:
    if not fresh:
        # The first start of the process that ranks are forked from decides what it imports.
        multiprocessing.set_forkserver_preload([*PRELOADED])
        forkserver.ensure_running()
    return ranks.run_ranks(world_size, function, *args, timeout_s=timeout_s, fresh=fresh)


@dataclass(frozen=True)
class Job:
    """``function(RankSpec, *args)`` on each of ``ranks`` ranks, whose process groups are then destroyed."""

    ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


def run_jobs(jobs: Mapping[Key, Job], *, timeout_s: float = 280, fresh: bool = False) -> dict[Key, list[Any]]:
    """Run every job in processes that start once; return the results of each job in rank order.

    Jobs of all ranks come first, in their order. Then the processes share the jobs of a single rank, which
    run side by side: a rank keeps one core busy.
    """
    world_size = max(min(2, len(jobs)), *(job.ranks for job in jobs.values()))
    work = [(held_port(), job) for job in jobs.values()]
    by_process = run_ranks(world_size, _work, work, timeout_s=timeout_s, fresh=fresh)
    return {
        key: [results[number] for results in by_process if number in results]
        for number, key in enumerate(jobs)
    }


def _work(rank: RankSpec, work: list[tuple[int, Job]]) -> dict[int, Any]:
    """Return this process's results by the number of the job."""
    results = {}
    together = [number for number, (_, job) in enumerate(work) if job.ranks == rank.world_size > 1]
    alone = [number for number, (_, job) in enumerate(work) if job.ranks == 1]
    assert len(together) + len(alone) == len(work)
    for number in [*together, *alone[rank.rank :: rank.world_size]]:
        port, job = work[number]
        here = replace(rank, port=port) if job.ranks > 1 else replace(rank, rank=0, world_size=1, port=port)
        results[number] = job.function(here, *job.args)
        _destroy_groups()
    return results


def _destroy_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        from slipstream.backend.megatron.parallel import leave

        leave()
