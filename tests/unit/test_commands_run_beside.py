"""A run is started from inside of an event loop, as the cells of a notebook do it."""

import asyncio
import threading
from typing import Any

import pytest

from slipstream.backend.commands import run as run_command
from slipstream.backend.commands.outcome import Failed
from slipstream.configs.schema import RunConfig
from tests.unit.test_rollout_gpu_environment import VALID


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig.model_validate({**VALID, "run": {"name": "run", "root": str(tmp_path), "steps": 1}})


def from_a_cell(config: RunConfig, start: Any) -> Any:
    async def cell() -> Any:
        return run_command.attended(config, start)

    return asyncio.run(cell())


def test_the_result_comes_from_another_thread(config):
    async def start(progress: Any) -> threading.Thread:
        return threading.current_thread()

    assert from_a_cell(config, start) is not threading.main_thread()


def test_errors_are_those_of_any_other_run(config):
    async def start(progress: Any) -> None:
        raise ValueError("a bad batch")

    with pytest.raises(Failed, match="failed: ValueError: a bad batch"):
        from_a_cell(config, start)


def test_ctrl_c_ends_the_run_before_it_is_raised(config, monkeypatch):
    ended = threading.Event()

    async def start(progress: Any) -> None:
        threading.Timer(0.2, lambda: waits.set()).start()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    waits = threading.Event()

    def interrupted(future: Any, timeout: float | None = None) -> None:
        waits.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)

    async def cell() -> None:
        run_command.attended(config, start)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert ended.is_set()
