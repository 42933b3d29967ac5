"""What ``slipstream watch`` shows of a run, from its files alone."""

import io

import pytest
from rich.console import Console

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.watch import sparkline, view, watch
from slipstream.backend.monitor.course import read_course
from slipstream.backend.monitor.summary import read_end, write_end
from tests.unit.run_folders import make_run, metrics_line, recipe, start_line, write_lines


def shown(folder, now: float, end: str | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view("tiny", read_course(folder), end, now))
    return console.file.getvalue()


def test_reward_lag_against_its_bound_queues_and_time_left_are_shown(tmp_path):
    lines = [metrics_line(step, step) for step in range(1, 7)]
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe()), *lines])
    text = shown(tmp_path, now=lines[-1]["time"])
    assert "step 6/12" in text and "0:18 left" in text and "3/4" in text
    assert "generating 30 > judging 2 > ready 5" in text and "requests: 96/128" in text


def test_a_run_that_stands_still_is_said_to(tmp_path):
    lines = [metrics_line(step, step) for step in range(1, 7)]
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe()), *lines])
    assert "last step 5:00 ago" in shown(tmp_path, now=lines[-1]["time"] + 300)


def test_a_run_before_its_first_step_and_one_that_has_ended(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe())])
    assert "no step is finished yet" in shown(tmp_path, now=0.0)
    assert "failed" in shown(tmp_path, now=0.0, end="failed")
    make_run(tmp_path, steps=3)
    assert "done" in shown(tmp_path / "tiny", now=0.0, end="done")


def test_what_is_not_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(WrongInput, match=r"no metrics\.jsonl"):
        watch(tmp_path, once=True)
    watch(make_run(tmp_path, steps=2), once=True)
    assert "step 2/2" in capsys.readouterr().out


def test_a_sparkline_rises_with_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0] * 100) == "▁" * 34 and sparkline([]) == ""


def test_side_turns_are_counted_by_what_has_made_them_side_turns(tmp_path):
    counts = {"live/turns_ready": 2, "live/side_helpers": 7, "live/side_sampling": 3}
    line = metrics_line(1, 1) | counts
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe()), line])
    assert "side turns: 7 by helpers, 3 by sampling" in shown(tmp_path, now=line["time"])
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe()), line | dict.fromkeys(counts, 0)])
    assert "side turns" not in shown(tmp_path, now=line["time"])


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_view_fits_its_terminal(width, tmp_path):
    lines = [metrics_line(step, step) for step in range(1, 41)]
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe()), *lines])
    text = shown(tmp_path, now=lines[-1]["time"], width=width)
    rows = [line for line in text.splitlines() if line.strip()]
    assert max(map(len, rows)) <= width
    assert len(rows) == 2 + 1 + 12 + 1, "title, bar and curve; headings; twelve steps; queues"


def test_a_supervised_run_shows_its_loss_and_nothing_that_it_lacks(tmp_path):
    steps = (1, 2, 3)
    lines = [{"step": n, "time": 100.0 + n, "train/step": n, "train/loss": 2.0 / n} for n in steps]
    write_lines(tmp_path / "metrics.jsonl", [start_line(recipe()), *lines])
    text = shown(tmp_path, now=103.0, end="done")
    assert "loss █" in text and "0.667" in text
    assert not any(word in text for word in ("reward", "lag", "waits", "held out", " - "))
    assert read_course(tmp_path).bound is None, "nothing is stale"


def test_a_run_without_engines_says_how_it_has_ended(tmp_path):
    assert read_end(tmp_path) is None
    write_end(tmp_path, "done", 3)
    assert read_end(tmp_path) == "done"
    (tmp_path / "summary.json").write_text("[]")
    assert read_end(tmp_path) is None
