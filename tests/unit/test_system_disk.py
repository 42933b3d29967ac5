"""A file system that is full, fails or goes stale: what is said, and what becomes of lines and metrics."""

import asyncio
import errno
import io
import json
import os
import queue
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.backend.commands.run import _described
from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.progress import PlainProgress
from slipstream.backend.monitor.trace_log import TraceLog
from slipstream.rollout.control.core import Ticket
from slipstream.rollout.ledger.storage.database import explained
from slipstream.rollout.ledger.writing.writer import Ledger
from slipstream.rollout.system import disk, lines
from slipstream.rollout.system.disk import describe, telling_of_stalls, waits_for_disk
from slipstream.rollout.system.lines import LineFile
from slipstream.rollout.system.log_thread import PipedLog
from tests.unit.test_ledger import in_ledger, nothing

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


@contextmanager
def stalling(monkeypatch, *calls: str) -> Iterator[threading.Event]:
    """Let calls of ``os`` come back only after the event, as those to a file system that stalls."""
    answers = threading.Event()
    for name in calls:
        given = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, given=given: (answers.wait(60), given(*args))[1])
    try:
        yield answers
    finally:
        answers.set()
        monkeypatch.undo()


def test_who_waits_for_a_disk_that_stalls_is_said_and_when_it_answers_again(monkeypatch):
    notes: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(disk, "LOOK_S", 0.01)
    monkeypatch.setattr(disk, "STALL_S", 0.05)
    with telling_of_stalls(notes.put, "Training waits"):
        with waits_for_disk("ledger.sqlite"):
            with waits_for_disk("driver.json"):
                told = notes.get(timeout=60)
                time.sleep(0.1)
            assert notes.empty(), "it is said once"
        again = notes.get(timeout=60)
    assert re.search(r"the disk does not answer: .*ledger\.sqlite waits since \d\d:\d\d:\d\d", told)
    assert told.endswith(". Training waits")
    assert again.startswith("the disk answers again, after ")


def test_nothing_that_logs_waits_for_a_disk_that_stalls_and_nothing_is_lost(tmp_path: Path, monkeypatch):
    metrics = MetricsLog(tmp_path)
    trace = TraceLog(tmp_path, clock=iter(range(10)).__next__)
    progress = PlainProgress(1, io.StringIO(), clock=lambda: 0.0)
    progress.keep_in(tmp_path)
    with stalling(monkeypatch, "write") as answers:
        metrics.log(1, {"reward/mean": 1.0})
        trace.write("request", tokens=1)
        progress.note("it goes on")
        assert not answers.is_set() and (tmp_path / "metrics.jsonl").read_bytes() == b""
    for each in (metrics, trace, progress):
        each.close()
    assert '"reward/mean": 1.0' in (tmp_path / "metrics.jsonl").read_text()
    assert '"tokens":1' in (tmp_path / "trace.jsonl").read_text()
    assert "it goes on" in (tmp_path / "driver.log").read_text()


@pytest.mark.parametrize("fault", ["stalls", "is full"])
def test_a_process_whose_log_finds_no_disk_is_neither_held_up_nor_ended(tmp_path: Path, monkeypatch, fault):
    notes: list[str] = []
    log = PipedLog(tmp_path / "engine.log", notes.append)
    with stalling(monkeypatch, "write") if fault == "stalls" else largest_file(0):
        program = "print(*['x' * 99] * 10_000, 'the end', sep='\\n', end='')"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=log.descriptor)
        log.begins()
        assert process.wait(60) == 0, "a pipe alone would hold it up at 64 KiB"
        if fault == "is full":
            log.flush(60, ended=False)
    log.flush(60, ended=True)
    log.flush(60, ended=True)
    if fault == "stalls":
        assert (tmp_path / "engine.log").read_text() == ("x" * 99 + "\n") * 10_000 + "the end\n"
    else:
        assert notes and "ulimit -f" in notes[0]


def test_a_ledger_that_stalls_keeps_those_waiting_who_ask_for_the_disk_and_nobody_else(tmp_path, monkeypatch):
    async def main(ledger: Ledger) -> None:
        with stalling(monkeypatch, "fdatasync") as answers:
            ledger.append(b"tokens")
            ledger.admitted(Ticket(0, 0), 0)
            flushed = asyncio.ensure_future(ledger.flushed())
            while not any(what == "ledger.sqlite" for what, *_ in disk._waiting.values()):
                await asyncio.sleep(0.001)
            ledger.admitted(Ticket(1, 0), 1)
            assert not flushed.done()
            answers.set()
            await flushed
            await ledger.flushed()

    in_ledger(tmp_path, main)
    assert len(in_ledger(tmp_path, nothing).open) == 2


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
    assert log.flush()
    with largest_file(path.stat().st_size + 10):
        for step in (2, 3):
            log.log(step, {"reward/mean": float(step)})
        assert log.flush()
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
    assert log.flush() and log._events is not None
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
        assert trace.flush()
    trace.write("request", tokens=3)
    trace.close()
    found = [json.loads(line)["tokens"] for line in (tmp_path / "trace-collector-0.jsonl").open()]
    assert found == [1, 2, 3]
    assert len(notes) == 2
