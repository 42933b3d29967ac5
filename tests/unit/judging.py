"""Judge pools for tests: rewards of judge_rewards.py, short time limits, and a check that nothing is left."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from slipstream.backend.cluster.guard import VARIABLE, carriers
from slipstream.configs.schema import JudgingConfig, PluginConfig
from slipstream.rollout.reward.judge.judge_pool import JudgePool, JudgeStatus
from slipstream.rollout.tokens.trajectory import UNSAMPLED, Finish, Prompt, Trajectory

TIMEOUT_S = 60.0
"""Time limit of a question."""
HANGS_S = 3.0
"""Time limit where a question never ends. Others in its pool, which take milliseconds, have to keep it."""


def trajectory(length: int = 12) -> Trajectory:
    trained_T = np.arange(length) >= 4
    return Trajectory(
        np.arange(length) + 100,
        trained_T,
        np.where(trained_T, -0.5, 0).astype(np.float32),
        np.where(trained_T, 3, UNSAMPLED).astype(np.int32),
        Finish.STOP,
        retractions=2,
    )


class Judging:
    """Asks judge pools whose processes, folders and logs are looked at afterwards."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mark = uuid4().hex
        self.logs = folder / "logs"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        monkeypatch.setenv(VARIABLE, self.mark)
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self.status: JudgeStatus | None = None
        """State of the last pool before it was closed."""

    def pool(self, reward: str = "Plain", args: dict[str, Any] | None = None, **settings: Any) -> JudgePool:
        return self.pool_of(f"tests.unit.judge_rewards.{reward}", args, **settings)

    def pool_of(self, path: str, args: dict[str, Any] | None = None, **settings: Any) -> JudgePool:
        plugin = PluginConfig(path=path, args=args or {})
        defaults: dict[str, Any] = {"timeout_s": TIMEOUT_S, "retry_after_s": 0.01, "attempts": 1}
        return JudgePool(JudgingConfig(**{**defaults, **settings}), plugin, self.logs, "test")

    def ask(
        self,
        responses: Sequence[str],
        reward: str = "Plain",
        args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> list[float | BaseException]:
        """Ask all questions at once. Return the reward or the error of each."""

        async def gather(pool: JudgePool) -> list[float | BaseException]:
            answers = await asyncio.gather(
                *(score(pool, number, response) for number, response in enumerate(responses)),
                return_exceptions=True,
            )
            return answers

        return self.use(self.pool(reward, args, **settings), gather)

    def use(self, pool: JudgePool, work: Callable[[JudgePool], Awaitable[Any]]) -> Any:
        """Return what ``work`` returns for an open pool. Then nothing of the pool is left."""

        async def run() -> Any:
            try:
                async with asyncio.timeout(240):
                    async with pool:
                        try:
                            return await work(pool)
                        finally:
                            self.status = pool.status()
            finally:
                self.assert_nothing_is_left()

        return asyncio.run(run())

    def assert_nothing_is_left(self) -> None:
        assert carriers(self.mark, self.logs, {os.getpid()}) == []
        assert not [command for command in _commands() if str(int(self.mark[:8], 16)) in command]
        assert list(self.temporary.iterdir()) == []


def _commands() -> list[str]:
    commands: list[str] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # processes come and go
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
    return commands


async def score(pool: JudgePool, number: int, response: str) -> float:
    return (await pool.score(Prompt(number, "2+2?"), response, trajectory())).reward
