import io
import json
import math
import os
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError

from slipstream.backend.monitor.summary import (
    GroupTotals,
    RunSummary,
    TurnTotals,
    commands_after_sft,
    next_commands,
    print_summary,
    read_summary,
    summary_rows,
    summary_text,
    write_summary,
)
from slipstream.rollout.tokens.named_numbers import mean, means_by_name
from tests.unit.test_monitor_progress import Terminal

FIELDS = {
    "exit": "done",
    "steps": 100,
    "steps_of_start": 100,
    "wall_s": 185.0,
    "training_s": 160.0,
    "reward_before": 0.412,
    "reward_after": 0.873,
    "reward_is_accuracy": True,
    "head_lag_max": 4,
    "head_lag_mean": 1.83,
    "multi_version_fraction": 0.37,
    "tokens_generated": 812_345,
    "tokens_trained": 790_000,
    "versions": 100,
    "resumed": 0,
    "stall_s_mean": 0.12,
    "engine_restarts": 0,
    "trainer_restarts": 0,
    "trainer_wait_fraction": 0.11,
    "prompts_left_out": 3,
    "untested": [],
    "groups": {"admitted": 836, "trained": 800, "filtered": 12, "expired": 0, "failed": 1},
    "turns": None,
}
NO_GROUPS = dict.fromkeys(GroupTotals.model_fields, 0)
TURNS = dict.fromkeys(TurnTotals.model_fields, 0)
EARLY_FAILURE = FIELDS | {
    "exit": "failed",
    "steps": 0,
    "steps_of_start": 0,
    "training_s": 0.0,
    "reward_after": None,
    "head_lag_max": None,
    "head_lag_mean": None,
    "multi_version_fraction": None,
    "tokens_generated": 0,
    "tokens_trained": 0,
    "versions": 0,
    "stall_s_mean": None,
    "trainer_wait_fraction": None,
    "groups": GroupTotals(admitted=3, trained=0, filtered=0, expired=0, failed=3),
}


def test_summary_reads_back_as_it_was_written(tmp_path):
    summary = RunSummary(**FIELDS)
    path = write_summary(tmp_path, summary)
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == FIELDS
    assert RunSummary.model_validate_json(path.read_text()) == summary


def test_untested_fields_of_a_recipe_are_in_the_summary():
    assert "untested" not in summary_rows(RunSummary(**FIELDS))
    fields = ["actor.megatron.a", "rollout.engine.args.b"]
    text = summary_text(RunSummary(**FIELDS | {"untested": fields}), "x")
    assert "untested    actor.megatron.a, rollout.engine.args.b" in text


def test_a_reader_never_finds_a_half_written_summary(tmp_path, monkeypatch):
    write_summary(tmp_path, RunSummary(**FIELDS))
    seen = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        seen.append("fsync")
        real_fsync(descriptor)

    def replace(source, target):
        assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "done"
        assert json.loads(source.read_text())["exit"] == "failed"
        seen.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_summary(tmp_path, RunSummary(**EARLY_FAILURE))
    assert seen == ["fsync", "replace", "fsync"]
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "failed"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_failed_write_leaves_the_old_summary(tmp_path, monkeypatch):
    write_summary(tmp_path, RunSummary(**FIELDS))

    def full_disk(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_summary(tmp_path, RunSummary(**EARLY_FAILURE))
    assert json.loads((tmp_path / "summary.json").read_text()) == FIELDS


@pytest.mark.parametrize(
    "change",
    [
        {"exit": "ok"},
        {"reward_after": "87.3 %"},
        {"reward_is_accuracy": "yes!"},
        {"steps": -1},
        {"surprise": 1},
    ],
)
def test_what_a_summary_cannot_mean_is_refused(change):
    with pytest.raises(ValidationError, match=next(iter(change))):
        RunSummary(**FIELDS | change)


MEASURED = (
    "reward_before",
    "reward_after",
    "head_lag_mean",
    "multi_version_fraction",
    "stall_s_mean",
    "trainer_wait_fraction",
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e308, -1.0, 0.0, 87.3, 1e308])
def test_no_measured_value_keeps_a_summary_from_being_written_and_printed(tmp_path, value):
    summary = RunSummary(**FIELDS | dict.fromkeys(MEASURED, value))
    written = json.loads(write_summary(tmp_path, summary).read_text())
    assert [written[name] for name in MEASURED] == [value if math.isfinite(value) else None] * len(MEASURED)
    assert RunSummary(**written) == summary
    for stream in (io.StringIO(), Terminal()):
        print_summary(summary, stream, Path("runs/run"))
        if not math.isfinite(value):
            assert "nan" not in stream.getvalue() and "inf" not in stream.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        (-0.8125, 0.4, "-0.812 -> 0.400  (+1.212)"),
        (2.5, 7.75, "2.500 -> 7.750  (+5.25)"),
        (-123456.0, -1e6, "-1.23e+05 -> -1e+06  (-8.765e+05)"),
        (0.25, None, "0.250 before training"),
        (None, 3.0, "3.000 at the end"),
    ],
)
def test_a_reward_that_is_no_accuracy_is_called_a_reward(before, after, row):
    values = {"reward_before": before, "reward_after": after, "reward_is_accuracy": False}
    rows = summary_rows(RunSummary(**FIELDS | values))
    assert "accuracy" not in rows
    assert rows.get("reward") == row


def test_plain_summary_is_ascii_and_complete(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run of this name has a checkpoint to evaluate
    stream = io.StringIO()
    print_summary(RunSummary(**FIELDS), stream, Path("runs/quickstart"))
    assert stream.getvalue().isascii()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines() == [
        "quickstart: done after 100 steps",
        "  accuracy    41.2% -> 87.3%  (+46.1 points)",
        "  time        3:05 in all, 2:40 of training, 1.6 s per step",
        "  staleness   head lag 4 at most, 1.83 on average; 37% of trajectories span versions",
        "  throughput  812.3k tokens generated, 790.0k trained; 5.1k generated per second",
        "  trainer     waited for batches 11% of its time",
        "  versions    100 published, generation paused 0.12 s for each",
        "  engines     0 restarts",
        "  groups      836 admitted, 800 trained, 12 filtered, 1 failed",
        "  slipstream report runs/quickstart  # its curves and episodes as a page",
        "  tensorboard --logdir runs          # all runs beside each other",
        "  slipstream init my-task            # a recipe, a reward and data of your own",
    ]


def test_a_run_of_live_users_counts_turns_and_no_groups():
    turns = TURNS | {"trained": 640, "side": 700, "ready": 9}
    rows = summary_rows(RunSummary(**FIELDS | {"groups": NO_GROUPS, "turns": turns}))
    assert rows["turns"] == "640 trained, 700 side, 9 ready"
    assert "groups" not in rows
    mixed = summary_rows(RunSummary(**FIELDS | {"turns": TURNS}))
    assert (mixed["groups"], mixed["turns"]) == (
        "836 admitted, 800 trained, 12 filtered, 1 failed",
        "0 trained",
    )


def test_a_summary_is_read_back_and_one_that_is_none_is_not(tmp_path):
    assert read_summary(tmp_path) is None
    summary = RunSummary(**FIELDS | {"turns": TURNS})
    path = write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary
    path.write_text("{")
    assert read_summary(tmp_path) is None


def test_a_run_that_failed_before_its_first_step_has_a_summary_too():
    stream = io.StringIO()
    print_summary(RunSummary(**EARLY_FAILURE), stream, Path("runs/quickstart"))
    text = stream.getvalue()
    assert text.startswith("quickstart: failed after 0 steps\n  accuracy    41.2% before training\n")
    assert "None" not in text
    assert "staleness" not in text


def test_a_terminal_gets_a_table(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    print_summary(RunSummary(**FIELDS), stream, Path("runs/quickstart"))
    assert "╭" in stream.getvalue()
    assert "41.2% → 87.3%" in stream.getvalue()


def test_a_resumed_run_counts_all_of_its_steps_and_says_which_its_times_are_of():
    stream = io.StringIO()
    summary = RunSummary(**FIELDS | {"steps_of_start": 40, "resumed": 1})
    print_summary(summary, stream, Path("runs/math"))
    text = stream.getvalue()
    assert text.startswith("math: done after 100 steps")
    assert "4.0 s per step; since the last start, which did 40 of the steps" in text
    assert "40 published" in text


def test_a_run_that_has_ended_says_what_can_be_done_with_it(tmp_path):
    folder = tmp_path / "two words"
    (folder / "checkpoint-hf").mkdir(parents=True)
    commands = list(next_commands(RunSummary(**FIELDS), folder))
    assert [shlex.split(command)[:2] for command in commands] == [
        ["slipstream", "report"],
        ["tensorboard", "--logdir"],
        ["slipstream", "eval"],
        ["slipstream", "init"],
    ]
    assert shlex.split(commands[2])[2:] == [str(folder / "checkpoint-hf"), str(folder / "recipe.yaml")]
    assert len(next_commands(RunSummary(**EARLY_FAILURE), folder)) == 2
    stays = RunSummary(**FIELDS | {"reward_before": 0.4, "reward_after": 0.4})
    assert [each for each in next_commands(stays, folder) if "diagnose" in each]


@pytest.mark.parametrize(("learn", "then"), [("responses", {"eval", "init"}), ("preferences", {"settings"})])
def test_a_supervised_run_that_has_ended_says_what_can_be_done_with_it(tmp_path, learn, then):
    checkpoint = tmp_path / "two words" / "checkpoint-hf"
    commands = [shlex.split(command) for command in commands_after_sft(checkpoint, learn)]
    assert commands[:2] == [
        ["slipstream", "report", str(checkpoint.parent)],
        ["tensorboard", "--logdir", str(tmp_path)],
    ]
    assert {command[1] for command in commands[2:]} == then
    assert learn == "preferences" or all(str(checkpoint) in command for command in commands[2:])


@pytest.mark.parametrize("values", [[0.1] * 3, [1.0] * 128, [0.7] * 11, [1e308, 1e308], [-1e308, 1e308]])
def test_a_mean_lies_between_its_values(values):
    assert min(values) <= mean(values) <= max(values)
    assert mean([1.0 - 2**-53, 1.0] * 64) <= 1.0
    assert means_by_name([(("a", value),) for value in values]) == {"a": mean(values)}
