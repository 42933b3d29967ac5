"""The files of the episode log: rows in the order of training steps, bounded in number and bytes.

    episodes/WRITER-NUMBER.jsonl     one JSON object a line, ``step`` first
    episodes/WRITER-NUMBER.parquet   a full file, where the recipe asks for it

Each data-parallel rank writes its own files, so no row needs a lock. A killed run leaves whole lines and at
most one unfinished one, which readers skip. A run that goes on from an older step cuts off the rows of the
steps that it does again.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.backend.monitor.lines import drop_unfinished_line, read_lines

EPISODES = "episodes"
"""Folder of the episode log in the run folder."""

PARTS = 8
"""Number of files that a writer's budget is spread over: deleting the oldest takes away an eighth."""

NAMED = ("reward_parts", "metrics")
"""Columns of numbers by name. Files of parquet hold them as JSON."""

_NAME = re.compile(r"(\d+)-(\d+)\.(jsonl|parquet)")
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
    holds for all of them together. Used from one thread.
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
    ) -> None:
        """``max_bytes``, ``max_rows``: of all writers together."""
        self._folder, self._writer, self._format = folder, writer, format
        self._writers = writers
        self._max_bytes, self._max_rows = max_bytes // writers, max(max_rows // writers, 1)
        self._files: list[_File] | None = None
        self.left_out = 0
        """Number of rows that are larger than a file may be."""

    def append(self, step: int, rows: Iterable[Row]) -> None:
        """Write the rows of a training step, which is not smaller than those before it. Raises OSError.

        The first call removes what an earlier process has written of this step and of later ones.
        """
        if self._files is None:
            self._files = self._opened(step)
        lines = [_encoded({"step": step, **row}) for row in rows]
        pending: list[bytes] = []
        for line in lines:
            if len(line) > self._max_bytes // PARTS:
                self.left_out += 1
                continue
            newest = self._files[-1] if self._files else None
            if newest is None or self._is_full(newest, len(line)):
                self._write(pending)
                pending = []
                self._begin_file()
                newest = self._files[-1]
            pending.append(line)
            newest.size += len(line)
            newest.rows += 1
        self._write(pending)

    def _is_full(self, file: _File, more: int) -> bool:
        most_rows = max(self._max_rows // PARTS, 1)
        is_past = file.size + more > self._max_bytes // PARTS or file.rows >= most_rows
        return is_past or file.path.suffix != ".jsonl"

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            assert self._files
            with self._files[-1].path.open("ab") as file:
                file.write(b"".join(lines))

    def _begin_file(self) -> None:
        """Begin the next file, and delete the oldest ones until a full one fits."""
        assert self._files is not None
        number = self._files[-1].number + 1 if self._files else 0
        if self._files and self._format == "parquet":
            self._pack(self._files[-1])
        room, rows = self._max_bytes // PARTS, max(self._max_rows // PARTS, 1)
        while self._files and (
            sum(file.size for file in self._files) + room > self._max_bytes
            or sum(file.rows for file in self._files) + rows > self._max_rows
        ):
            self._files.pop(0).path.unlink(missing_ok=True)
        self._files.append(_File(self._folder / f"{self._writer:04d}-{number:06d}.jsonl", number, 0, 0))

    def _pack(self, file: _File) -> None:
        if file.path.suffix == ".jsonl":
            rows = list(read_rows(file.path))
            packed = file.path.with_suffix(".parquet")
            _write_parquet(packed, rows)
            file.path.unlink()
            file.path, file.size = packed, packed.stat().st_size

    def _opened(self, step: int) -> list[_File]:
        self._folder.mkdir(parents=True, exist_ok=True)
        own: list[_File] = []
        for path in sorted(self._folder.iterdir()):
            if not (name := _NAME.fullmatch(path.name)):
                continue
            number = int(name[1])
            if number == self._writer or (number >= self._writers and number % self._writers == self._writer):
                if path.suffix == ".jsonl":
                    drop_unfinished_line(path)
                if rows := _cut(path, step):
                    own.append(_File(path, int(name[2]), path.stat().st_size, rows))
        # Those of earlier writers are older; new files go behind all of them.
        own.sort(key=lambda file: (file.path.name.startswith(f"{self._writer:04d}-"), file.path.name))
        if own and not own[-1].path.name.startswith(f"{self._writer:04d}-"):
            own.append(_File(self._folder / f"{self._writer:04d}-000000.jsonl", 0, 0, 0))
        return own


def _encoded(row: Row) -> bytes:
    """Return a row as a line; numbers that are not finite become null."""
    try:
        return msgspec.json.encode(row) + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"


def _cut(path: Path, step: int) -> int:
    """Remove the rows of ``step`` and later ones from a file. Return the number of rows that stay; a file
    without any is deleted.
    """
    if path.suffix == ".parquet":
        rows = list(read_rows(path))
        kept = [row for row in rows if row["step"] < step]
        if kept and len(kept) < len(rows):
            _write_parquet(path, kept)
        number = len(kept)
    else:
        number = end = 0
        with path.open("rb+") as file:
            for line in file:
                found = _STEP.match(line)
                if found is not None and int(found[1]) >= step:
                    file.truncate(end)
                    break
                number, end = number + 1, end + len(line)
    if not number:
        path.unlink()
    return number


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished = path.with_suffix(".unfinished")
    # Parts have names of their own in each row, which are no columns.
    flat = [{**row, **{name: json.dumps(row.get(name, {})) for name in NAMED}} for row in rows]
    pq.write_table(pa.Table.from_pylist(flat), unfinished)  # pyright: ignore[reportUnknownMemberType]
    unfinished.replace(path)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file, without an unfinished line at its end. Raises OSError."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        for row in pq.read_table(path).to_pylist():  # pyright: ignore[reportUnknownMemberType]
            yield {**row, **{name: json.loads(row[name]) for name in NAMED if name in row}}
        return
    yield from read_lines(path)


def episode_files(run: Path) -> list[Path]:
    """Return the files of a run's episode log, the oldest of each writer first. Empty: it has none."""
    folder = run / EPISODES
    return [path for path in sorted(folder.glob("*")) if _NAME.fullmatch(path.name)]
