"""The program in a response, and the cases that it is tested with, as a prompt set spells them. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from slipstream.rollout.tokens.trajectory import Prompt

FORMS = (
    "expected a list of {input: ..., output: ...}, {inputs: [...], outputs: [...]}, or a list of assert "
    "statements, as a value or as JSON"
)

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


@dataclass(frozen=True)
class StdioCase:
    """The standard input of a program, and the output that it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class AssertCase:
    """Statements that must run without an error after the program."""

    statements: str


Case = StdioCase | AssertCase


def last_block(response: str) -> str | None:
    """Return the content of the last fenced block that is closed; None: there is none.

    A block ends with a line of as many of its fence's characters or more, as CommonMark says (4.5).
    """
    fence, start, last = "", 0, None
    lines = response.splitlines()
    for number, line in enumerate(lines):
        mark = _FENCE.fullmatch(line)
        if mark is None:
            continue
        if not fence:
            fence, start = mark[1], number + 1
        elif mark[1].startswith(fence) and not mark[2].strip():
            last, fence = "\n".join(lines[start:number]) + "\n", ""
    return last


def cases_of(prompt: Prompt, column: str) -> list[Case]:
    """Return the cases in the label, or in another column of the prompt. Raises ValueError."""
    value: object = prompt.label if column == "label" else prompt.metadata.get(column)
    where = f"{prompt.reference}: {column}"
    if isinstance(value, str):
        value = _from_json(value)
    try:
        cases = list(_cases(value))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {FORMS}") from None
    if not cases:
        raise ValueError(f"{where} has no cases; {FORMS}")
    return cases


def _from_json(text: str) -> object:
    """Return the value of a JSON text. A JSON string, or a text that is no JSON, becomes a list of one."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return [value] if isinstance(value, str) else value


def _cases(value: object) -> Iterator[Case]:
    if isinstance(value, Mapping):
        columns = cast("Mapping[str, object]", value)
        inputs, outputs = columns.get("inputs"), columns.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError("found an object without the lists `inputs` and `outputs`")
        ins, outs = cast("list[object]", inputs), cast("list[object]", outputs)
        if len(ins) != len(outs):
            raise ValueError(f"found {len(ins)} inputs and {len(outs)} outputs")
        for stdin, stdout in zip(ins, outs, strict=True):
            yield StdioCase(_text(stdin), _text(stdout))
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[object]", value):
            yield _case(each)
    else:
        raise ValueError(f"found {type(value).__name__}")


def _case(value: object) -> Case:
    kind = type(value).__name__
    if isinstance(value, str):
        return AssertCase(value)
    if isinstance(value, Mapping):
        columns = cast("Mapping[str, object]", value)
        if columns.keys() >= {"input", "output"}:
            return StdioCase(_text(columns["input"]), _text(columns["output"]))
    raise ValueError(f"found a case of type {kind} without `input` and `output`")


def _text(value: object) -> str:
    """Return the text of a stream. Some data sets have a list of its lines."""
    kind = type(value).__name__
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        lines = cast("list[object]", value)
        if all(isinstance(line, str) for line in lines):
            return "\n".join(map(str, lines))
    raise ValueError(f"found an input or output of type {kind}")


def same_output(printed: str, expected: str) -> bool:
    """True if two outputs are equal, except for white space at the ends of lines and of the text."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
