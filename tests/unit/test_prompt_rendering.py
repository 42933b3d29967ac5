"""Every text of a row is in the prompt that the chat template writes, and nothing that nobody wrote."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slipstream.backend.commands.prompt_survey import Survey
from slipstream.backend.driver.start.data_checks import TemplateCheck, example_checks
from slipstream.backend.quickstart.tokenizer import build_tokenizer
from slipstream.configs.schema import PromptFile
from slipstream.configs.schema.data import ColumnsConfig
from slipstream.rollout.prompts import PromptError, read_prompts
from slipstream.rollout.tokens.trajectory import Prompt

USER = {"role": "user", "content": "1+1"}
PLAIN = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{%- endif %}"
)
TRIMMING = PLAIN.replace("m.content }}", "m.content | trim }}")
TEXTS_ONLY = PLAIN.replace("m.content }}", "m.content if m.content is string else '' }}")
TOOL_JSON = PLAIN.replace("m.content }}", "m.content | tojson if m.role == 'tool' else m.content }}")
PARTS_ONLY = PLAIN.replace("m.content }}", "m.content | map(attribute='text') | join }}")
NO_SYSTEM = PLAIN.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
FIRST_USER = PLAIN.replace("messages %}", "messages[:1] %}", 1)
REPEATING = PLAIN.replace("m.content }}", "m.content }}{{ ' again' if '=' in m.content }}")


def tokenizer_of(template: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def problem(template: str, *messages: dict) -> str | None:
    return TemplateCheck(tokenizer_of(template), None)(Prompt(0, list(messages), None, {}, "a.jsonl", 1))


TOOL_CHAT = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": 'said "4"\nand\\more'},
]


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (PLAIN, [USER]),
        (PLAIN, [{"role": "system", "content": ""}, USER]),
        (PLAIN, [USER, {"role": "assistant", "content": "<think>hm</think>2"}, USER]),
        (TRIMMING, [{"role": "user", "content": " 1+1\n"}]),
        (PLAIN, [{"role": "user", "content": r"what is \nu + \frac{1}{2} of {x}?"}]),
        (PLAIN, [USER, USER]),
        (TOOL_JSON.replace("<{{ m.role", "{{ m.tool_calls }}<{{ m.role"), TOOL_CHAT),
    ],
)
def test_chats_that_are_written_as_they_are_pass(template: str, messages: list[dict]):
    assert problem(template, *messages) is None


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            NO_SYSTEM,
            [{"role": "system", "content": "be brief"}, USER],
            "message 0: .*does not write its text 'be",
        ),
        (
            FIRST_USER,
            [USER, {"role": "user", "content": "and 2?"}],
            "message 1: .*does not write its text 'and 2",
        ),
        (PLAIN, TOOL_CHAT, "message 1: .*does not write its text 'f'"),
        (REPEATING, [{"role": "user", "content": "1=?"}], "writes .*again.* because of its texts"),
        (
            PLAIN,
            [USER, {"role": "assistant", "content": "it is"}],
            "message 1: the last message is of the assist",
        ),
        (
            PLAIN,
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            "types image, expected text",
        ),
        (
            PLAIN,
            [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "?"}]}],
            "types im",
        ),
    ],
)
def test_texts_that_are_lost_or_added_are_refused(template: str, messages: list[dict], reason: str):
    found = problem(template, *messages)
    assert found is not None
    assert re.search(reason, found), found


def test_the_content_of_a_later_prompt_of_the_same_shape_counts():
    check = TemplateCheck(tokenizer_of(REPEATING), None)
    assert check(Prompt(0, [USER], None, {}, "a.jsonl", 1)) is None
    assert check(Prompt(1, [{"role": "user", "content": "1=?"}], None, {}, "a.jsonl", 2))


# ---- parts of text


def read(folder: Path, rows: list[dict], name: str = "a.jsonl", column: str = "prompt") -> list[Prompt]:
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(PromptFile(path, ColumnsConfig(prompt=column)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_parts_of_text_become_one_text(name: str, tmp_path: Path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    (prompt,) = read(tmp_path, [{"prompt": [{"role": "user", "content": parts}]}], name)
    assert prompt.prompt == [{"role": "user", "content": "What is 2+2?"}]
    for template in (PLAIN, TEXTS_ONLY):
        assert TemplateCheck(tokenizer_of(template), None)(prompt) is None
    assert "does not write its text" in str(TemplateCheck(tokenizer_of(PARTS_ONLY), None)(prompt))


def test_an_answer_to_learn_may_have_parts_of_text_and_no_others():
    parts = [{"type": "image"}]
    chat = [USER, {"role": "assistant", "content": parts}]
    (check, *_) = example_checks(tokenizer_of(PLAIN), None, ())
    assert "types image" in str(check(Prompt(0, chat, None, {}, "a.jsonl", 1)))


# ---- chats as texts, and tools


@pytest.mark.parametrize("text", [json.dumps([USER]), json.dumps([USER], indent=1), json.dumps(USER)])
def test_the_json_text_of_a_chat_is_refused(text: str, tmp_path: Path):
    with pytest.raises(PromptError, match="line 1: `question` is the JSON text of a chat"):
        read(tmp_path, [{"question": text}], column="question")


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", '{"a": 1}', "[brackets] of a text", "{", "[]", '[{"role": "a"}]']
)
def test_other_texts_with_brackets_are_prompts(text: str, tmp_path: Path):
    assert read(tmp_path, [{"prompt": text}])[0].prompt == text


@pytest.mark.parametrize("tools", [[{"type": "function"}], json.dumps([{"type": "function"}])])
def test_a_column_of_tools_that_nothing_reads_is_told(tools: object):
    for writes, count in ((True, 1), (False, 0)):
        survey = Survey("data.path", build_tokenizer(), None, writes_prompts=writes)
        survey.see(Prompt(0, "a", None, {}, "a.jsonl", 1))
        survey.see(Prompt(1, "b", None, {"tools": tools}, "a.jsonl", 2))
        told = [line for line in survey.warnings() if "`tools`" in line]
        assert len(told) == count
        assert all("a.jsonl, line 2" in line for line in told)
