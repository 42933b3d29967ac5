"""The rows of prompt files, one at a time, and the account of what is wrong with them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

MOST_PROBLEMS = 10
"""Number of wrong rows that a message names. The others are counted."""

READ_BYTES = 2**16
"""Bytes of a column of a parquet file that are read at one time."""
ROWS_AT_A_TIME = 1024
"""Rows of a parquet file in memory beside those that are kept."""

UNPACKED_BYTES = 2**28
"""Bytes that the rows of any parquet file may unpack to, and ``UNPACKED_TIMES`` its own bytes if those are
more. A value that rows repeat is stored once: a file of some kilobytes can hold a terabyte."""
UNPACKED_TIMES = 1000
ROW_BYTES = 64
"""Bytes for which each row counts beside its values."""
REPEATED_BYTES = 2**26
"""Bytes of the rows that are read at one time from a file with less than a byte for each of its rows."""


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
    is_first = True
    if path.is_fifo() or path.is_char_device():
        raise PromptError(f"{path}: this is a pipe or a device; expected a file that can be read again")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if is_first and (reason := _over_lines(line)) is not None:
                return problems.add(number, reason)
            is_first = False
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


def _over_lines(first: bytes) -> str | None:
    """Return why the lines of a file are no rows, if the first one begins an array or a longer object."""
    if re.match(rb"\[\s*($|{)", first.strip()):
        return "a JSON array begins here, expected one object in each line: jq -c '.[]' OLD > NEW.jsonl"
    if first.strip() == b"{":
        return "an object of several lines begins here, expected one in each line: jq -c . OLD > NEW.jsonl"
    return None


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
    stored, unpacked, count = path.stat().st_size, 0, 0
    most = max(UNPACKED_BYTES, UNPACKED_TIMES * stored)
    try:
        # By default the bytes of all row groups are fetched ahead, and kept: the whole file in memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=READ_BYTES) as file:
            largest = _largest_chunk(file.metadata)
            if largest > most:
                raise PromptError(_unpacks(path, stored, f"a column unpacks to {largest:,} bytes", most))
            at_a_time = ROWS_AT_A_TIME
            if stored < file.metadata.num_rows:
                at_a_time = min(at_a_time, max(1, REPEATED_BYTES // max(1, largest)))
            for batch in file.iter_batches(batch_size=at_a_time):
                count += batch.num_rows
                unpacked += ROW_BYTES * batch.num_rows + sum(map(_unpacked_bytes, batch.columns))
                if unpacked > most:
                    found = f"its first {count:,} rows unpack to {unpacked:,} bytes"
                    raise PromptError(_unpacks(path, stored, found, most))
                yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise PromptError(
            f"{path}: not a parquet file: {error}; write it again, or name it .jsonl if it holds JSON lines"
        ) from None


def _largest_chunk(footer: Any) -> int:
    """Return the bytes of the largest part of a column, without compression, as the footer has it."""
    return max(
        (
            footer.row_group(group).column(column).total_uncompressed_size
            for group in range(footer.num_row_groups)
            for column in range(footer.num_columns)
        ),
        default=0,
    )


def _unpacked_bytes(column: Any) -> int:
    """Return the bytes of an Arrow array in which no value stands for several."""
    import pyarrow.compute  # pyright: ignore[reportMissingTypeStubs]

    compute, types = cast("Any", pyarrow.compute), cast("Any", pyarrow.types)
    kind = column.type
    if types.is_dictionary(kind):
        sized = types.is_string(kind.value_type) or types.is_binary(kind.value_type)
        lengths = compute.binary_length(column.dictionary) if sized else None
        return column.nbytes if lengths is None else compute.sum(lengths.take(column.indices)).as_py() or 0
    if types.is_struct(kind):
        return sum(map(_unpacked_bytes, column.flatten()))
    if types.is_list(kind) or types.is_large_list(kind):
        return column.nbytes if not types.is_nested(kind.value_type) else _unpacked_bytes(column.flatten())
    return column.nbytes


def _unpacks(path: Path, stored: int, found: str, most: int) -> str:
    return (
        f"{path}: {found}, and the file has {stored:,}; expected at most {most:,}, which is "
        f"{UNPACKED_TIMES} times its size or 256 MiB. Leave out rows that repeat each other, or write it as "
        ".jsonl"
    )
