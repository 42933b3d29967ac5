"""The prompts of slime's data source, in the order in which it gives them.

data source, in a process of its own ──a few ahead──► file of drawn prompts ──at(position)──► groups

Each prompt is on disk before a group is admitted for it, so that a group keeps its prompt whatever ends: the
collector, the driver, or the process of the data source. A resumed run reads what was drawn, and lets the
source go on behind it.
"""

import asyncio
import os
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from slipstream.configs.schema import RunConfig
from slipstream.rollout.changes import Changes
from slipstream.rollout.compat.slime.data_source_process import SourceRequest, SourceSetup, rows_of
from slipstream.rollout.compat.slime.episode_samples import DRAWN
from slipstream.rollout.compat.slime.hook_process import LOG, HookProcess
from slipstream.rollout.trajectory import Prompt

FILE = "drawn-prompts.jsonl"
"""In the run folder."""

SERVE = "slipstream.rollout.compat.slime.data_source_process.serve"

SAVE_EVERY = 1000
"""Groups after which the state of the data source is saved."""

CACHED = 4096
"""Prompts that are kept in memory."""


class _Row(msgspec.Struct):
    prompt: str | list[dict[str, Any]] = ""
    label: Any = None
    metadata: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    saved: int | None = None
    """Number under which the state behind all groups so far was saved: a row of its own."""


class DrawnPrompts:
    """The ``PromptSource`` of a recipe with a data source. Single event loop."""

    def __init__(self, path: Path) -> None:
        """``path``: the file. A line that was cut off is removed. Raises OSError and msgspec.MsgspecError."""
        self._path = path
        self._offsets = array("q")
        """Where the line of each group begins."""
        self.saved: int | None = None
        """Number under which the state of the source was saved last; None: never."""
        self.drawn_behind = 0
        """Groups that were drawn behind that state."""
        self._position = 0
        self._changes = Changes()
        self._listener: Callable[[], None] = lambda: None
        self._file = path.open("ab+")
        self._end = self._read()
        self._row = lru_cache(CACHED)(self._row_at)

    # ---- PromptSource

    @property
    def position(self) -> int:
        """Position of the next prompt for which no group was admitted."""
        return self._position

    def go_to(self, position: int) -> None:
        """Go on behind this many prompts."""
        self._position = position
        self._changes.notify()

    def draw(self) -> int:
        """Return the position of the next prompt, and go on behind it."""
        self.go_to(self._position + 1)
        return self._position - 1

    @property
    def is_ready(self) -> bool:
        """True if the next prompt is there."""
        return self._position < len(self._offsets)

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position that was drawn. Raises OSError."""
        row = self._row(position)
        return Prompt(position, row.prompt, row.label, {**row.metadata, DRAWN: row.samples})

    # ---- drawing

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` whenever prompts have come."""
        self._listener = then

    async def lacks(self, ahead: int) -> int:
        """Wait until fewer than ``ahead`` prompts are there, and return how many are missing."""
        return await self._changes.first(lambda: max(0, self._position + ahead - len(self._offsets)) or None)

    async def add(self, lines: list[bytes]) -> None:
        """Write groups down, and hand them out from now on. Raises OSError."""
        start = self._end
        await self._write(lines)
        for line in lines:
            self._offsets.append(start)
            start += len(line) + 1
        self.drawn_behind += len(lines)
        self._listener()

    async def note_saved(self, number: int) -> None:
        """Write down that the state of the source was saved. Raises OSError."""
        await self._write([msgspec.json.encode({"saved": number})])
        self.saved, self.drawn_behind = number, 0

    @property
    def drawn(self) -> int:
        """Number of groups drawn so far."""
        return len(self._offsets)

    def close(self) -> None:
        self._file.close()

    async def _write(self, lines: list[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)

        def write() -> None:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())

        await asyncio.to_thread(write)
        self._end += len(data)

    def _read(self) -> int:
        """Take up what the file holds. Return its length in bytes."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(end)
                break
            if line.startswith(b'{"saved"'):
                self.saved, self.drawn_behind = msgspec.json.decode(line, type=_Row).saved, 0
            else:
                self._offsets.append(end)
                self.drawn_behind += 1
            end += len(line)
        return end

    def _row_at(self, position: int) -> _Row:
        if not 0 <= position < len(self._offsets):
            raise OSError(
                f"{self._path} holds {len(self._offsets)} groups, expected the one at position {position}: "
                "the file has lost groups that the run's ledger knows"
            )
        with self._path.open("rb") as file:
            file.seek(self._offsets[position])
            return msgspec.json.decode(file.readline(), type=_Row)


def drawn_prompts(config: RunConfig) -> DrawnPrompts | None:
    """Return the prompts of a recipe's data source; None: it names none. Raises OSError and MsgspecError."""
    hooks = config.rollout.hooks
    return DrawnPrompts(config.run.folder / FILE) if hooks is not None and hooks.data_source else None


class Drawing:
    """Keeps prompts drawn ahead of the groups. ``close`` it."""

    def __init__(self, config: RunConfig, prompts: DrawnPrompts, logs: Path, *, ahead: int) -> None:
        """``ahead``: number of prompts that are drawn before they are needed."""
        hooks = config.rollout.hooks
        assert hooks is not None
        assert hooks.data_source is not None
        self._hook = f"rollout.hooks.data_source ({hooks.data_source})"
        self._timeout_s = hooks.batch_timeout_s
        self._batch = max(1, config.rollout.batch_size)
        self._prompts = prompts
        self._ahead = ahead
        setup = SourceSetup(
            config.model_dump_json().encode(), hooks.data_source, prompts.saved, prompts.drawn_behind
        )
        self._process = HookProcess(SERVE, msgspec.msgpack.encode(setup), logs / LOG)

    async def run(self) -> None:
        """Draw until cancelled. Raises HookProcessFailed and OSError."""
        while True:
            missing = await self._prompts.lacks(self._ahead)
            rows = await self._ask(SourceRequest(draw=missing))
            await self._prompts.add(rows_of(rows))
            if self._prompts.drawn_behind >= SAVE_EVERY:
                await self._save()

    async def close(self) -> None:
        """End the process of the data source."""
        await self._process.close()
        self._prompts.close()

    async def _save(self) -> None:
        number = self._prompts.drawn // self._batch
        await self._ask(SourceRequest(save=number))
        await self._prompts.note_saved(number)

    async def _ask(self, request: SourceRequest) -> Any:
        encoded = msgspec.msgpack.encode(request)
        return await self._process.ask(self._hook, encoded, self._timeout_s, "rollout.hooks.batch_timeout_s")
