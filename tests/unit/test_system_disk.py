"""A file system that is full, fails or goes stale: what is said, and what becomes of lines and metrics."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.backend.commands.run import _described
from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.trace_log import TraceLog
from slipstream.rollout.ledger.storage.database import explained
from slipstream.rollout.system import lines
from slipstream.rollout.system.disk import describe
from slipstream.rollout.system.lines import LineFile

REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "quota",
    errno.EIO: "dmesg",
    errno.ESTALE: "mount it again",
    errno.EROFS: "remount it",
}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse what would make a file of this process larger, after it has written a part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("number", REMEDIES)
def test_every_error_of_the_disk_comes_with_a_remedy_wherever_it_ends_a_run(number: int):
    error = OSError(number, os.strerror(number), "/runs/a/file")
    assert REMEDIES[number] in describe(error)
    assert "/runs/a/file" in describe(error)
    assert _described(error) == describe(error)
    said = str(explained(Path("/runs/a/ledger.sqlite"), error))
    assert REMEDIES[number] in said
    assert "--resume" in said


@pytest.mark.parametrize("number", REMEDIES)
def test_lines_wait_for_a_disk_that_takes_none_and_stay_whole(tmp_path: Path, monkeypatch, number: int):
    notes: list[str] = []
    path, write = tmp_path / "lines", os.write
    file = LineFile(path, notes.append)
    file.add(b"first")
    assert file.flush()

    def half(descriptor: int, data: bytes) -> int:
        if len(data) > 8:
            return write(descriptor, bytes(data[:3]))  # the disk takes a part of a line, and then no more
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", half)
    for line in (b"second", b"third"):
        file.add(line)
        assert not file.flush()
    monkeypatch.undo()
    file.add(b"fourth")
    assert file.flush()
    file.close()
    assert path.read_text().splitlines() == ["first", "second", "third", "fourth"]
    told, again = notes
    assert told.startswith("lines waits in memory, and the run goes on without it: ")
    assert REMEDIES[number] in told
    assert again == "lines is written again; 0 lines are missing in it"


def test_lines_that_memory_cannot_hold_are_counted(tmp_path: Path, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(lines, "MOST_WAITING", 10)
    file = LineFile(tmp_path / "lines", notes.append)
    with largest_file(0):
        for _ in range(3):
            file.add(b"1234")
            assert not file.flush()
    assert file.flush()
    assert (tmp_path / "lines").read_text() == "1234\n1234\n"
    assert notes[-1] == "lines is written again; 1 lines are missing in it"


def test_metrics_of_a_full_disk_are_written_when_there_is_room_again(tmp_path: Path):
    notes: list[str] = []
    path = tmp_path / "metrics.jsonl"
    filler = json.dumps({"step": 0, "filler": "x" * (1 << 20)}) + "\n"
    path.write_text(filler)
    log = MetricsLog(tmp_path, note=notes.append)
    log.log(1, {"reward/mean": 1.0})
    with largest_file(path.stat().st_size + 10):
        for step in (2, 3):
            log.log(step, {"reward/mean": float(step)})
    assert path.read_bytes()[-1:] != b"\n", "half a line is there meanwhile"
    log.log(4, {"reward/mean": 4.0})
    log.close()
    found = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert len(notes) == 2
    assert "ulimit -f" in notes[0]
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [event.step for event in shown] == [1, 4]


def test_tensorboard_gets_another_file_after_half_an_event(tmp_path: Path, monkeypatch):
    log = MetricsLog(tmp_path, note=lambda _: None)
    log.log(1, {"reward/mean": 1.0})
    assert log._events is not None
    monkeypatch.setattr(log._events, "flush", lambda: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
    log.log(2, {"reward/mean": 2.0})
    log.log(3, {"reward/mean": 3.0})
    log.close()
    assert len(list(tmp_path.glob("events.out.*"))) == 2
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3]


def test_a_full_disk_costs_a_collector_its_trace_and_nothing_else(tmp_path: Path):
    notes: list[str] = []
    times = iter(range(10))
    trace = TraceLog(tmp_path, "collector-0", clock=lambda: next(times), note=notes.append)
    with largest_file(0):
        trace.write("request", tokens=1)
        trace.write("request", tokens=2)
    trace.write("request", tokens=3)
    trace.close()
    found = [json.loads(line)["tokens"] for line in (tmp_path / "trace-collector-0.jsonl").open()]
    assert found == [1, 2, 3]
    assert len(notes) == 2
