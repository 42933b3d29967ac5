"""The episode log of a collector: groups that are never trained, whole or in part, and evaluations."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from slipstream.configs.schema import EpisodeLogConfig
from slipstream.rollout.collection.collector.untrained_log import UntrainedLog
from slipstream.rollout.collection.messages import (
    ANSWERED,
    JUDGED,
    NOTHING,
    PIECE,
    LostGroup,
    PriorSample,
    Question,
)
from slipstream.rollout.ledger.episode_log.files import EpisodeFiles, episode_files
from slipstream.rollout.ledger.episode_log.rows import is_chosen
from slipstream.rollout.system.log_thread import LogThread
from slipstream.rollout.tokens.record import PieceHeader, encode, encode_chunk, encode_trajectory
from slipstream.rollout.tokens.trajectory import Finish, Prompt, Trajectory, joined
from tests.unit.test_trainer_episode_log import decode, logged, trajectory

PROMPT = Prompt(3, "2+2=")


def opened(folder: Path, *, format="jsonl", share: float = 1.0, max_rows=10**4, notes=None) -> UntrainedLog:
    files = EpisodeFiles(
        folder / "episodes",
        writer=0,
        writers=1,
        max_bytes=10**6,
        max_rows=max_rows,
        format=format,
        of_untrained=True,
    )
    settings = EpisodeLogConfig(share=share)
    return UntrainedLog(settings, files, lambda: decode, (notes if notes is not None else []).append)


def whole(number: int, kind: int, each: Trajectory) -> tuple[PriorSample, bytes]:
    data = encode_trajectory(each)
    return PriorSample(number, kind, msgspec.Raw(encode(each.header)), [(len(data), NOTHING)]), data


def unfinished(number: int, *pieces: tuple[str, str, PieceHeader]) -> tuple[PriorSample, bytes]:
    chunks = [
        encode_chunk(list(context.encode()), list(text.encode()), [-0.5] * len(text.encode()))
        for context, text, _ in pieces
    ]
    sizes = [
        (len(chunk), msgspec.Raw(encode(header)))
        for chunk, (_, _, header) in zip(chunks, pieces, strict=True)
    ]
    return PriorSample(number, PIECE, NOTHING, sizes), b"".join(chunks)


def lost(*recorded: tuple[PriorSample, bytes], loss="filtered", reason="", samples=None, group=7, step=5):
    message = LostGroup(
        group,
        loss,
        reason,
        step,
        4,
        [(3, 1), (4, 0)],
        PROMPT,
        len(recorded) if samples is None else samples,
        [sample for sample, _ in recorded],
    )
    return message, memoryview(b"".join(data for _, data in recorded))


def test_a_filtered_group_has_text_rewards_and_lags_and_counts_no_token_as_trained(tmp_path):
    log = opened(tmp_path)
    each = trajectory("2+2=", "4", 3, more="!")
    log.lost(*lost(whole(0, JUDGED, each), whole(1, ANSWERED, trajectory("2+2=", "5", 4))))
    log.flush()
    first, second = logged(tmp_path)
    assert (first["step"], first["end"], first["group"], first["episode"]) == (5, "filtered", 7, 0)
    assert (first["prompt"], first["response"], first["reward"]) == ("2+2=", "4!", 1.5)
    assert (first["version"], first["lags"], first["head_lag"]) == (4, [[0, 1], [1, 1]], 1)
    assert (first["response_tokens"], first["trained_tokens"], first["reason"]) == (2, 0, None)
    assert first["tokens"] == {"text": ["4", "!"], "logprob": [-0.5, -0.5]}
    assert second["episode"] == 1 and second["response"] == "5"


def test_what_exists_of_an_unfinished_episode_is_shown_and_the_others_have_the_prompt_alone(tmp_path):
    log = opened(tmp_path)
    begun = unfinished(
        1,
        ("old prompt", "thrown away", PieceHeader(0, b"", ((3, 11),))),
        ("2+2=", "it ", PieceHeader(1, b"", ((3, 2), (4, 1)), starts_over=True)),
        ("", "is", PieceHeader(1, b"", ((4, 2),))),
    )
    log.lost(*lost(begun, loss="failed", reason="prompt 3: KeyError", samples=3))
    log.flush()
    rows = logged(tmp_path)
    assert [row["episode"] for row in rows] == [0, 1, 2]
    assert {row["reason"] for row in rows} == {"prompt 3: KeyError"}
    assert {row["prompt"] for row in rows} == {"2+2="}
    assert [row["response"] for row in rows] == ["", "it is", ""]
    assert rows[1]["finish"] == Finish.PARTIAL and rows[1]["reward"] is None and rows[0]["finish"] is None
    assert rows[1]["spans"] == [[3, True, 2], [4, True, 5]] and rows[1]["lags"] == [[0, 3], [1, 2]]


def test_each_of_several_trajectories_of_an_episode_has_a_row(tmp_path):
    log = opened(tmp_path)
    log.lost(*lost(whole(0, JUDGED, joined([trajectory("a", "b", 3), trajectory("c", "d", 4)]))))
    log.flush()
    assert [(row["episode"], row["prompt"], row["response"]) for row in logged(tmp_path)] == [
        (0, "a", "b"),
        (0, "c", "d"),
    ]


def test_a_damaged_record_leaves_the_other_episodes_in_the_log(tmp_path):
    log = opened(tmp_path)
    bad = PriorSample(0, JUDGED, msgspec.Raw(encode(trajectory("a", "b", 3).header)), [(5, NOTHING)])
    log.lost(*lost((bad, b"12345"), whole(1, JUDGED, trajectory("2+2=", "4", 3))))
    log.flush()
    assert [row["response"] for row in logged(tmp_path)] == ["", "4"]


def ask(log: UntrainedLog, step: int, version: int, prompt: int, text: str | None) -> None:
    each = None if text is None else trajectory("2+2=", text, version)
    question = Question(0, Prompt(prompt, "2+2="), version, step)
    log.evaluated(question, Prompt(prompt, "2+2="), each, None if text else "it has failed")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_evaluation_that_is_done_again_is_in_the_log_once_and_lost_groups_stay(tmp_path, format):
    log = opened(tmp_path, format=format, max_rows=80)
    for step in range(0, 8, 2):
        for prompt in range(4):
            ask(log, step, step, prompt, f"{step}")
        log.lost(*lost(whole(0, JUDGED, trajectory("2+2=", "no", 3)), group=step, step=step + 1))
    log.flush()
    log = opened(tmp_path, format=format, max_rows=80)
    assert {path.suffix for path in episode_files(tmp_path)} == {".jsonl", f".{format}"}
    log.evaluates_from(4)
    ask(log, 4, 9, 0, "again")
    ask(log, 6, 11, 0, None)
    log.flush()
    rows = logged(tmp_path)
    evaluated = [row for row in rows if row["end"] == "evaluated"]
    assert [(row["step"], row["group"], row["response"], row["version"]) for row in evaluated] == [
        *[(step, prompt, str(step), step) for step in (0, 2) for prompt in range(4)],
        (4, 0, "again", 9),
        (6, 0, "", 11),
    ]
    assert evaluated[-1]["reason"] == "it has failed" and evaluated[-1]["reward"] is None
    assert [row["group"] for row in rows if row["end"] == "filtered"] == [0, 2, 4, 6]


def test_another_life_of_a_collector_writes_behind_the_unfinished_line_of_the_first(tmp_path):
    log = opened(tmp_path)
    ask(log, 0, 0, 0, "first")
    log.flush()
    [file] = episode_files(tmp_path)
    with file.open("ab") as unfinished_line:
        unfinished_line.write(b'{"step": 0, "end": "eval')
    log = opened(tmp_path)
    ask(log, 0, 0, 1, "second")
    log.flush()
    assert [row["response"] for row in logged(tmp_path)] == ["first", "second"]


def test_what_waits_for_the_thread_is_bounded_in_bytes(tmp_path):
    held, notes = threading.Event(), []
    thread = LogThread("episode log", 100, "groups", notes.append, most_bytes=1000)
    done: list[int] = []
    thread.offer(lambda: held.wait(60))  # type: ignore[arg-type, return-value]
    for number in range(4):
        thread.offer(lambda number=number: done.append(number), 400)
    thread.put(lambda: done.append(-1))
    assert thread.left_out == 2 and len(notes) == 2
    held.set()
    thread.flush()
    thread.offer(lambda: done.append(9), 1000)
    thread.flush()
    assert done == [0, 1, -1, 9]


def test_evaluations_are_sampled_by_the_same_share_as_groups(tmp_path):
    log = opened(tmp_path, share=0.3)
    for prompt in range(100):
        ask(log, 0, 0, prompt, "x")
    log.flush()
    assert [row["group"] for row in logged(tmp_path)] == [n for n in range(100) if is_chosen(n, 0.3)]


def test_a_log_that_cannot_be_written_is_said_and_goes_on_when_it_can(tmp_path):
    (tmp_path / "episodes").write_text("a file")
    notes: list[str] = []
    log = opened(tmp_path, notes=notes)
    ask(log, 0, 0, 0, "x")
    log.evaluates_from(0)
    ask(log, 0, 0, 1, "x")
    asyncio.run(asyncio.to_thread(log.flush))
    assert len(notes) == 2 and "2 lost groups and evaluations could not be written" in notes[1]
    (tmp_path / "episodes").unlink()
    ask(log, 0, 0, 2, "x")
    log.flush()
    assert len(logged(tmp_path)) == 1
