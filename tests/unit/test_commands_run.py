"""How a run that a user watches ends: what is printed, and what its driver.log keeps."""

import os

import pytest

from slipstream.backend.commands.outcome import Failed
from slipstream.backend.commands.run import attended
from slipstream.backend.driver.loops.stop import Stopped
from slipstream.backend.monitor.summary import RunSummary, write_summary
from tests.unit.test_driver_run_folder import recipe
from tests.unit.test_monitor_summary import FIELDS


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
