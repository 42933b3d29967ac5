"""Trackers: nobody waits for them, an outage is told once, and names arrive as the services take them."""

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from slipstream.backend.monitor.metrics import MetricsLog, MetricsRecord
from slipstream.backend.monitor.tensorboard import HistogramBucket
from slipstream.backend.monitor.trackers.opened import (
    MlflowTracker,
    WandbTracker,
    missing_packages,
    mlflow_name,
)
from slipstream.backend.monitor.trackers.queued import QueuedTracker, tracked_id
from slipstream.configs.schema.log import LogConfig, MlflowConfig, WandbConfig

RECORD = MetricsRecord(
    7,
    1767225600.5,
    {"reward/mean": 0.5, "episode/calls/min": 1.0, "train/loss": float("nan")},
    {"staleness/token_lag": [HistogramBucket(0, 0, 3), HistogramBucket(1, 1, 5)]},
)


@dataclass
class Scripted:
    """Does what ``script`` says for each call in turn: raises an error, or waits for an event."""

    script: list[Any] = field(default_factory=list)
    setting: str = "log.scripted"
    calls: list[str] = field(default_factory=list)
    records: list[int] = field(default_factory=list)

    def start(self) -> None:
        self._act("start")

    def log(self, record: MetricsRecord) -> None:
        self._act("log")
        self.records.append(record.step)

    def finish(self) -> None:
        self._act("finish")

    def _act(self, call: str) -> None:
        self.calls.append(call)
        act = self.script.pop(0) if self.script else None
        if isinstance(act, Exception):
            raise act
        if isinstance(act, threading.Event):
            act.wait(60)


def record(step: int) -> MetricsRecord:
    return MetricsRecord(step, 0.0, {}, {})


def queued(tracker: Scripted, notes: list[str], **settings: Any) -> QueuedTracker:
    return QueuedTracker(tracker, notes.append, **{"timeout_s": 60.0, "retry_s": 0.01, **settings})


def test_records_arrive_in_order_and_the_end_waits_for_them():
    tracker, notes = Scripted(), list[str]()
    sink = queued(tracker, notes)
    for step in range(5):
        sink.put(record(step))
    sink.close()
    assert tracker.records == [0, 1, 2, 3, 4] and tracker.calls[-1] == "finish"
    assert not notes


def test_an_outage_is_told_once_and_its_end_lets_records_through():
    tracker, notes = Scripted([OSError("down"), OSError("down"), None, OSError("down again")]), list[str]()
    sink = queued(tracker, notes)
    sink.put(record(1))
    sink.put(record(2))
    deadline = time.monotonic() + 60
    while tracker.records != [1, 2] and time.monotonic() < deadline:
        time.sleep(0.01)
    sink.close()
    assert tracker.records == [1, 2]
    [note] = notes
    assert "log.scripted: no metrics there since" in note and "OSError: down" in note


def test_a_record_that_is_refused_twice_is_left_out_and_counted():
    tracker, notes = Scripted([None, ValueError("no"), ValueError("no")]), list[str]()
    sink = queued(tracker, notes)
    sink.put(record(1))
    sink.put(record(2))
    sink.close()
    assert tracker.records == [2]
    assert notes[-1] == "log.scripted: 1 records were left out; metrics.jsonl has them"


def test_a_service_that_hangs_delays_neither_a_record_nor_the_end(tmp_path):
    hang = threading.Event()
    tracker, notes = Scripted([hang]), list[str]()
    sink = queued(tracker, notes, timeout_s=0.1, most=2)
    log = MetricsLog(tmp_path, [sink])
    for step in range(100):
        log.log(step, {"reward/mean": 1.0})
    log.close()  # nobody ends the hanging
    assert sink.left_out == 98
    assert notes == ["log.scripted: not everything was sent within 0.1 s"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
    hang.set()


def test_a_run_that_is_resumed_goes_on_with_its_own_run_there(tmp_path):
    assert tracked_id(tmp_path, "wandb", lambda: "first") == "first"
    assert tracked_id(tmp_path, "wandb", lambda: "second") == "first"
    assert tracked_id(tmp_path, "mlflow", lambda: "other") == "other"


def test_weights_and_biases_gets_every_number_by_its_tag_and_histograms(tmp_path, monkeypatch):
    given: dict[str, Any] = {"logged": [], "axes": []}
    run = SimpleNamespace(
        log=given["logged"].append,
        define_metric=lambda *names, **axis: given["axes"].append((*names, *axis.values())),
        finish=lambda: given.update(finished=True),
    )
    module: Any = ModuleType("wandb")
    module.Settings, module.Histogram = SimpleNamespace, lambda np_histogram: np_histogram
    module.init = lambda **settings: given.update(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker = WandbTracker(WandbConfig(project="p", mode="offline"), "name", tmp_path, {"run": 1})
    tracker.start()
    tracker.log(RECORD)
    tracker.finish()
    assert (given["project"], given["name"], given["mode"], given["config"]) == (
        "p",
        "name",
        "offline",
        {"run": 1},
    )
    assert given["id"] == (tmp_path / "wandb-run.txt").read_text().strip() and given["resume"] == "allow"
    assert given["axes"] == [("version",), ("*", "version")] and given["finished"]
    [logged] = given["logged"]
    counts, edges = logged.pop("staleness/token_lag")
    assert counts.tolist() == [3, 5] and edges.tolist() == [-0.5, 0.5, 1.5]
    assert np.isnan(logged.pop("train/loss"))
    assert logged == {"version": 7, "reward/mean": 0.5, "episode/calls/min": 1.0}


def test_mlflow_gets_no_name_that_is_a_folder_of_another():
    assert mlflow_name("reward/mean") == "reward/mean"
    assert mlflow_name("episode/calls/min") == "episode/calls min"
    tracker = MlflowTracker(MlflowConfig(tracking_uri="sqlite://"), "name", Path(), "recipe")
    batches: list[list[Any]] = []
    tracker._metric = lambda *fields: fields
    tracker._client = SimpleNamespace(log_batch=lambda run, metrics: batches.append(metrics))
    tracker.log(RECORD)
    [[mean, smallest, loss]] = batches
    assert mean == ("reward/mean", 0.5, 1767225600500, 7) and smallest[0] == "episode/calls min"
    assert loss[0] == "train/loss" and np.isnan(loss[1])


def test_a_package_that_is_missing_is_told_with_the_way_out(monkeypatch):
    log = LogConfig(wandb=WandbConfig(project="p"), mlflow=MlflowConfig(tracking_uri="u"))
    monkeypatch.setattr("slipstream.backend.monitor.trackers.opened.find_spec", lambda name: None)
    problems = missing_packages(log)
    assert [problem.split(":")[0] for problem in problems] == ["log.wandb", "log.mlflow"]
    assert "`pip install wandb`" in problems[0] and "`pip install mlflow-skinny`" in problems[1]
    assert not missing_packages(LogConfig())


def test_programs_find_each_number_once_and_tensorboard_shows_the_first_ones_first(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"reward/mean": 0.5, "staleness/head_max": 2, "staleness/token_lag": {0: 3}})
    log.log(1, {"eval/reward": 0.25, "eval/accuracy": 0.25})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not [tag for each in records for tag in each if tag.startswith("Overview")]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    shown = events.Tags()
    tags = sorted([*shown["scalars"], *shown["tensors"]])
    assert tags[:4] == [
        "Overview/1 reward",
        "Overview/2 accuracy",
        "Overview/3 largest lag",
        "Overview/4 lag of tokens",
    ]
