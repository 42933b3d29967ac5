"""A call to all ranks that fails: which rank is named, and what is shown of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from slipstream.backend.cluster import rank_group
from slipstream.backend.cluster.rank_group import RankGroup
from slipstream.backend.cluster.trainer_failed import TrainerFailed
from slipstream.backend.simulate import clock
from slipstream.rollout.system.plugins import PluginFailed

GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:12345")
NCCL = RuntimeError("NCCL error: remote process exited or there was a network error")


def raised(cause: Exception) -> Exception:
    """The error of a rank as Ray raises it in the driver."""
    text = f'Traceback (most recent call last):\n  File "/objective.py", line 3, in loss\n{cause!r}'
    return RayTaskError("call", text, cause, proctitle="ray::TrainerActor.call", pid=7, ip="127.0.0.1")


class Rank:
    def __init__(self, after_s: float | None, error: Exception | None) -> None:
        """``after_s``: None: it never answers."""

        async def answer() -> None:
            await asyncio.sleep(60.0 if after_s is None else after_s)
            if error is not None:
                raise error

        self.call: Any = type(
            "Method", (), {"remote": staticmethod(lambda *_: asyncio.ensure_future(answer()))}
        )


def failure(*ranks: tuple[float | None, Exception | None]) -> Exception:
    async def main() -> None:
        group: Any = RankGroup(lambda: [Rank(*rank) for rank in ranks], timeout_s=5, logs=Path("logs"))  # type: ignore[list-item]
        await group.call("the training step from version 3", "train")

    with pytest.raises((TrainerFailed, PluginFailed)) as caught:
        clock.run(main())
    return caught.value


@pytest.mark.parametrize("consequence", [GLOO, NCCL], ids=["gloo", "nccl"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_at_fault_is_named_though_the_others_lose_it_first(rank: int, consequence: Exception):
    ranks: list[tuple[float | None, Exception | None]] = [(0.0, raised(consequence))] * 3
    ranks[rank] = (0.05, raised(ValueError("no loss")))
    error = failure(*ranks)
    assert isinstance(error, TrainerFailed)
    assert str(error) == (
        f"the training step from version 3 failed on rank {rank}: ValueError: no loss "
        f"(log: logs/trainer-{rank}.log)"
    )
    assert error.traceback.startswith('Traceback (most recent call last):\n  File "/objective.py"')
    assert "\x1b" not in error.traceback and "ray::" not in error.traceback


def test_a_rank_whose_process_is_gone_is_named_rather_than_one_that_has_lost_it():
    error = failure((0.0, raised(GLOO)), (0.05, ActorDiedError()))
    assert "the process of trainer rank 1 ended during the training step" in str(error)


def test_nobody_waits_for_ranks_that_hang_in_a_collective_when_the_fault_is_known():
    error = failure((None, None), (0.0, raised(KeyError("a"))))
    assert "failed on rank 1: KeyError" in str(error)


def test_a_lost_connection_is_the_failure_when_nothing_else_turns_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_group, "FAULT_S", 0.05)
    assert "failed on rank 1: RuntimeError: [/gloo" in str(failure((None, None), (0.0, raised(GLOO))))


def test_a_fault_of_the_users_code_is_raised_as_it_is():
    error = failure((0.0, raised(GLOO)), (0.05, raised(PluginFailed("actor.objective: no loss"))))
    assert isinstance(error, PluginFailed)
