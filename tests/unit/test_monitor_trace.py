"""The trace of a run, whole again after a kill."""

import json
from pathlib import Path

import pytest

from slipstream.backend.monitor.trace_log import TraceLog


@pytest.mark.parametrize("left", ["", '{"kind": "st', '{"kind": "step", "version": 1}'])
def test_a_resumed_run_does_not_write_behind_half_a_line(tmp_path: Path, left: str):
    first = TraceLog(tmp_path)
    first.write("step", version=0, end_s=0.123456789)
    first.close()
    with (tmp_path / "trace.jsonl").open("a") as file:
        file.write(left)
    second = TraceLog(tmp_path)
    second.write("step", version=2, end_s=1.0)
    second.close()
    records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert records == [
        {"kind": "step", "version": 0, "end_s": 0.123457},
        {"kind": "step", "version": 2, "end_s": 1.0},
    ]
