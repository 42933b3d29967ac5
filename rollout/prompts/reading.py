"""Reads prompt sets: every row is looked at, and everything that is wrong is said at once.

file ──► rows, one at a time ──► columns ──► prompt ──► checks of whoever reads ──► Prompt
            │                       │           │            │
            └───────────────────────┴───────────┴────────────┴──► problems: file, line, value, expectation
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from slipstream.rollout.prompts.chat import prompt_problem
from slipstream.rollout.trajectory import Prompt

MOST_PROBLEMS = 10
"""Number of wrong rows that a message names. The others are counted."""

ROWS_AT_A_TIME = 1024
"""Rows of a parquet file in memory beside those that are kept."""

Check = Callable[[Prompt], str | None]
"""Returns what is wrong with a prompt, beginning with the column; None: nothing."""


class PromptError(ValueError):
    """A prompt file cannot be used. Each line of the message names the file, the line and what was
    expected."""


class _Problems:
    """What is wrong with the rows of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: list[str] = []
        self._count = 0

    def add(self, line: int, reason: str) -> None:
        self._count += 1
        if len(self._named) < MOST_PROBLEMS:
            self._named.append(f"{self._path}, {row_word(self._path)} {line}: {reason}")

    def raise_any(self) -> None:
        if not self._count:
            return
        further = self._count - len(self._named)
        more = [f"{self._path}: {further} further {row_word(self._path)}s are wrong"] if further else []
        raise PromptError("\n".join([*self._named, *more]))


def row_word(path: Path | str) -> str:
    """Return how a message calls a row of this file."""
    return "row" if str(path).endswith(".parquet") else "line"


@dataclass(frozen=True)
class Example:
    """A prompt with the texts to learn from, one for each column that was asked for."""

    prompt: Prompt
    targets: tuple[str, ...]


def read_prompts(path: Path, checks: Sequence[Check] = ()) -> list[Prompt]:
    """Read all prompts of a jsonl or parquet file, numbered from 0 in file order.

    Raises PromptError with every wrong row, and OSError.
    """
    return list(checked_prompts(path, checks))


def read_examples(path: Path, columns: Sequence[str], checks: Sequence[Check]) -> list[Example]:
    """Read all prompts of a file, each with what it has in every one of ``columns``, in their order.

    ``checks``: ``text_in`` of each column among them. Raises PromptError with every wrong row, and OSError.
    """
    return [
        Example(prompt, tuple(prompt.metadata[column] for column in columns))
        for prompt in checked_prompts(path, checks)
    ]


def text_in(column: str) -> Check:
    """Return a check that a column besides the prompt holds a text."""

    def check(prompt: Prompt) -> str | None:
        if column not in prompt.metadata:
            return f"there is no column `{column}`; expected a text to learn from"
        text = prompt.metadata[column]
        if isinstance(text, str) and text:
            return None
        return f"`{column}` is {shown(text)}, expected a text that is not empty"

    return check


def checked_prompts(path: Path, checks: Sequence[Check] = ()) -> Iterator[Prompt]:
    """Yield the prompts of a file that nothing is wrong with, and hold none of them.

    Raises PromptError with every wrong row behind the last one, and OSError.
    """
    problems, count = _Problems(path), 0
    for line, row in _rows(path, problems):
        prompt = _prompt(row, count, str(path), line)
        count += 1
        reason = (
            prompt
            if isinstance(prompt, str)
            else next(filter(None, (check(prompt) for check in checks)), None)
        )
        if reason is not None:
            problems.add(line, reason)
        elif isinstance(prompt, Prompt):
            yield prompt
    problems.raise_any()
    if not count:
        raise PromptError(f"{path} holds no prompts; expected one or more rows with `prompt` (and `label`)")


def _prompt(row: object, number: int, file: str, line: int) -> Prompt | str:
    """Return the prompt of a row, or what is wrong with it."""
    if not isinstance(row, dict):
        return f"it holds {shown(row)}, expected an object with `prompt` (and `label`)"
    columns = cast("dict[str, object]", row)
    if "prompt" not in columns:
        names = ", ".join(map(repr, columns)) or "no columns"
        return f"expected an object with `prompt` (and `label`), found {names}: rename the column"
    if (reason := prompt_problem(columns["prompt"])) is not None:
        return reason
    try:
        msgspec.msgpack.encode(columns)  # as messages to other processes hold them
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        return f"{error}; write such a value as a text"
    prompt, label = cast("Any", columns.pop("prompt")), columns.pop("label", None)
    return Prompt(number, prompt, label, columns, file, line)


def shown(value: object) -> str:
    """Return a value as JSON writes it, cut off where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


# ---- rows


class _TwiceNamed(ValueError):
    """An object of JSON has a key twice, of which a reader would lose one."""


def _columns(pairs: list[tuple[str, object]]) -> dict[str, object]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _TwiceNamed(
            f"`{twice}` is given more than once, and only one of them would count; remove the others"
        )
    return columns


_DECODER = json.JSONDecoder(object_pairs_hook=_columns)


def _rows(path: Path, problems: _Problems) -> Iterator[tuple[int, object]]:
    """Yield the number of each row or line, from 1, and what it holds, if it can be read."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path), start=1)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, _DECODER.decode(line.decode().strip())
            except UnicodeDecodeError as error:
                problems.add(number, _encoding(line, error))
                if line.startswith(_UTF_16):
                    return  # no further line is one
            except _TwiceNamed as error:
                problems.add(number, str(error))
            except (ValueError, RecursionError) as error:
                problems.add(number, _no_json(line, error))


_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_UTF_8_MARK = "\ufeff"


def _encoding(line: bytes, error: UnicodeDecodeError) -> str:
    found = "UTF-16" if line.startswith(_UTF_16) else f"the byte 0x{error.object[error.start]:02x}"
    return f"not JSON: found {found}, expected UTF-8: convert the file (iconv -t UTF-8)"


def _no_json(line: bytes, error: Exception) -> str:
    text = line.decode(errors="replace")
    if text.startswith(_UTF_8_MARK):
        return "not JSON: found a byte order mark, expected `{`: save the file as UTF-8 without one"
    start = text.strip()[:60]
    return f"not JSON: {error}; expected one object in each line, found {start}"


def _parquet_rows(path: Path) -> Iterator[object]:
    import pyarrow  # pyright: ignore[reportMissingTypeStubs]
    import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]

    arrow, parquet = cast("Any", pyarrow), cast("Any", pyarrow.parquet)  # pyarrow has no types
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME):
                yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise PromptError(
            f"{path}: not a parquet file: {error}; write it again, or name it .jsonl if it holds JSON lines"
        ) from None
