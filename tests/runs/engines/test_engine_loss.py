"""A real SGLang server that loses one of its processes."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.client import EngineClient
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.leftovers import members, shared_memory_of
from slipstream.rollout.engine.server_process import ServerProcess
from slipstream.rollout.engine.supervisor import unwell
from tests.runs.engines.conftest import Server, serve, spec_of

SGLANGS_DIAGNOSIS_S = 66


def test_a_server_that_has_served_ends_without_a_diagnosis_when_its_detokenizer_is_killed(
    checkpoint: Path, tmp_path: Path
):
    with serve(checkpoint, tmp_path / "engine.log") as server:
        completion = GrowingCompletion()
        server.ask(
            lambda client: client.generate([1, 2, 3], SamplingConfig(max_new_tokens=4), completion, version=0)
        )
        [detokenizer] = [
            pid
            for pid in members(server.process.pid)
            if b"sglang::detokenizer" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(detokenizer, signal.SIGKILL)

        async def exit_code() -> int:
            return await asyncio.wait_for(server.process.wait_exit(), SGLANGS_DIAGNOSIS_S / 2)

        assert asyncio.run(exit_code()) != 0


def test_a_scheduler_that_is_stopped_behind_a_server_that_is_well_is_noticed_and_named(server: Server):
    [scheduler] = [
        pid
        for pid in members(server.process.pid)
        if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]

    async def noticed() -> str:
        async with EngineClient(replace(server.address, timeout_s=2.0)) as client:
            return await asyncio.wait_for(unwell(client), 120)

    assert server.process.write_stacks() == []
    os.kill(scheduler, signal.SIGSTOP)
    try:
        assert asyncio.run(noticed()).startswith("its schedulers have not answered for 2 s, since ")
        [silent] = server.process.write_stacks()
    finally:
        os.kill(scheduler, signal.SIGCONT)
    assert silent == f"sglang::scheduler (process {scheduler}) is stopped by a signal"
    stacks = server.process.stacks.read_text()
    assert "sglang::detokenizer (process" in stacks
    assert "in event_loop" in stacks, "where a scheduler stands"
    assert server.ask(lambda client: client.healthy()) == [True]


@pytest.mark.slow
def test_a_server_whose_scheduler_is_killed_while_it_starts_leaves_no_shared_memory(
    checkpoint: Path, tmp_path: Path
):
    process = ServerProcess(spec_of(checkpoint), tmp_path / "engine.log")
    try:
        deadline = time.monotonic() + 120
        mapped: dict[int, set[Path]] = {}
        while not any(mapped.values()):
            assert time.monotonic() < deadline, process._tail()
            mapped = {pid: files_of_loads(pid) for pid in members(process.pid)}
        for pid in mapped:
            if mapped[pid]:
                os.kill(pid, signal.SIGKILL)
        [file] = set.union(*mapped.values())

        async def ended() -> None:
            await asyncio.wait_for(process.wait_exit(), 60)

        asyncio.run(ended())
        assert file.exists(), "nobody else removes it"
    finally:
        process.stop()
    assert not file.exists()


def files_of_loads(pid: int) -> set[Path]:
    """Return the shared memory in which a scheduler publishes its load."""
    return {path for path in shared_memory_of([pid]) if path.name.startswith("sglang_loads_")}
