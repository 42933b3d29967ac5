"""A real SGLang server that loses one of its processes."""

import asyncio
import os
import signal
from pathlib import Path

from slipstream.configs.schema import SamplingConfig
from slipstream.rollout.engine.growing import GrowingCompletion
from slipstream.rollout.engine.leftovers import members
from tests.runs.engines.conftest import serve

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
