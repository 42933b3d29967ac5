"""How a run that a user watches ends: what is printed, and what its driver.log keeps."""

import os
from pathlib import Path

import pytest

from slipstream.backend.commands.outcome import Failed, NotYet, WasStopped
from slipstream.backend.commands.run import attended
from slipstream.backend.driver.loops.stop import JobEnds, Stopped
from slipstream.backend.driver.start import job
from slipstream.backend.driver.start.job import STARTS, note_end, note_progress, notes_written
from slipstream.backend.monitor.summary import RunSummary, write_summary
from tests.unit.test_driver_run_folder import recipe
from tests.unit.test_monitor_summary import FIELDS

WAIT_S = 60.0


@pytest.fixture
def config(tmp_path):
    config = recipe(tmp_path)
    config.run.folder.mkdir(parents=True)
    return config


def test_a_stopped_run_prints_its_summary_and_keeps_it_in_its_log(config, capsys):
    async def start(progress):
        progress.phase("training")
        progress.keep_in(config.run.folder)
        write_summary(config.run.folder, RunSummary(**FIELDS | {"exit": "stopped"}))
        raise Stopped

    with pytest.raises(Failed, match="--resume goes on with it"):
        attended(config, start)
    assert "stopped after 100 steps" in capsys.readouterr().out
    log = (config.run.folder / "driver.log").read_text()
    assert "training" in log and "stopped after 100 steps" in log


def test_a_summary_of_an_earlier_start_is_not_that_of_one_that_stopped_at_once(config, capsys):
    path = write_summary(config.run.folder, RunSummary(**FIELDS))
    os.utime(path, (1, 1))

    async def start(progress):
        raise Stopped

    with pytest.raises(Failed):
        attended(config, start)
    assert capsys.readouterr().out == ""


def test_what_made_a_run_fail_is_the_end_of_its_log(config):
    async def start(progress):
        progress.keep_in(config.run.folder)
        raise RuntimeError("no engine came up")

    with pytest.raises(Failed, match="no engine came up"):
        attended(config, start)
    assert (
        (config.run.folder / "driver.log").read_text().endswith("failed: RuntimeError: no engine came up\n")
    )


def test_a_start_that_is_refused_writes_nothing_into_the_folder(config):
    async def start(progress):
        progress.phase("reading model and prompts")
        raise RuntimeError("refused")

    with pytest.raises(Failed):
        attended(config, start)
    assert list(config.run.folder.iterdir()) == []
    log = config.run.folder / "driver.log"
    log.write_text("of an earlier start")
    os.utime(log, (1, 1))
    with pytest.raises(Failed):
        attended(config, start)
    assert log.read_text() == "of an earlier start"


@pytest.mark.parametrize(
    ("error", "outcome", "code", "cause"),
    [
        (Stopped(), WasStopped, 3, "stopped by a signal"),
        (JobEnds(), NotYet, 75, "the time limit was near"),
        (RuntimeError("no engine\ncame up"), Failed, 1, "failed: RuntimeError: no engine came up"),
    ],
)
def test_the_job_of_a_run_hears_how_it_has_ended(config, tmp_path, monkeypatch, error, outcome, code, cause):
    starts = tmp_path / "starts.log"
    starts.write_text("T start on node1\n")
    monkeypatch.setenv(STARTS, str(starts))

    async def start(progress):
        raise error

    with pytest.raises(Failed) as ended:
        attended(config, start)
    assert (type(ended.value), ended.value.exit_code) == (outcome, code)
    first, last = starts.read_text().splitlines()
    assert (first, last.partition(" ")[2]) == ("T start on node1", f"end: {cause}")
    note_progress({STARTS: str(starts)}, 7)
    assert notes_written(WAIT_S)
    assert [line.partition(" ")[2] for line in starts.read_text().splitlines()] == ["checkpoint of step 7"]


def test_progress_that_a_stalled_disk_holds_up_does_not_replace_the_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(job, "NOTES_S", 0.01)
    starts = tmp_path / "starts.log"
    os.mkfifo(starts)  # a disk that takes nothing until somebody reads
    variables = {STARTS: str(starts)}
    note_progress(variables, 7)
    note_progress(variables, 8)
    note_end(variables, "stopped by a signal")
    assert not notes_written(0.01)
    descriptor = os.open(starts, os.O_RDWR)  # the disk goes on
    with open(descriptor, encoding="utf-8") as reader:
        notes = [reader.readline().partition(" ")[2] for _ in range(3)]
    assert notes == ["checkpoint of step 7\n", "checkpoint of step 8\n", "end: stopped by a signal\n"]
    assert notes_written(WAIT_S)
