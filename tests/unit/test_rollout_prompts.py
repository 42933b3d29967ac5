"""Prompt sets: what is read, what is refused, and an order that can be resumed."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from slipstream.configs.schema import PromptFile
from slipstream.rollout.prompts import PromptError, PromptSet, PromptStream, read_prompts
from slipstream.rollout.prompts.rows import Problems, rows
from slipstream.rollout.tokens.trajectory import Prompt

CHAT = [{"role": "user", "content": "2+2"}]


def test_jsonl_is_read_in_file_order_with_the_other_columns_as_metadata(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "ä?", "label": 4, "source": "x"}, {"prompt": CHAT}]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert read_prompts(PromptFile(file)) == [Prompt(0, "ä?", 4, {"source": "x"}), Prompt(1, CHAT, None, {})]


def test_parquet_is_read_like_jsonl(tmp_path):
    file = tmp_path / "prompts.parquet"
    table = pyarrow.table({"prompt": [CHAT, CHAT], "label": ["a", None], "level": [1, 2]})
    pyarrow.parquet.write_table(table, file)
    assert read_prompts(PromptFile(file)) == [
        Prompt(0, CHAT, "a", {"level": 1}),
        Prompt(1, CHAT, None, {"level": 2}),
    ]


def test_reading_parquet_holds_one_row_group_and_not_the_file(tmp_path):
    file, groups = tmp_path / "prompts.parquet", 32
    schema = pyarrow.schema({"prompt": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(file, schema, compression="none") as writer:
        for _ in range(groups):  # of 1 MB, which no encoding makes smaller
            texts = [os.urandom(512).hex() for _ in range(1024)]
            writer.write_table(pyarrow.table({"prompt": texts}, schema))
    before, most = pyarrow.total_allocated_bytes(), 0
    for number, _ in rows(file, Problems(file)):
        if number % 1024 == 0:
            most = max(most, pyarrow.total_allocated_bytes() - before)
    assert most < file.stat().st_size / 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"[1]", "expected an object with `prompt`"),
        (b'"text"', "expected an object with `prompt`"),
        (b'{"question": "2+2"}', "expected an object with `prompt`"),
        (b'{"prompt": ""}', "is an empty text, expected a text or a list of chat messages"),
        (b'{"prompt": []}', "is an empty list, expected a text or a list of chat messages"),
        (b'{"prompt": 5}', "is a number, expected a text or a list of chat messages"),
        (b'{"prompt": null}', "is null, expected a text or a list of chat messages"),
        (b'{"prompt": ["2+2"]}', "chat messages with a `role`"),
        (b'{"prompt": [{"content": "2+2"}]}', "chat messages with a `role`"),
        (b'{"prompt": "?", "label": 1000000000000000000000}', r"can't serialize ints .* as a text"),
        (b'{"prompt": "?", "extra": ["\\ud83d"]}', "surrogates not allowed.* as a text"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(PromptError, match=message) as caught:
        read_prompts(PromptFile(file))
    assert f"{file}, line 3" in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", b"\n \n"), ("a.parquet", None)])
def test_a_file_without_prompts_is_refused(tmp_path, name, content):
    file = tmp_path / name
    if content is None:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), file)
    else:
        file.write_bytes(content)
    with pytest.raises(PromptError, match="holds no prompts"):
        read_prompts(PromptFile(file))


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    file = tmp_path / "a.parquet"
    file.write_bytes(b'{"prompt": "fine"}\n')
    with pytest.raises(PromptError, match=r"a\.parquet: not a parquet file"):
        read_prompts(PromptFile(file))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(PromptError, match="this is a pipe or a device; expected a file"):
        read_prompts(PromptFile(tmp_path / "pipe.jsonl"))


def test_a_missing_file_is_an_os_error(tmp_path):
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(OSError, match=name):
            read_prompts(PromptFile(tmp_path / name))


# ---- the order


PROMPTS = [Prompt(i, f"prompt {i}") for i in range(17)]


def take(stream: PromptStream, n: int) -> list[int]:
    start, stream.position = stream.position, stream.position + n
    return [stream.at(position).id for position in range(start, start + n)]


def test_every_epoch_is_another_permutation():
    stream = PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=3)
    epochs = [take(stream, 17) for _ in range(4)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_depends_on_the_seed_alone():
    first = take(PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=3), 40)
    assert take(PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=3), 40) == first
    assert take(PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=4), 40) != first


def test_the_order_does_not_change_from_one_python_process_to_another():
    """It must survive a restart, thus not depend on hash randomization: these are the ids for ever."""
    assert take(PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=0), 6) == [10, 2, 0, 14, 7, 5]


def test_unshuffled_prompts_come_in_file_order_for_ever():
    assert take(PromptStream(PromptSet.of(PROMPTS), shuffle=False, seed=3), 36) == [
        *range(17),
        *range(17),
        0,
        1,
    ]


@pytest.mark.parametrize("position", [0, 1, 16, 17, 18, 33, 34, 100])
def test_a_restored_position_continues_the_order(position):
    whole = PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=3)
    take(whole, position)
    assert whole.position == position
    resumed = PromptStream(PromptSet.of(PROMPTS), shuffle=True, seed=3, position=position)
    assert take(resumed, 40) == take(whole, 40)
    assert resumed.position == whole.position == position + 40


def test_shuffling_leaves_the_callers_list_alone():
    prompts = list(PROMPTS)
    take(PromptStream(PromptSet.of(prompts), shuffle=True, seed=1), 20)
    assert prompts == PROMPTS
