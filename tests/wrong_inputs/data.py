"""Wrong data: every row is looked at, and a message names the file, the line and the column."""

import io
import json

import pyarrow
import pyarrow.parquet

from tests.wrong_inputs.case import WrongInput
from tests.wrong_inputs.world import ROWS, lines, rows_with

LINE_3 = "data.path: FOLDER/data.jsonl, line 3: "
USER = {"role": "user", "content": "1+1=?"}


def parquet(rows: list[dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def _row(name: str, *says: str, **changes: object) -> WrongInput:
    """Return the case of other columns in line 3."""
    return WrongInput(name, (LINE_3, *says), files={"data.jsonl": rows_with(**changes)})


def _chat(name: str, *says: str, message: object) -> WrongInput:
    return _row(name, "`prompt`, message 1", *says, prompt=[USER, message])


CASES = (
    WrongInput(
        "an empty file",
        ("data.path: FOLDER/data.jsonl holds no prompts", "expected one or more rows"),
        files={"data.jsonl": ""},
    ),
    WrongInput(
        "bad JSON in line 7",
        (
            "data.path: FOLDER/data.jsonl, line 7: not JSON",
            "expected one object in each line",
            '{"prompt": "?"',
        ),
        files={"data.jsonl": lines([*ROWS[:6]]) + '{"prompt": "?", "label": \n' + lines([*ROWS[6:]])},
    ),
    WrongInput(
        "a folder of data",
        ("data.path = 'FOLDER/all.jsonl': this is a folder, expected a file",),
        overrides=("data.path=FOLDER/all.jsonl",),
        files={"all.jsonl/part.jsonl": ""},
    ),
    WrongInput(
        "an array of JSON",
        ("data.path: FOLDER/data.jsonl, line 1: a JSON array begins here", "jq -c '.[]' OLD > NEW.jsonl"),
        files={"data.jsonl": json.dumps([*ROWS], indent=1)},
    ),
    WrongInput(
        "objects of several lines",
        ("data.path: FOLDER/data.jsonl, line 1: an object of several lines begins here", "jq -c ."),
        files={"data.jsonl": "".join(json.dumps(row, indent=1) + "\n" for row in ROWS)},
    ),
    WrongInput(
        "a .json file",
        ("data.path = 'FOLDER/data.json': expected a file that ends in .jsonl or .parquet", "jq -c '.[]'"),
        overrides=("data.path=FOLDER/data.json",),
        files={"data.json": json.dumps([*ROWS])},
    ),
    _row("no column `prompt`", "found 'label', 'level'", "rename the column", prompt=...),
    _row(
        "a number for a prompt",
        "`prompt` is a number",
        "expected a text or a list of chat messages",
        prompt=5,
    ),
    _row("null for a prompt", "`prompt` is null", "expected a text", prompt=None),
    _row("a prompt of white space", "`prompt` is an empty text", "expected a text", prompt="  \n"),
    _row("a list of texts for a prompt", "`prompt`, message 0: it is a text", "`role`", prompt=["1+1=?"]),
    _chat("a message without content", "its `content` is missing", "empty message", message={"role": "user"}),
    _chat("null for content", "its `content` is null", message={"role": "user", "content": None}),
    _chat("a number for content", "its `content` is a number", message={"role": "user", "content": 5}),
    _chat("a message without a role", "its `role` is null", "such as user", message={"content": "?"}),
    _chat(
        "a role with a spelling mistake",
        "the role is 'asistant'",
        "did you mean 'assistant'",
        message={"role": "asistant", "content": "?"},
    ),
    _chat(
        "a role of nobody's",
        "the role is 'environment'",
        "expected one of system",
        "chat template",
        message={"role": "environment", "content": "?"},
    ),
    _chat(
        "a chat that ends with an answer",
        "the last message is of the assistant",
        "open another answer",
        message={"role": "assistant", "content": "2"},
    ),
    _chat(
        "a part that is no text",
        "parts of the types image",
        "expected text alone",
        message={"role": "user", "content": [{"type": "image", "image": "a.png"}]},
    ),
    _row(
        "the JSON text of a chat",
        "`prompt` is the JSON text of a chat",
        "json.loads",
        prompt=json.dumps([USER]),
    ),
    _row("no label", "`label`: it has no label to compare with", "FinalAnswer", label=...),
    _row("null for a label", "`label`: it has no label to compare with", label=None),
    WrongInput(
        "a label that is no letter",
        (LINE_3, "`label`", "'3'", "expected one of the letters"),
        overrides=("rollout.reward={path: slipstream.rollout.reward.Choice, args: {letters: AB}}",),
        files={"data.jsonl": lines([{"prompt": "?", "label": "A"}] * 2 + [{"prompt": "?", "label": "3"}])},
    ),
    WrongInput(
        "a column twice",
        (LINE_3, "`label` is given more than once"),
        files={
            "data.jsonl": lines([*ROWS[:2]])
            + '{"prompt": "?", "label": "1", "label": "2"}\n'
            + lines([*ROWS[3:]])
        },
    ),
    _row(
        "a prompt that is longer than the context",
        "`prompt` has 602 tokens, expected at most 442",
        "the engines have room for 506, of which rollout.sampling.max_new_tokens takes 64",
        "leave it out: max_prompt_tokens: 442",
        prompt="1" * 600,
    ),
    _row("a number that no message holds", "serialize ints", "write such a value as a text", level=10**30),
    WrongInput(
        "a parquet file that is none",
        ("data.path: FOLDER/data.parquet: not a parquet file", "name it .jsonl"),
        overrides=("data.path=FOLDER/data.parquet",),
        files={"data.parquet": lines([*ROWS])},
    ),
    WrongInput(
        "a row of a parquet file",
        ("data.path: FOLDER/data.parquet, row 2: `prompt` is null",),
        overrides=("data.path=FOLDER/data.parquet",),
        files={"data.parquet": parquet([{"prompt": "?", "label": "1"}, {"prompt": None, "label": "1"}])},
    ),
    WrongInput(
        "a nested null in a parquet file",
        ("data.path: FOLDER/data.parquet, row 1: `prompt`, message 1: its `content` is null",),
        overrides=("data.path=FOLDER/data.parquet",),
        files={
            "data.parquet": parquet([{"prompt": [USER, {"role": "user", "content": None}], "label": "1"}]),
        },
    ),
    WrongInput(
        "a byte order mark",
        ("data.path: FOLDER/data.jsonl, line 1", "byte order mark", "save the file as UTF-8 without one"),
        files={"data.jsonl": b"\xef\xbb\xbf" + lines([*ROWS]).encode()},
    ),
    WrongInput(
        "UTF-16",
        ("data.path: FOLDER/data.jsonl, line 1", "found UTF-16", "iconv"),
        files={"data.jsonl": lines([*ROWS]).encode("utf-16")},
    ),
    WrongInput(
        "Latin-1 in line 3",
        (LINE_3, "found the byte 0xe4, expected UTF-8"),
        files={"data.jsonl": rows_with(prompt="").replace('""', '"ä"').encode("latin-1")},
    ),
    WrongInput(
        "a held-out set with another column",
        ("eval.path: FOLDER/heldout.jsonl, line 1", "found 'question', 'label'"),
        files={"heldout.jsonl": json.dumps({"question": "1+1=?", "label": "2"}) + "\n"},
    ),
    WrongInput(
        "a column that rows do not have",
        ("data.path: FOLDER/data.jsonl, line 1", "`question`", "found 'prompt', 'label', 'level'", "columns"),
        overrides=("data.columns={prompt: question}", "eval.columns={}"),
    ),
    WrongInput(
        "a label within a column that is no object",
        ("data.path: FOLDER/data.jsonl, line 1", "`label.answer`", "found 'prompt', 'label'"),
        overrides=("data.columns={label: label.answer}", "eval.columns={}"),
    ),
    WrongInput(
        "a template with a column that rows do not have",
        ("data.path: FOLDER/data.jsonl, line 1", "`question`", "found 'prompt'"),
        overrides=("data.prompt_template='Solve: {question}'", "eval.columns={}"),
    ),
    WrongInput(
        "metadata that is no object",
        ("data.path: FOLDER/data.jsonl, line 1", "`level` is 1", "expected an object"),
        overrides=("data.columns={metadata: level}", "eval.columns={}"),
    ),
    WrongInput(
        "a limit that no prompt keeps",
        ("data.path: FOLDER/data.jsonl", "9 of 9 prompts have more than 1 tokens", "data.max_prompt_tokens"),
        overrides=("data.max_prompt_tokens=1",),
    ),
    WrongInput(
        "a data set of the hub without a network",
        ("data.path: hf://datasets/openai/gsm8k/main/train", "cannot be downloaded", "download the files"),
        overrides=("data.path=hf://datasets/openai/gsm8k/main/train",),
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    WrongInput(
        "a held-out prompt without room for its completion",
        (
            "eval.path: FOLDER/heldout.jsonl, line 1",
            "102 tokens, expected at most 6",
            "eval.sampling.max_new_tokens",
        ),
        overrides=("eval.sampling.max_new_tokens=500",),
        files={"heldout.jsonl": lines([{"prompt": "1" * 100, "label": "2"}])},
    ),
    WrongInput(
        "twenty wrong rows",
        ("line 3: ", "line 12: ", "10 further lines are wrong"),
        files={"data.jsonl": lines([*ROWS[:2], *[{"prompt": 5}] * 20])},
        count=11,
    ),
    WrongInput(
        "wrong data, at the start of a run",
        (LINE_3, "its `content` is missing"),
        arguments=("train", "FOLDER/recipe.yaml"),
        files={"data.jsonl": rows_with(prompt=[{"role": "user"}])},
    ),
)
