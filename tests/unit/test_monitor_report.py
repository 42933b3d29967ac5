"""The report of a run: what is read of its folder, and that the page holds it as data, never as markup."""

import fcntl
import json
import os
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from slipstream.backend.commands.outcome import WrongInput
from slipstream.backend.commands.report import report, write_trace
from slipstream.backend.monitor.course import read_course
from slipstream.backend.monitor.report.page import PARTS, choose_episodes, differences
from slipstream.backend.monitor.report.timeline import read_events, running, timeline
from slipstream.rollout.ledger.episode_log.files import EpisodeFiles
from tests.unit.run_folders import (
    HOSTILE,
    episode,
    evaluation_line,
    make_run,
    metrics_line,
    recipe,
    start_line,
    trace_lines,
    write_lines,
)


def island(page) -> dict:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(text)


def test_a_page_holds_curves_lags_time_and_episodes_and_asks_no_network(tmp_path):
    page = report([make_run(tmp_path)], None, audit=True)
    assert page == tmp_path / "tiny" / "report.html"
    [run] = island(page)["runs"]
    assert run["series"]["reward/mean"][0][0] == 1 and run["series"]["eval/reward"] == [[0, 0.2], [12, 0.9]]
    assert run["lags"][-1][:2] == [12, 12] and run["bound"] == 4
    assert len(run["timeline"]["steps"]) == 12 and run["timeline"]["engines"] == ["engine-0", "engine-1"]
    assert len(run["episodes"]) == run["recorded"] == 12 * 16
    assert run["audit"] == {"state": "none", "lines": ["no ledger"]}
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r'(src|href)="(https?:)?//', text)
    assert "var uPlot=" in text and "Copyright (c) 2022 Leon Sorokin" in text, "the library and its licence"


def test_a_number_that_users_name_has_a_curve_of_its_mean_and_its_extremes(tmp_path):
    run = make_run(tmp_path)
    more = {"episode/calls": 2.0, "episode/calls/min": 1.0, "episode/calls/max": 4.0, "reward/plain": 1.0}
    write_lines(run / "metrics.jsonl", [metrics_line(1, 1, **more), metrics_line(2, 2)])
    page = island(report([run], None, audit=False))
    [chart] = [chart for chart in page["charts"] if chart["title"].startswith(("episode:", "reward:"))]
    assert chart["title"] == "episode: calls"
    assert [tag["name"] for tag in chart["tags"]] == ["mean", "smallest", "largest"]
    assert page["runs"][0]["series"]["episode/calls/max"] == [[1, 4.0]]


def test_dashed_curves_of_several_runs_are_named_one_after_the_other(tmp_path):
    more = {"episode/calls": 2.0, "episode/calls/min": 1.0, "episode/calls/max": 4.0}
    runs = [make_run(tmp_path, "a"), make_run(tmp_path, "b")]
    for run in runs:
        write_lines(run / "metrics.jsonl", [metrics_line(1, 1, **more)])
    said = {}
    for several in (runs, runs[:1]):
        charts = island(report(several, None, audit=False))["charts"]
        said[len(several)] = {chart["title"]: chart["dashed"] for chart in charts}
    assert said[2]["episode: calls"] == "dashed: smallest, largest" and said[2]["Entropy"] == ""
    assert set(said[1].values()) == {""}, "colours tell the curves of one run apart"
    assert "spec.dashed" in (PARTS / "page.js").read_text(encoding="utf-8")


def test_what_models_and_users_wrote_is_data_and_never_markup(tmp_path):
    page = report([make_run(tmp_path, text=HOSTILE)], None, audit=False)
    text = page.read_text()
    assert (
        text.count("<script") == text.count("</script>") == 3
        and "<img" not in text
        and "49" not in text[:200]
    )
    assert island(page)["runs"][0]["episodes"][0]["prompt"].startswith("</script><script>alert(1)")
    assert "\u2028" not in text


def test_hostile_names_of_runs_are_escaped(tmp_path):
    page = report([make_run(tmp_path, "<b>x")], None, audit=False)
    assert "<b>x" not in page.read_text()


def test_several_runs_lie_on_one_page_with_what_differs(tmp_path):
    page = report(
        [make_run(tmp_path), make_run(tmp_path, "other", lr=3e-4)], tmp_path / "two.html", audit=False
    )
    data = island(page)
    assert [run["name"] for run in data["runs"]] == ["tiny", "other"]
    assert data["differences"] == [{"key": "actor.optimizer.lr", "values": ["0.0001", "0.0003"]}]


def test_a_setting_that_only_one_recipe_has_differs():
    rows = differences({"a": {"x": {"y": 1}}, "b": {"x": {}}})
    assert {row["key"]: row["values"] for row in rows} == {"x.y": ["1", "-"], "x": ["-", "{}"]}


def test_a_running_run_is_read_up_to_its_last_whole_line(tmp_path):
    folder = tmp_path / "live"
    write_lines(
        folder / "metrics.jsonl",
        [start_line(recipe()), metrics_line(1, 1)],
        unfinished='{"step": 2, "train/st',
    )
    write_lines(folder / "trace.jsonl", trace_lines(1)[0], unfinished='{"kind": "st')
    [run] = island(report([folder], None, audit=True))["runs"]
    assert run["state"] == "running or killed" and run["steps"] == 1 and run["total"] == 12


def test_a_run_without_a_summary_names_its_untested_fields(tmp_path):
    folder = tmp_path / "live"
    settings = recipe()
    settings["actor"] = settings.get("actor", {}) | {"untested": ["tp_comm_overlap"]}
    write_lines(folder / "metrics.jsonl", [start_line(settings), metrics_line(1, 1)])
    [run] = island(report([folder], None, audit=True))["runs"]
    assert run["summary"] == {"untested": 'actor.untested: ["tp_comm_overlap"]'}


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path):
    folder = tmp_path / "failed"
    write_lines(folder / "metrics.jsonl", [start_line(recipe())])
    (folder / "driver.log").write_text("0:01  starting Ray\nfailed: PlacementError: no GPU\n")
    page = report([folder], None, audit=True)
    [run] = island(page)["runs"]
    assert run["steps"] == 0 and run["series"] == {} and run["timeline"] is None and run["lags"] == []
    assert run["log"][-1] == "failed: PlacementError: no GPU"


def test_a_resumed_run_has_every_step_once_as_it_was_done_last(tmp_path):
    lines = [start_line(recipe()), evaluation_line(0, 0.1)]
    lines += [metrics_line(version, version, **{"train/loss": 1.0}) for version in range(1, 8)]
    lines += [evaluation_line(6, 0.6), evaluation_line(4, 0.4)]
    lines += [start_line(recipe(steps=20), 4)]
    lines += [metrics_line(version, version - 4, **{"train/loss": 2.0}) for version in range(9, 12)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    course = read_course(tmp_path)
    assert course.series("train/loss") == [(step, 1.0 if step < 5 else 2.0) for step in range(1, 8)]
    assert course.series("eval/reward") == [(0, 0.1), (4, 0.4)]
    assert course.starts == 2 and course.total_steps == 20


def test_values_that_are_not_finite_leave_a_gap(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [metrics_line(1, 1, **{"train/loss": None}), metrics_line(2, 2)])
    assert [step for step, _ in read_course(tmp_path).series("train/loss")] == [2]


def test_the_timeline_is_that_of_the_last_start(tmp_path):
    write_lines(tmp_path / "trace.jsonl", trace_lines(5, begin=1000.0)[0])
    write_lines(tmp_path / "trace.jsonl", trace_lines(3, begin=5000.0)[0])
    shown = timeline(read_events(tmp_path))
    assert shown is not None and len(shown["steps"]) == 3 and shown["seconds"] == pytest.approx(8.9)
    bubble = {each["name"]: each["seconds"] for each in shown["bubbles"]}
    assert bubble["Trainer waits for a batch"] == pytest.approx(1.8)
    assert bubble["Trainer publishes weights"] == pytest.approx(1.2)


def test_requests_under_way_are_counted_by_their_time():
    requests = [{"start_s": 0.0, "end_s": 5.0}, {"start_s": 2.5, "end_s": 20.0}]
    assert running(requests, 0.0, 10.0, columns=4).tolist() == pytest.approx([1, 2, 1, 1])
    assert np.sum(running([], 0.0, 1.0)) == 0


def test_a_page_takes_whole_groups_spread_over_all_steps(tmp_path):
    folder = make_run(tmp_path, steps=40)
    chosen = choose_episodes(folder, 60_000)
    assert chosen.recorded == 640 and 0 < len(chosen.rows) < 200
    groups = {(row["step"], row["group"]) for row in chosen.rows}
    assert len(chosen.rows) == 4 * len(groups)
    steps = sorted({step for step, _ in groups})
    assert steps[0] == 1 and steps[-1] == 40 and max(b - a for a, b in pairwise(steps)) < 16


def test_a_page_takes_groups_of_every_end_and_sorts_by_it(tmp_path):
    folder = make_run(tmp_path, steps=6)
    log = EpisodeFiles(
        folder / "episodes", writer=0, writers=1, max_bytes=10**8, max_rows=10**6, of_untrained=True
    )
    for step in range(1, 7):
        for end, group in (("filtered", 1000 + step), ("failed", 2000 + step), ("evaluated", 4 * step)):
            log.append(step, [episode(step, group, n) | {"end": end, "reason": end} for n in range(4)])
    chosen = choose_episodes(folder, 60_000)
    assert chosen.recorded == 6 * (16 + 12) and len(chosen.rows) < chosen.recorded
    assert {row["end"] for row in chosen.rows} == {"trained", "filtered", "failed", "evaluated"}
    # An evaluated prompt has the number of a group that was trained: they are not mixed up.
    sizes = Counter((row["step"], row["end"], row["group"]) for row in chosen.rows)
    assert set(sizes.values()) == {4}
    newest = [row["end"] for row in chosen.rows if row["step"] == 6]
    assert newest[0] == "trained" and newest == sorted(newest, key=lambda end: (end != "trained", end))


def test_the_trace_for_perfetto_has_the_trainer_and_every_request(tmp_path):
    folder = make_run(tmp_path, steps=3)
    write_trace(folder, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "trainer",
        "engine-0",
        "engine-1",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"] == "train" for event in spans) == 3
    assert sum(event["name"] == "30 tokens" for event in spans) == 24
    for process in {event["pid"] for event in spans} - {1}:
        by_thread: dict[int, float] = {}
        for event in sorted((e for e in spans if e["pid"] == process), key=lambda e: e["ts"]):
            assert event["ts"] >= by_thread.get(event["tid"], -1e9) - 1, "requests of a thread overlap"
            by_thread[event["tid"]] = event["ts"] + event["dur"]


def test_a_folder_without_a_run_is_refused_with_every_reason(tmp_path):
    with pytest.raises(WrongInput, match="no such folder"):
        report([tmp_path / "nothing"], None, audit=False)
    with pytest.raises(WrongInput, match=r"no metrics\.jsonl or inputs\.json"):
        report([tmp_path], None, audit=False)
    with pytest.raises(WrongInput, match="no file trace"):
        write_trace(tmp_path, tmp_path / "trace.json")


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe, run = tmp_path / "pipe", tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)  # holds the page while nobody reads
        report([run], pipe, audit=False)
        assert pipe.is_fifo() and os.read(reader, 1 << 20).startswith(b"<!doctype html>")
    finally:
        os.close(reader)
