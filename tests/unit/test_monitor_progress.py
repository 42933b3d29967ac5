import io
import re
import threading
from collections.abc import Mapping

import pytest
from rich.console import Console

from slipstream.backend.monitor.progress import (
    HeldOut,
    LiveProgress,
    PlainProgress,
    StepTimer,
    append_to_log,
    open_progress,
)
from slipstream.backend.monitor.units import clock_face, count, reward, seconds
from tests.environment import ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_short_run(progress, clock: Clock, evaluations: Mapping[int, HeldOut]) -> None:
    progress.phase("preparing policy")
    clock.now += 12
    progress.phase("starting engine 1/1")
    clock.now += 30
    progress.note("something else")
    for step in (1, 2, 10):
        clock.now += 5
        progress.step(
            step, reward=step / 10, head_lag=step, tokens_per_s=8_123.0, held_out=evaluations.get(step)
        )
    progress.close()


EVALUATIONS = {1: HeldOut(0.3167, True), 10: HeldOut(1.0, True)}


def test_output_that_is_no_terminal_gets_plain_lines():
    stream, clock = io.StringIO(), Clock()
    progress = open_progress(10, stream=stream, clock=clock)
    assert isinstance(progress, PlainProgress)
    a_short_run(progress, clock, EVALUATIONS)
    assert stream.getvalue().splitlines() == [
        "    0:00  preparing policy",
        "    0:12  starting engine 1/1",
        "    0:42  note: something else",
        "    0:47  step  1/10  reward  0.100  accuracy  31.7%  lag  1    8.1k tok/s  left -",
        "    0:52  step  2/10  reward  0.200  accuracy      -  lag  2    8.1k tok/s  left 0:40",
        "    0:57  step 10/10  reward  1.000  accuracy 100.0%  lag 10    8.1k tok/s  left 0:00",
    ]


@pytest.mark.parametrize(
    ("evaluations", "columns"),
    [
        ({}, ["", "", ""]),
        ({2: HeldOut(-0.25, False)}, ["", "held-out -0.250  ", "held-out      -  "]),
        (
            {1: HeldOut(7.5, False), 2: HeldOut(-123456.0, False)},
            ["held-out  7.500  ", "held-out -1.23e+05  ", "held-out      -  "],
        ),
    ],
)
def test_evaluations_have_a_column_from_the_first_one_on(evaluations, columns):
    stream, clock = io.StringIO(), Clock()
    a_short_run(open_progress(10, stream=stream, clock=clock), clock, evaluations)
    lines = [line for line in stream.getvalue().splitlines() if "reward" in line]
    assert [re.search(r"reward +\S+  (.*?)lag", line)[1] for line in lines] == columns  # type: ignore[index]


def test_plain_lines_have_no_ansi_even_when_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream, clock = io.StringIO(), Clock()
    a_short_run(open_progress(10, stream=stream, clock=clock), clock, EVALUATIONS)
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_the_lag_is_shown_against_its_bound():
    stream, clock = io.StringIO(), Clock()
    a_short_run(open_progress(10, bound=4, stream=stream, clock=clock), clock, {})
    assert "lag  2/4  " in stream.getvalue()


def test_the_lines_of_the_readme_are_those_of_a_run():
    stream, clock = io.StringIO(), Clock()
    progress = open_progress(50, bound=4, stream=stream, clock=clock)
    clock.now = 24
    progress.step(1, reward=0.531, head_lag=0, tokens_per_s=2400.0, held_out=HeldOut(0.317, True))
    clock.now = 78
    progress.step(50, reward=0.891, head_lag=2, tokens_per_s=0.0)
    progress.close()
    shown = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(lines := stream.getvalue().splitlines()) == 2
    assert not [line for line in lines if line not in shown]


@pytest.mark.parametrize(("step", "waits"), [(1, "step 2"), (2, "the end")])
def test_silence_after_the_last_step_waits_for_the_end(step, waits):
    told, said = threading.Event(), []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "..." in text:
                said.append(text)
                told.set()
            return len(text)

    progress = PlainProgress(2, Stream(), Clock(), silence_s=0.01)
    progress.step(step, reward=0.0, head_lag=0, tokens_per_s=1.0)
    for _ in range(100):  # a sign of life may be one of before the step
        assert told.wait(60)
        told.clear()
        if "starting" not in said[-1]:
            break
    progress.close()
    assert f"... {waits} (" in said[-1]


def test_a_terminal_keeps_a_row_of_each_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    a_short_run(open_progress(10, bound=4, stream=stream, clock=clock), clock, EVALUATIONS)
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    rows = [line.split() for line in written.splitlines() if re.match(r" +(\d+/10 +[01]|step +r)", line)]
    assert [row[0] for row in rows] == ["step", "1/10", "2/10", "10/10"]
    assert rows[1] == ["1/10", "0.100", "31.7%", "1/4", "8.1k", "47", "s", "0:47"]
    assert rows[2][2] == "-" and rows[2][5:] == ["5.0", "s", "0:52"]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_run_folder_gets_a_log_of_what_was_shown_from_the_beginning(tmp_path, monkeypatch, stream):
    monkeypatch.setenv("TERM", "xterm-256color")
    for start in (1, 2):
        clock = Clock()
        progress = open_progress(10, stream=stream, clock=clock)
        progress.phase("reading the model")
        progress.keep_in(tmp_path)
        progress.note(f"start {start}")
        progress.step(1, reward=0.5, head_lag=0, tokens_per_s=10.0)
        progress.close()
        append_to_log(tmp_path, "failed: no more")
    lines = (tmp_path / "driver.log").read_text().splitlines()
    assert sum(line.startswith("---- started") for line in lines) == 2
    assert [line.split("  ")[-1] for line in lines if "reading" in line] == ["reading the model"] * 2
    assert "note: start 2" in lines[-3] and "reward" in lines[-2] and lines[-1] == "failed: no more"
    assert not any("\x1b" in line for line in lines)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress = open_progress(10, stream=Terminal())
    progress.close()
    assert isinstance(progress, PlainProgress)


def test_a_long_wait_is_not_silent():
    spoke = threading.Event()

    class Listening(io.StringIO):
        def write(self, text: str) -> int:
            written = super().write(text)
            if "(42 s)" in text:
                spoke.set()
            return written

    stream, clock = Listening(), Clock()
    progress = PlainProgress(10, stream, clock, silence_s=0.05)
    progress.phase("starting engine 1/1")
    clock.now += 42
    assert spoke.wait(60)
    progress.close()
    assert "    0:42  ... starting engine 1/1 (42 s)" in stream.getvalue().splitlines()


def test_closing_does_not_wait_for_the_next_sign_of_life():
    progress = PlainProgress(10, io.StringIO(), Clock(), silence_s=3600)
    closer = threading.Thread(target=progress.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()


def test_a_terminal_gets_one_live_line_whose_last_state_stays(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    progress = open_progress(10, stream=stream, clock=clock)
    assert isinstance(progress, LiveProgress)
    a_short_run(progress, clock, EVALUATIONS)
    written = stream.getvalue()
    assert "something else" in written
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).rstrip().splitlines()[-1]
    for figure in ("step 10/10", "reward 1.000", "accuracy 100.0%", "lag 10", "8.1k tok/s"):
        assert figure in last


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120, 200])
def test_the_live_line_is_one_line_and_keeps_step_and_time_left(monkeypatch, width):
    clock = Clock()
    progress = LiveProgress(100, Terminal(), clock)
    for step in (1, 2):
        clock.now += 60
        progress.step(step, reward=0.5, head_lag=3, tokens_per_s=12_345, held_out=HeldOut(0.5, True))
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(progress)
    progress.close()
    (line,) = console.file.getvalue().splitlines()
    assert len(line) <= width
    assert "step 2/100" in line
    assert "1:38:00 left" in line


def test_time_left_follows_the_latest_steps():
    timer = StepTimer(200)
    assert timer.finish(1, 100.0) is None
    assert timer.finish(2, 110.0) == pytest.approx(1980)
    for step in range(3, 101):
        left = timer.finish(step, 110.0 + step)
    assert left == pytest.approx(100)


def test_time_left_after_a_resume_counts_from_the_first_step_seen():
    timer = StepTimer(100)
    timer.finish(51, 0.0)
    assert timer.finish(52, 4.0) == pytest.approx(4 * 48)


def test_numbers_read_well():
    assert [count(n) for n in (0, 812, 999.6, 8_123, 999_960, 12_300_000, 1.2e9)] == [
        "0", "812", "1.0k", "8.1k", "1.0M", "12.3M", "1.2G",
    ]  # fmt: skip
    assert [seconds(s) for s in (0.48, 7.26, 9.97, 42, 59.7, 185)] == [
        "0.48 s", "7.3 s", "10 s", "42 s", "1:00", "3:05",
    ]  # fmt: skip
    assert [clock_face(s) for s in (0, 7, 59.6, 185, 3750)] == ["0:00", "0:07", "1:00", "3:05", "1:02:30"]


def test_a_batch_without_rewards_shows_a_dash():
    assert reward(float("nan")) == "-"
