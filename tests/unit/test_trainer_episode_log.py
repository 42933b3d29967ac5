"""The episode log: what a row holds, and what a killed or resumed run leaves in the files."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.backend.batch.micro_batch import assemble
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.trainer.episode_log import EpisodeLog, StepLogProbs, chosen_episodes
from slipstream.backend.trainer.prepared import PreparedMicroBatch, Scores, Targets
from slipstream.configs.schema import EpisodeLogConfig
from slipstream.rollout.ledger.episode_log.files import EpisodeFiles, episode_files, read_rows
from slipstream.rollout.ledger.episode_log.rows import empty_row, episode_row, is_chosen
from slipstream.rollout.ledger.episode_log.token_text import TokenText
from slipstream.rollout.tokens.trajectory import Completion, Finish, Prompt, Span, TrajectoryBuilder
from tests.unit.test_system_disk import largest_file


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def trajectory(prompt: str, response: str, version: int, *, context: str = "", more: str = ""):
    builder = TrajectoryBuilder(list(prompt.encode()))
    for text, of in ((response, version), (more, version + 1)):
        n = len(text.encode())
        if n:
            builder.add_completion(
                Completion(tuple(text.encode()), (-0.5,) * n, (Span(of, 0, n),), Finish.STOP)
            )
        if context:
            builder.add_context(list(context.encode()))
            context = ""
    return replace(builder.build(), reward=1.5, reward_parts=(("length", 2.0),))


def step_of(trajectories, *, version=4, groups=None, proximal=-0.25, turn_advantages=None):
    batch = TrainBatch(
        version,
        tuple(trajectories),
        np.array(groups or [7] * len(trajectories), np.int64),
        turn_advantages=turn_advantages or {},
    )
    micro = assemble(batch, range(len(trajectories)))
    n = len(micro.target_M)
    given = None if proximal is None else torch.full((n,), proximal)
    targets = Targets(torch.from_numpy(micro.trajectory_M).float() + 0.5, None)
    return batch, [[PreparedMicroBatch(micro, Scores(given, None, None, None), targets)]]


def test_a_row_holds_the_text_and_what_the_step_knows_of_each_token():
    batch, minibatches = step_of(
        [trajectory("2+2=", "4!", 3), trajectory("ask", "call", 3, context="tool", more="end")]
    )
    first, second = (
        episode_row(episode, TokenText(decode), 100)
        for episode in chosen_episodes(batch, minibatches, StepLogProbs(), 1.0)
    )
    assert first["prompt"] == "2+2=" and first["response"] == "4!"
    assert first["reward"] == 1.5 and first["reward_parts"] == {"length": 2.0}
    assert first["group"] == 7 and (first["episode"], second["episode"]) == (0, 1)
    assert first["advantage"] == 0.5 and first["head_lag"] == 1 and first["lags"] == [[1, 2]]
    assert first["spans"] == [[3, True, 2]] and first["finish"] == "stop"
    assert first["tokens"] == {
        "text": ["4", "!"],
        "logprob": [-0.5, -0.5],
        "advantage": [0.5, 0.5],
        "proximal_logprob": [-0.25, -0.25],
    }
    assert second["response"] == "calltoolend"
    assert second["spans"] == [[3, True, 4], [None, False, 8], [4, True, 11]]
    context = [False] * 4 + [True] * 4 + [False] * 3
    assert np.isnan(second["tokens"]["logprob"]).tolist() == context
    assert np.isnan(second["tokens"]["advantage"]).tolist() == context
    assert second["lags"] == [[0, 3], [1, 4]]


def test_single_tokens_are_recorded_up_to_a_number_and_the_text_is_whole():
    batch, minibatches = step_of([trajectory("p", "long answer", 4)])
    [episode] = chosen_episodes(batch, minibatches, StepLogProbs(), 1.0)
    row = episode_row(episode, TokenText(decode), 4)
    assert row["response"] == "long answer" and row["tokens"]["text"] == list("long")


def test_log_probs_of_the_first_mini_batch_come_from_its_update():
    batch, minibatches = step_of([trajectory("p", "ab", 4)], proximal=None)
    logprobs = StepLogProbs()
    [episode] = chosen_episodes(batch, minibatches, logprobs, 1.0)
    assert episode.proximal_M is None
    logprobs.add(minibatches[0], [torch.tensor([-1.0, -2.0])])
    [episode] = chosen_episodes(batch, minibatches, logprobs, 1.0)
    assert episode.proximal_M.tolist() == [-1.0, -2.0]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    batch, minibatches = step_of([trajectory("p", "ab", 4)], proximal=float("nan"))
    [episode] = chosen_episodes(batch, minibatches, StepLogProbs(), 1.0)
    endless = replace(episode, trajectory=replace(episode.trajectory, reward=float("inf")))
    files(tmp_path).append(1, [episode_row(endless, TokenText(decode), 9)])
    [row] = logged(tmp_path)
    assert row["reward"] is None and row["tokens"]["proximal_logprob"] == [None, None]


def test_what_live_users_have_said_is_not_logged():
    batch, minibatches = step_of(
        [trajectory("p", "a", 4), trajectory("private", "b", 4)], turn_advantages={1: (0.5,)}
    )
    assert [e.trajectory for e in chosen_episodes(batch, minibatches, StepLogProbs(), 1.0)] == [
        batch.trajectories[0]
    ]


def test_a_share_takes_whole_groups_and_always_the_same():
    chosen = [group for group in range(2000) if is_chosen(group, 0.25)]
    assert 400 < len(chosen) < 600
    groups = [chosen[0], chosen[0], next(g for g in range(9999) if not is_chosen(g, 0.25))]
    batch, minibatches = step_of([trajectory("p", "a", 4)] * 3, groups=groups)
    assert len(list(chosen_episodes(batch, minibatches, StepLogProbs(), 0.25))) == 2


def test_a_character_of_several_tokens_belongs_to_the_first_one():
    assert TokenText(decode).pieces(list("aé😀b".encode())) == ["a", "é", "", "😀", "", "", "", "b"]


def test_bytes_that_are_no_character_stay_single():
    assert TokenText(decode).pieces([0xFF, ord("a")]) == ["\ufffd", "a"]


def files(folder: Path, *, writer=0, writers=1, max_bytes=10_000, max_rows=1000, format="jsonl", **more):
    return EpisodeFiles(
        folder / "episodes",
        writer=writer,
        writers=writers,
        max_bytes=max_bytes,
        max_rows=max_rows,
        format=format,
        **more,
    )


def logged(folder: Path) -> list[dict]:
    return [row for path in episode_files(folder) for row in read_rows(path)]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_files_are_bounded_in_bytes_and_rows_and_the_oldest_go(tmp_path, format):
    log = files(tmp_path, max_bytes=80_000, max_rows=400, format=format)
    for step in range(1, 120):
        log.append(
            step,
            [
                {"response": f"{step}" * 500, "reward_parts": {"a": 1.0}},
                {"response": "y", "reward_parts": {}},
            ],
        )
        assert sum(path.stat().st_size for path in episode_files(tmp_path)) <= 80_000
    assert not (tmp_path / "episodes" / "0000-000000.jsonl").exists()
    rows = logged(tmp_path)
    assert len(rows) <= 400 and rows[-1]["step"] == 119
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert {tuple(row["reward_parts"]) for row in rows} == {("a",), ()}


def test_a_file_of_parquet_holds_what_lines_of_json_do(tmp_path):
    batch, minibatches = step_of([trajectory("ask", "call", 3, context="tool", more="end")])
    [episode] = chosen_episodes(batch, minibatches, StepLogProbs(), 1.0)
    turns = replace(episode.trajectory, turn_rewards=((7, 0.5), (14, None)))
    rows = [
        episode_row(replace(episode, trajectory=turns), TokenText(decode), 100),
        episode_row(replace(episode, proximal_M=None, advantage_M=None), TokenText(decode), 100),
        empty_row("failed", 7, 0, 4, Prompt(0, [{"role": "user", "content": "?"}]), "it broke"),
    ]
    for format in ("jsonl", "parquet"):
        log = files(tmp_path / format, max_bytes=10**6, max_rows=8 * len(rows), format=format)
        log.append(1, rows)
        log.append(2, [rows[0]])  # begins the next file
    [first, _] = episode_files(tmp_path / "parquet")
    assert first.suffix == ".parquet"
    of_parquet, of_lines = logged(tmp_path / "parquet"), logged(tmp_path / "jsonl")
    assert of_parquet == of_lines and of_lines[2]["reason"] == "it broke"
    assert [list(row) for row in of_lines[:3]] == [["step", *row] for row in rows]


def test_a_row_larger_than_a_file_is_left_out(tmp_path):
    log = files(tmp_path, max_bytes=800)
    log.append(1, [{"response": "x" * 1000}, {"response": "small"}])
    assert [row["response"] for row in logged(tmp_path)] == ["small"] and log.left_out == 1


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_resumed_run_has_every_step_once(tmp_path, format):
    log = files(tmp_path, max_bytes=400_000, max_rows=16, format=format)
    for step in range(1, 11):
        log.append(step, [{"response": f"first life {step}", "reward_parts": {}}])
    newest = episode_files(tmp_path)[-1]
    with newest.open("ab") as file:
        file.write(b'{"step": 10, "response": "unfin')
    log = files(tmp_path, max_bytes=400_000, max_rows=16, format=format)
    log.append(8, [{"response": "second life 8", "reward_parts": {}}])
    assert [(row["step"], row["response"].split()[0]) for row in logged(tmp_path)] == [
        *[(step, "first") for step in range(1, 8)],
        (8, "second"),
    ]


def test_fewer_ranks_take_over_the_files_of_more(tmp_path):
    for writer in range(4):
        files(tmp_path, writer=writer, writers=4).append(3, [{"response": str(writer)}])
    for writer in range(2):
        files(tmp_path, writer=writer, writers=2).append(3, [{"response": f"new {writer}"}])
    assert sorted(row["response"] for row in logged(tmp_path)) == ["new 0", "new 1"]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from slipstream.rollout.ledger.episode_log.files import EpisodeFiles\n"
        "log = EpisodeFiles(Path(sys.argv[1]), writer=0, writers=1, max_bytes=10**8, max_rows=10**6)\n"
        "step = 0\nprint('go', flush=True)\n"
        "while True:\n    step += 1\n    log.append(step, [{'response': 'x' * 5000}] * 20)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "episodes")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(3000):
        if any(path.stat().st_size > 300_000 for path in episode_files(tmp_path)):
            break
        threading.Event().wait(0.02)
    process.kill()
    process.wait()
    rows = logged(tmp_path)
    assert rows and all(len(row["response"]) == 5000 for row in rows)
    files(tmp_path, max_bytes=10**8, max_rows=10**6).append(rows[-1]["step"] + 1, [{"response": "next"}])
    assert [json.loads(line) for path in episode_files(tmp_path) for line in path.read_bytes().splitlines()][
        -1
    ]["response"] == "next"


def test_the_step_waits_for_nothing_and_what_is_left_out_is_said(tmp_path):
    held, notes = threading.Event(), []

    def decoder():
        held.wait(60)
        return decode

    log = EpisodeLog(EpisodeLogConfig(), files(tmp_path, max_bytes=10**6), decoder, notes.append)
    batch, minibatches = step_of([trajectory("p", "a", 4)])
    for step in range(1, 9):
        log.step_ends(step, batch, minibatches, StepLogProbs())
    assert len(notes) == 3 and "4 steps left out" in notes[2]  # told of at powers of two
    held.set()
    log.flush()
    assert logged(tmp_path)[0]["step"] == 1


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rows_of_a_full_disk_are_written_when_there_is_room_again(tmp_path, format):
    notes: list[str] = []
    written = files(tmp_path, format=format, note=notes.append)
    row = {"end": "trained", "response": "x" * 300, "tokens": {}}
    written.append(1, [row])
    with largest_file(500):
        for step in range(2, 5):
            written.append(step, [row])
    written.append(5, [row])
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3, 5]
    told, again = notes
    assert "waits in memory" in told and "ulimit -f" in told
    assert again.endswith("is written again; 1 lines are missing in it"), "a file has room for three"


def test_training_goes_on_without_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "episodes").write_text("a file")
    notes: list[str] = []
    log = EpisodeLog(EpisodeLogConfig(), files(tmp_path), lambda: decode, notes.append)
    batch, minibatches = step_of([trajectory("p", "a", 4)])
    log.step_ends(1, batch, minibatches, StepLogProbs())
    log.step_ends(2, batch, minibatches, StepLogProbs())
    log.flush()
    assert len(notes) == 2 and "episode log: 2 steps could not be written, the last time: " in notes[1]
    (tmp_path / "episodes").unlink()
    log.step_ends(3, batch, minibatches, StepLogProbs())
    log.flush()
    assert [row["step"] for row in logged(tmp_path)] == [3], "the folder is there again"
