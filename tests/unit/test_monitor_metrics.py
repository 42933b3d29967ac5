import json
import math
import re
import subprocess
import sys
from collections import Counter
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from slipstream.backend.monitor.metrics import MetricsLog
from slipstream.backend.monitor.tags import TAGS
from slipstream.backend.monitor.tensorboard import MAX_BUCKETS, EventWriter, HistogramBucket, integer_buckets


def ticking_clock():
    ticks = count(1_000)
    return lambda: float(next(ticks))


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> EventAccumulator:
    # 0 keeps every event instead of a sample
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_read_back_from_both_files_equal_what_was_logged(tmp_path):
    log = MetricsLog(tmp_path, clock=ticking_clock())
    rewards = [0.25, 0.5, 0.125]
    for step, reward in enumerate(rewards, start=1):
        log.log(step, {"reward/mean": reward, "train/tokens": 100 * step})
    log.close()

    assert [(e.step, e.wall_time, e.value) for e in events(tmp_path).Scalars("reward/mean")] == [
        (1, 1000.0, 0.25),
        (2, 1001.0, 0.5),
        (3, 1002.0, 0.125),
    ]
    assert [e.value for e in events(tmp_path).Scalars("train/tokens")] == [100, 200, 300]
    assert records(tmp_path) == [
        {"step": step, "time": 999.0 + step, "reward/mean": reward, "train/tokens": 100 * step}
        for step, reward in enumerate(rewards, start=1)
    ]


def test_a_record_is_in_both_files_when_the_log_is_flushed(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"train/loss": 1.5})
    assert log.flush()
    assert records(tmp_path)[0]["train/loss"] == 1.5
    assert events(tmp_path).Scalars("train/loss")[0].value == 1.5
    log.close()


def test_numbers_of_other_libraries_become_plain_numbers(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"train/tokens": np.int64(7), "train/loss": np.float32(0.5), "train/lr": np.array(2.0)})
    log.close()
    record = records(tmp_path)[0]
    assert (record["train/tokens"], record["train/loss"], record["train/lr"]) == (7, 0.5, 2.0)
    assert isinstance(record["train/tokens"], int)


def test_numbers_by_name_are_metrics_of_their_own(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"reward/mean": 0.5, "reward/parts": {"format": 0.25, "b.exact": np.float32(1)}})
    log.log(1, {"eval/reward_parts": {"format": 0.75}})
    log.close()
    first, second = records(tmp_path)
    assert {name: first[name] for name in first if name.startswith("reward/")} == {
        "reward/mean": 0.5,
        "reward/format": 0.25,
        "reward/b.exact": 1.0,
    }
    assert second["eval/reward_format"] == 0.75
    assert events(tmp_path).Scalars("reward/format")[0].value == 0.25


def test_a_name_that_is_taken_is_refused(tmp_path):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match="reward/std is a metric of its own"):
        log.log(1, {"reward/parts": {"std": 1.0}})
    log.close()


def test_what_is_not_finite_is_null_in_json_and_kept_for_tensorboard(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/ratio_max": -math.inf})
    log.close()
    record = records(tmp_path)[0]
    assert [record[tag] for tag in ("train/loss", "train/grad_norm", "train/ratio_max")] == [None] * 3
    assert math.isnan(events(tmp_path).Scalars("train/loss")[0].value)
    assert events(tmp_path).Scalars("train/grad_norm")[0].value == math.inf


def test_a_lag_histogram_has_one_bucket_per_integer(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(3, {"staleness/token_lag": {0: 812, 1: 301, 3: 9}})
    log.close()
    event = events(tmp_path).Tensors("staleness/token_lag")[0]
    assert event.step == 3
    assert tensor_util.make_ndarray(event.tensor_proto).tolist() == [
        [-0.5, 0.5, 812],
        [0.5, 1.5, 301],
        [1.5, 2.5, 0],
        [2.5, 3.5, 9],
    ]
    assert records(tmp_path)[0]["staleness/token_lag"] == [[0, 0, 812], [1, 1, 301], [2, 2, 0], [3, 3, 9]]


def test_values_and_their_counts_give_the_same_histogram():
    values = np.array([4, 0, 1, 1, 4, 4])
    assert integer_buckets(values) == integer_buckets(Counter(values.tolist()))
    assert integer_buckets([]) == []


@pytest.mark.parametrize("largest", [1, MAX_BUCKETS - 1, MAX_BUCKETS, 100, 5_000, 131_071])
def test_buckets_are_few_without_gaps_and_lose_nothing(largest):
    values = [*np.random.default_rng(largest).integers(0, largest, size=500).tolist(), 0, largest]
    buckets = integer_buckets(values)
    assert len(buckets) <= MAX_BUCKETS
    assert all(left.last + 1 == right.first for left, right in pairwise(buckets))
    for bucket in buckets:
        assert bucket.count == sum(bucket.first <= value <= bucket.last for value in values)
    assert sum(bucket.count for bucket in buckets) == len(values)


def test_buckets_of_different_steps_line_up():
    early, late = integer_buckets([9, 150]), integer_buckets([30, 180])
    assert {bucket.last - bucket.first for bucket in early + late} == {3}
    assert all(bucket.first % 4 == 0 for bucket in early + late)


def test_negative_integers_have_buckets_too():
    assert integer_buckets([-1, 1]) == [
        HistogramBucket(-1, -1, 1),
        HistogramBucket(0, 0, 0),
        HistogramBucket(1, 1, 1),
    ]


def test_an_empty_histogram_is_recorded_and_not_drawn(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"staleness/token_lag": {}})
    log.close()
    assert records(tmp_path)[0]["staleness/token_lag"] == []
    assert events(tmp_path).Tags()["tensors"] == []


def test_text_reads_back(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(0, {"run/recipe": "run:\n  name: übung"})
    log.close()
    tensor = events(tmp_path).Tensors("run/recipe")[0].tensor_proto
    assert tensor.string_val[0].decode() == "run:\n  name: übung"
    assert records(tmp_path)[0]["run/recipe"] == "run:\n  name: übung"


def test_tensorboard_is_told_what_a_tag_means_once(tmp_path):
    writer = EventWriter(tmp_path, descriptions={"train/loss": "the meaning"})
    for step in range(3):
        writer.scalars(step, {"train/loss": 0.0})
    writer.close()
    assert events(tmp_path).SummaryMetadata("train/loss").summary_description == "the meaning"
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().count(b"the meaning") == 1


def test_an_undeclared_tag_is_refused_with_the_nearest_one_and_nothing_is_written(tmp_path):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match=r"'reward/maen' is not declared; the nearest one is 'reward/mean'"):
        log.log(1, {"train/loss": 1.0, "reward/maen": 0.5})
    log.close()
    assert records(tmp_path) == []
    assert events(tmp_path).Tags()["scalars"] == []


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("train/loss", "0.5"),
        ("train/loss", None),
        ("train/loss", {0: 1}),
        ("staleness/token_lag", 3),
        ("staleness/token_lag", None),
        ("staleness/token_lag", [0.5]),
        ("run/recipe", 1.0),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_the_name_of_its_tag(tmp_path, tag, value):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match=tag):
        log.log(1, {tag: value})
    log.close()
    assert records(tmp_path) == []


@pytest.mark.parametrize("rest", [b'{"step": 2, "ti', b'{"step": 2, "x": "' + b"y" * 200_000])
def test_reopening_removes_the_line_that_a_killed_run_left_unfinished(tmp_path, rest):
    log = MetricsLog(tmp_path)
    log.log(1, {"train/loss": 1.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(rest)
    log = MetricsLog(tmp_path)
    log.log(2, {"train/loss": 2.0})
    log.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_a_first_line_left_unfinished_is_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    MetricsLog(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_killed_run_leaves_whole_lines(tmp_path):
    program = f"""
import os, pathlib, signal
from slipstream.backend.monitor.metrics import MetricsLog
log = MetricsLog(pathlib.Path({str(tmp_path)!r}))
for step in range(50):
    log.log(step, {{"train/loss": 0.5}})
log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=240).returncode == -9
    assert [record["step"] for record in records(tmp_path)] == list(range(50))
    assert [event.step for event in events(tmp_path).Scalars("train/loss")] == list(range(50))


def test_tags_are_grouped_by_one_slash_and_groups_are_not_scattered():
    groups = [name.split("/")[0] for name in TAGS]
    assert all(re.fullmatch(r"[a-z]+/[a-z_]+", name) for name in TAGS)
    assert len({*groups}) == 1 + sum(left != right for left, right in pairwise(groups))


def test_monitor_imports_no_heavy_library():
    program = """
import sys
from slipstream.backend.monitor import metrics, progress, summary
print(sorted({"torch", "ray", "sglang", "megatron", "tensorflow"} & set(sys.modules)))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, timeout=240, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
