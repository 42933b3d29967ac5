"""The rows of prompt files, one at a time, and the account of what is wrong with them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

MOST_PROBLEMS = 10
"""Number of wrong rows that a message names. The others are counted."""

READ_BYTES = 2**16
"""Bytes of a column of a parquet file that are read at one time."""
ROWS_AT_A_TIME = 1024
"""Rows of a parquet file in memory beside those that are kept."""


class PromptError(ValueError):
    """A prompt file cannot be used. Each line of the message names the file, the line and what was
    expected."""


class Problems:
    """The problems of the rows of one file."""

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


def shown(value: object) -> str:
    """Return a value as JSON writes it, cut off where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def rows(path: Path, problems: Problems) -> Iterator[tuple[int, object]]:
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
        # By default the bytes of all row groups are fetched ahead, and kept: the whole file in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME):
                yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise PromptError(
            f"{path}: not a parquet file: {error}; write it again, or name it .jsonl if it holds JSON lines"
        ) from None
