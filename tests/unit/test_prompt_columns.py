"""Columns, templates and files as other systems write them: what becomes a prompt, and what is refused."""

import json
import tracemalloc

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from slipstream.configs.schema import ColumnsConfig, DataConfig, EvalConfig, PromptFile
from slipstream.configs.schema.data import data_files, eval_files
from slipstream.rollout.prompts import PromptError, read_examples, read_prompts, text_in
from slipstream.rollout.prompts.reading import answered_chat, ends_with_answer
from slipstream.rollout.tokens.trajectory import Prompt

CHAT = [{"role": "user", "content": "2+2"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7, "answer": "2+2=4 #### 4"},
}
"""A row as verl's `examples/data_preprocess/gsm8k.py` writes it."""


def written(folder, rows, name="rows.jsonl"):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, template=None, **columns):
    return read_prompts(PromptFile(path, ColumnsConfig(**columns), template))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_columns_may_have_any_names(tmp_path, name):
    path = written(tmp_path, [{"question": "2+2", "answer": "4", "level": 1}], name)
    assert read(path, prompt="question", label="answer") == [Prompt(0, "2+2", "4", {"level": 1})]


def test_a_files_of_verl_is_read_as_it_is(tmp_path):
    path = written(tmp_path, [VERL, VERL], "train.parquet")
    first, second = read(path, label="reward_model.ground_truth")
    others = {name: value for name, value in VERL.items() if name != "prompt"}
    assert first == Prompt(0, CHAT, "4", others)
    assert second.id == 1


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_file_of_slime_is_read_as_it_is(tmp_path, name):
    """--input-key messages --label-key label --metadata-key metadata"""
    row = {"messages": CHAT, "label": "4", "metadata": {"rm_type": "math", "id": 3}, "other": 1}
    path = written(tmp_path, [row], name)
    assert read(path, prompt="messages", metadata="metadata") == [
        Prompt(0, CHAT, "4", {"rm_type": "math", "id": 3})
    ]


def test_metadata_may_be_the_text_of_an_object_or_missing_and_nothing_else(tmp_path):
    rows = [{"prompt": "?", "meta": '{"a": 1}'}, {"prompt": "?", "meta": None}]
    assert [each.metadata for each in read(written(tmp_path, rows), metadata="meta")] == [{"a": 1}, {}]
    with pytest.raises(PromptError, match=r"line 1: `meta` is 3, expected an object"):
        read(written(tmp_path, [{"prompt": "?", "meta": 3}]), metadata="meta")


def test_a_name_is_that_of_a_column_before_it_leads_into_one(tmp_path):
    path = written(tmp_path, [{"prompt": "?", "a.b": 1, "a": {"b": 2, "c": {"d": 3}}}])
    assert read(path, label="a.b")[0].label == 1
    assert read(path, label="a.c.d")[0].label == 3


@pytest.mark.parametrize("label", ["answer", "a.answer", "prompt.answer"])
def test_a_column_that_is_named_must_be_there(tmp_path, label):
    path = written(tmp_path, [{"prompt": "?", "a": {"b": 2}}])
    with pytest.raises(PromptError, match=rf"line 1: expected an object with `prompt` and `{label}`, found"):
        read(path, label=label)


def test_rows_of_parquet_have_no_fields_that_only_other_rows_have(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "?", "name": "Ann"}]},
        {"prompt": [{"role": "user", "content": "?"}]},
    ]
    first, second = read(written(tmp_path, rows, "rows.parquet"))
    assert first.prompt[0].keys() == {"role", "content", "name"}
    assert second.prompt[0].keys() == {"role", "content"}


# ---- templates


def test_a_template_makes_the_prompt_of_columns(tmp_path):
    row = {"question": "2+2", "extra": {"unit": 3}, "label": "4"}
    (prompt,) = read(written(tmp_path, [row]), "Solve {{exactly}}: {question} in {extra.unit}!")
    assert prompt == Prompt(0, "Solve {exactly}: 2+2 in 3!", "4", {"question": "2+2", "extra": {"unit": 3}})


def test_a_template_takes_texts_and_numbers(tmp_path):
    with pytest.raises(PromptError, match=r"line 1: `question` is \[1\], expected a text or a number"):
        read(written(tmp_path, [{"question": [1]}]), "{question}")
    with pytest.raises(PromptError, match=r"line 1: expected an object with `question`, found 'prompt'"):
        read(written(tmp_path, [{"prompt": "?"}]), "{question}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Solve it", "names no column"),
        ("{question", r"expected '}'"),
        ("{}", "is no column"),
        ("{a[0]}", "is no column"),
        ("{a!r}", "is no column"),
        ("{a:>3}", "is no column"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused(template, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(path="a.jsonl", prompt_template=template)


# ---- which file is read how


def test_a_source_has_the_columns_and_template_around_it_unless_it_has_its_own():
    data = DataConfig.model_validate(
        {
            "columns": {"prompt": "question"},
            "sources": [
                {"name": "a", "path": "a.jsonl", "weight": 1},
                {"name": "b", "path": "b.jsonl", "weight": 2, "columns": {"prompt": "problem"}},
                {"name": "c", "path": "c.jsonl", "weight": 3, "prompt_template": "{x}"},
            ],
        }
    )
    files = data_files(data)
    assert [file.columns.prompt for file in files] == ["question", "problem", "question"]
    assert [file.template for file in files] == [None, None, "{x}"]
    assert [(file.name, file.weight, file.setting) for file in files] == [
        ("a", 1, "data.sources.0.path"),
        ("b", 2, "data.sources.1.path"),
        ("c", 3, "data.sources.2.path"),
    ]


def test_held_out_prompts_are_read_as_those_to_train_on_unless_they_say_otherwise():
    data = DataConfig(path="a.jsonl", columns=ColumnsConfig(label="answer"), prompt_template="{q}")
    (same,) = eval_files(EvalConfig(path="b.jsonl"), data)
    assert (same.columns.label, same.template) == ("answer", "{q}")
    (own,) = eval_files(EvalConfig(path="b.jsonl", columns=ColumnsConfig()), data)
    assert (own.columns, own.template) == (ColumnsConfig(), None)
    assert eval_files(EvalConfig(path="b.jsonl"), None)[0].columns == ColumnsConfig()


# ---- examples to learn from


def test_targets_have_any_names(tmp_path):
    path = written(tmp_path, [{"q": "2+2", "a": {"text": "4"}}])
    file = PromptFile(path, ColumnsConfig(prompt="q", label=None))
    (example,) = read_examples(file, ("a.text",), [text_in("a.text")])
    assert (example.prompt.prompt, example.targets) == ("2+2", ("4",))
    with pytest.raises(PromptError, match="there is no column `b`"):
        list(read_examples(file, ("b",), [text_in("b")]))


def test_a_chat_ends_with_the_answer_to_learn(tmp_path):
    chat = [*CHAT, {"role": "assistant", "content": "4"}]
    file = PromptFile(written(tmp_path, [{"messages": chat}]), ColumnsConfig(prompt="messages", label=None))
    (example,) = map(answered_chat, read_prompts(file, [ends_with_answer]))
    assert (example.prompt.prompt, example.targets) == (CHAT, ("4",))
    for wrong in (CHAT, [{"role": "assistant", "content": "4"}], [*CHAT, *CHAT], "text"):
        written(tmp_path, [{"messages": wrong}])
        with pytest.raises(PromptError, match="of which the last one is a text of the role assistant"):
            read_prompts(file, [ends_with_answer])


def repeated(path, value, count, compression="zstd"):
    """A file whose rows all have the value, which it stores once."""
    indices = pyarrow.array(numpy.zeros(count, numpy.int32))
    column = pyarrow.DictionaryArray.from_arrays(indices, [value])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), path, compression=compression)
    return path


def test_a_small_file_that_unpacks_to_a_terabyte_is_refused_at_its_first_rows(tmp_path):
    path = repeated(tmp_path / "rows.parquet", "x" * 10**6, 10**6)
    assert path.stat().st_size < 10_000
    tracemalloc.start()
    with pytest.raises(PromptError, match=r"its first \d+ rows unpack to [\d,]+ bytes, and the file has 2,"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 400 * 2**20
    tracemalloc.stop()


def test_repeated_values_count_as_often_as_they_are_there_whoever_has_written_the_file(tmp_path):
    """Without Arrow's own schema in the file, the reader unpacks them itself."""
    path = tmp_path / "rows.parquet"
    rows = pyarrow.table({"prompt": ["x" * 10**6] * 300})
    pyarrow.parquet.write_table(rows, path, compression="zstd", store_schema=False)
    with pytest.raises(PromptError, match="rows unpack to"):
        read(path)


def test_a_footer_that_speaks_of_more_than_a_file_can_hold_is_refused_unread(tmp_path):
    path = tmp_path / "rows.parquet"
    texts = [f"{number}" + " " * 2**20 for number in range(300)]
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": texts}), path, compression="zstd", use_dictionary=False
    )
    assert path.stat().st_size < 2**18
    with pytest.raises(PromptError, match=r"a column unpacks to 31\d,\d\d\d,\d\d\d bytes"):
        read(path)


def test_rows_that_repeat_each_other_within_reason_are_read(tmp_path):
    assert len(read(repeated(tmp_path / "rows.parquet", "play", 20_000))) == 20_000
