"""The files of the episode log: rows in the order in which episodes end, bounded in number and bytes.

    episodes/WRITER-NUMBER.jsonl     one JSON object a line, ``step`` first
    episodes/WRITER-NUMBER.parquet   a full file, where the recipe asks for it
    episodes/cWRITER-NUMBER.*        those of collectors: episodes that are never trained

Each data-parallel rank and each collector writes its own files, so no row needs a lock. Rows wait in memory
for a disk that takes none (``LineFile``), as many as the newest file has room for. A killed run leaves whole
lines and at most one unfinished one, which readers skip. A run that goes on from an older step removes
what it does again: the rows of later training steps, and those of later evaluations. A group that was given
up stays so, and its rows stay.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

from slipstream.configs.schema import EpisodeLogConfig
from slipstream.rollout.system.lines import LineFile, drop_unfinished_line, read_lines
from slipstream.rollout.system.log_thread import to_stderr

EPISODES = "episodes"
"""Folder of the episode log in the run folder."""

COLLECTORS = "c"
"""Begin of the names of collectors' files."""

PARTS = 8
"""Number of files that a writer's budget is spread over: deleting the oldest takes away an eighth."""

NAMED = ("reward_parts", "metrics")
"""Columns of numbers by name. Files of parquet hold them as JSON."""

TUPLES = {
    "lags": {"lag": "whole", "tokens": "whole"},
    "spans": {"version": "whole", "trained": "flag", "end": "whole"},
    "turn_rewards": {"end": "whole", "reward": "number"},
}
"""Columns of tuples. Files of parquet hold them as structs with these fields."""

OF_TOKENS = ("logprob", "advantage", "proximal_logprob")
"""Numbers of single tokens."""

UNTRAINED_SHARE = 1 / 4
"""Share of the bytes and rows that episodes have which are never trained, where there are collectors."""

_NAME = re.compile(r"(c?)(\d+)-(\d+)\.(jsonl|parquet)")
_STEP = re.compile(rb'\{"step":\s*(\d+)')

Row = Mapping[str, Any]


@dataclass
class _File:
    path: Path
    number: int
    size: int
    rows: int


class EpisodeFiles:
    """The files of one writer. Files of writers that a run no longer has are taken over, so that the bound
    holds for all writers of a kind together. Used from one thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writer: int,
        writers: int,
        max_bytes: int,
        max_rows: int,
        format: Literal["jsonl", "parquet"] = "jsonl",
        of_untrained: bool = False,
        note: Callable[[str], None] = to_stderr,
    ) -> None:
        """``max_bytes``, ``max_rows``: of all writers of the kind together. ``of_untrained``: the writer is a
        collector. ``note``: as of ``LineFile``.
        """
        self._folder, self._writer, self._format = folder, writer, format
        self._kind = COLLECTORS if of_untrained else ""
        self._writers = writers
        self._max_bytes, self._max_rows = max_bytes // writers, max(max_rows // writers, 1)
        self._note = note
        self._first: int | None = None
        """Step of the first rows of this process."""
        self._files: list[_File] | None = None
        self._lines: LineFile | None = None
        """The newest file while it is open."""
        self.left_out = 0
        """Number of rows that are larger than a file may be."""

    def append(self, step: int, rows: Iterable[Row]) -> None:
        """Write rows of a training step. Raises OSError when a file cannot be read, begun or packed.

        The first call of a rank removes what an earlier process has written of this step and of later ones;
        no later call has a smaller step.
        """
        self._first = step if self._first is None else self._first
        if self._files is None:
            self._files = self._opened(None if self._kind else self._first)
        for line in [_encoded({"step": step, **row}) for row in rows]:
            size = len(line) + 1
            if size > self._max_bytes // PARTS:
                self.left_out += 1
                continue
            if (lines := self._with_room(size)) is None:
                continue
            lines.add(line)
            self._files[-1].size += size
            self._files[-1].rows += 1
        if self._lines is not None:
            self._lines.flush()

    def drop(self, is_void: Callable[[Row], bool]) -> None:
        """Remove rows from all files of the writer. Raises OSError."""
        if self._files is None:
            self._files = self._opened(None)
        if self._lines is not None:
            if not self._lines.flush():
                raise OSError(f"{self._files[-1].path.name} has rows that wait for the disk")
            self._close()
        for file in self._files:
            if file.rows:
                file.rows = _keep(file.path, lambda row: not is_void(row), file.rows)
                file.size = file.path.stat().st_size if file.rows else 0
        # The newest one gives the next its number.
        self._files = [file for file in self._files if file.rows or file is self._files[-1]]

    def _is_full(self, file: _File, more: int) -> bool:
        most_rows = max(self._max_rows // PARTS, 1)
        is_past = file.size + more > self._max_bytes // PARTS or file.rows >= most_rows
        return is_past or file.path.suffix != ".jsonl"

    def _with_room(self, size: int) -> LineFile | None:
        """Return the newest file, which has room for a line; None: a full one waits for the disk."""
        assert self._files is not None
        if not self._files or self._is_full(self._files[-1], size):
            if self._lines is not None and not self._lines.flush():
                self._lines.left_out += 1
                return None
            self._begin_file()
        if self._lines is None:
            self._lines = LineFile(self._files[-1].path, self._note)
        return self._lines

    def _close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _begin_file(self) -> None:
        """Begin the next file, and delete the oldest ones until a full one fits."""
        assert self._files is not None
        self._close()
        number = self._files[-1].number + 1 if self._files else 0
        if self._files and self._format == "parquet":
            self._pack(self._files[-1])
        room, rows = self._max_bytes // PARTS, max(self._max_rows // PARTS, 1)
        while self._files and (
            sum(file.size for file in self._files) + room > self._max_bytes
            or sum(file.rows for file in self._files) + rows > self._max_rows
        ):
            self._files.pop(0).path.unlink(missing_ok=True)
        self._files.append(_File(self._folder / f"{self._prefix}{number:06d}.jsonl", number, 0, 0))

    @property
    def _prefix(self) -> str:
        return f"{self._kind}{self._writer:04d}-"

    def _pack(self, file: _File) -> None:
        if file.path.suffix == ".jsonl":
            rows = list(read_rows(file.path))
            packed = file.path.with_suffix(".parquet")
            _write_parquet(packed, rows)
            file.path.unlink()
            file.path, file.size = packed, packed.stat().st_size

    def _opened(self, step: int | None) -> list[_File]:
        """Return the files of the writer, without the rows of ``step`` and later ones; None: with all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        own: list[_File] = []
        for path in sorted(self._folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            if name is None or name[1] != self._kind:
                continue
            number = int(name[2])
            if number == self._writer or (number >= self._writers and number % self._writers == self._writer):
                if path.suffix == ".jsonl":
                    drop_unfinished_line(path)
                if rows := _cut(path, step):
                    own.append(_File(path, int(name[3]), path.stat().st_size, rows))
        # Files of earlier writers are older, so they come first; new files are added at the end.
        own.sort(key=lambda file: (file.path.name.startswith(self._prefix), file.path.name))
        if own and not own[-1].path.name.startswith(self._prefix):
            own.append(_File(self._folder / f"{self._prefix}000000.jsonl", 0, 0, 0))
        return own


def open_files(
    settings: EpisodeLogConfig, folder: Path, *, writer: int, writers: int, of_untrained: bool = False
) -> EpisodeFiles:
    """Return the files of a writer as a recipe bounds them. ``writers``: number of its kind."""
    share = UNTRAINED_SHARE if of_untrained else 1 - UNTRAINED_SHARE
    return EpisodeFiles(
        folder,
        writer=writer,
        writers=writers,
        max_bytes=int(share * settings.max_mib * 2**20),
        max_rows=int(share * settings.max_rows),
        format=settings.format,
        of_untrained=of_untrained,
    )


def _encoded(row: Row) -> bytes:
    """Return a row as a line, without its end; numbers that are not finite become null."""
    try:
        return msgspec.json.encode(row)
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(row, ensure_ascii=False).encode(errors="replace")


def _cut(path: Path, step: int | None) -> int:
    """Remove the rows of ``step`` and later ones from a file. Return the number of rows that stay; a file
    without any is deleted.
    """
    if path.suffix == ".parquet":
        rows = list(read_rows(path))
        number = _keep(path, lambda row: step is None or row["step"] < step, len(rows))
    else:
        number = end = 0
        with path.open("rb+") as file:
            for line in file:
                found = _STEP.match(line)
                if step is not None and found is not None and int(found[1]) >= step:
                    file.truncate(end)
                    break
                number, end = number + 1, end + len(line)
    if not number:
        path.unlink(missing_ok=True)
    return number


def _keep(path: Path, is_kept: Callable[[Row], bool], rows: int) -> int:
    """Keep some of the ``rows`` of a file. Return their number; a file without any is deleted."""
    kept = [row for row in read_rows(path) if is_kept(row)]
    if not kept:
        path.unlink()
    elif len(kept) < rows and path.suffix == ".parquet":
        _write_parquet(path, kept)
    elif len(kept) < rows:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(b"".join(_encoded(row) + b"\n" for row in kept))
        unfinished.replace(path)
    return len(kept)


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished = path.with_suffix(".unfinished")
    table = pa.Table.from_pylist(list(map(_flat, rows)), schema=_schema())
    pq.write_table(table, unfinished)  # pyright: ignore[reportUnknownMemberType]
    unfinished.replace(path)


def _schema() -> "pa.Schema":
    """Return the schema of files of parquet: the same whatever the rows have."""
    import pyarrow as pa

    text, whole, number = pa.string(), pa.int64(), pa.float64()
    types = {"whole": whole, "number": number, "flag": pa.bool_()}
    lists = {
        column: pa.list_(pa.struct([(name, types[kind]) for name, kind in fields.items()]))
        for column, fields in TUPLES.items()
    }
    return pa.schema(
        [(name, whole) for name in ("step", "group", "episode", "version")]
        + [(name, text) for name in ("end", "reason", "prompt", "response", "finish", *NAMED)]
        + [(name, number) for name in ("reward", "advantage")]
        + [(name, whole) for name in ("response_tokens", "trained_tokens", "head_lag")]
        + list(lists.items())
        + [("tokens", pa.struct([("text", pa.list_(text))] + [(n, pa.list_(number)) for n in OF_TOKENS]))]
    )


def _flat(row: Row) -> dict[str, object]:
    """Return a row as files of parquet hold it: what has names of its own in each row is no column."""
    flat = {**row, **{name: json.dumps(row.get(name, {})) for name in NAMED}}
    for column, fields in TUPLES.items():
        flat[column] = [dict(zip(fields, each, strict=True)) for each in row.get(column, ())]
    return flat


def _unflattened(row: Row) -> dict[str, object]:
    """Return a row of a file of parquet as a line of JSON would have it."""
    whole = {**row, **{name: json.loads(row[name]) for name in NAMED}}
    for column in TUPLES:
        whole[column] = [list(each.values()) for each in row[column]]
    tokens = row["tokens"] or {}
    whole["tokens"] = {name: values for name, values in tokens.items() if values is not None}
    return whole


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file, without an unfinished line at its end. Raises OSError."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for row in pq.read_table(path).to_pylist():  # pyright: ignore[reportUnknownMemberType]
            yield _unflattened(row)
        return
    yield from read_lines(path)


def episode_files(run: Path) -> list[Path]:
    """Return the files of a run's episode log, the oldest of each writer first. Empty: it has none."""
    folder = run / EPISODES
    return [path for path in sorted(folder.glob("*")) if _NAME.fullmatch(path.name)]
