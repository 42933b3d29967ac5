"""The prompts of a data source, in the order in which it gives them.

data source, in a process of its own ──a few ahead──► file of drawn prompts ──at(position)──► groups

Each prompt is on disk before a group is admitted for it, so that a group keeps its prompt whatever ends: the
collector, the driver, or the process of the data source. A resumed run reads the drawn prompts, and lets the
source go on after them.

A source that takes groups back (``add_samples`` of ``rollout.hooks.data_source``) gets those that are given
up without being trained, filtered or failed. The file records each of them before the source is told, among
the drawn prompts: so a resumed run, whose source has the state that was saved last, tells it again.
"""

import asyncio
import os
from array import array
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import cast

import msgspec

from slipstream.configs.schema import RolloutConfig
from slipstream.rollout.control.ends import Loss
from slipstream.rollout.system.changes import Changes
from slipstream.rollout.system.programs.hook_process import HookProcess
from slipstream.rollout.tokens.trajectory import Prompt

FILE = "drawn-prompts.jsonl"
"""In the run folder."""

SAVE_EVERY = 1000
"""Groups after which the state of the data source is saved."""

CACHED = 4096
"""Prompts that are kept in memory."""


GIVEN_BACK = frozenset({Loss.STALE, Loss.SURPLUS})
"""Reasons for which a source gets a group back: the run has given it up."""


class GivenBack(msgspec.Struct, array_like=True, frozen=True):
    """A group that its source gets back, as it was drawn."""

    position: int
    prompt: str | list[dict[str, object]]
    label: object
    metadata: dict[str, object]


class SourceRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request to the process of a data source."""

    draw: int = 0
    """Number of prompts to draw; 0: none."""
    save: int | None = None
    """Number under which to save the state of a source that saves it."""
    give_back: GivenBack | None = None


class _Row(msgspec.Struct):
    prompt: str | list[dict[str, object]] = ""
    label: object = None
    metadata: dict[str, object] = {}
    saved: int | None = None
    """Number under which the state after all groups so far was saved: a row of its own."""
    given_back: int | None = None
    """Position of a group that the source gets back: a row of its own."""


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
        """Number of groups that were drawn since that state."""
        self._behind: list[int | None] = []
        """Events since that state, in order: None for each group that was drawn, and the position of each
        group that was given back."""
        self._to_give_back: deque[int] = deque()
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
        """Go on after this many prompts."""
        self._position = position
        self._changes.notify()

    def draw(self) -> int:
        """Return the position of the next prompt, and move on to the one after it."""
        self.go_to(self._position + 1)
        return self._position - 1

    @property
    def is_ready(self) -> bool:
        """True if the next prompt is there."""
        return self._position < len(self._offsets)

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position that was drawn. Raises OSError."""
        row = self._row(position)
        return Prompt(position, row.prompt, row.label, row.metadata)

    # ---- drawing

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call ``then`` whenever prompts have come."""
        self._listener = then

    async def has_work(self, ahead: int) -> None:
        """Wait until fewer than ``ahead`` prompts are there, or the source gets a group back."""
        await self._changes.first(lambda: True if self._to_give_back or self.missing(ahead) else None)

    def missing(self, ahead: int) -> int:
        """Return how many prompts are missing until ``ahead`` are there."""
        return max(0, self._position + ahead - len(self._offsets))

    def give_back(self, position: int) -> None:
        """Give the group at a position back to the source."""
        self._to_give_back.append(position)
        self._changes.notify()

    async def next_given_back(self) -> GivenBack | None:
        """Return the next group that the source gets back, which is written down now; None: there is none.

        Raises OSError.
        """
        if not self._to_give_back:
            return None
        position = self._to_give_back.popleft()
        await self._write([msgspec.json.encode({"given_back": position})])
        self._behind.append(position)
        return self._given_back(position)

    def keep_all(self) -> None:
        """Give nothing back of what is still to be given back."""
        self._to_give_back.clear()

    def behind(self) -> list[int | GivenBack]:
        """Return the events since the state that was saved last, in order: numbers of groups that were drawn,
        and groups that were given back. Raises OSError.
        """
        events: list[int | GivenBack] = []
        for position in self._behind:
            if position is not None:
                events.append(self._given_back(position))
            elif events and isinstance(events[-1], int):
                events[-1] += 1
            else:
                events.append(1)
        return events

    async def add(self, lines: list[bytes]) -> None:
        """Write groups down, and hand them out from now on. Raises OSError."""
        start = self._end
        await self._write(lines)
        for line in lines:
            self._offsets.append(start)
            start += len(line) + 1
        self.drawn_behind += len(lines)
        self._behind += [None] * len(lines)
        self._listener()

    async def note_saved(self, number: int) -> None:
        """Write down that the state of the source was saved. Raises OSError."""
        await self._write([msgspec.json.encode({"saved": number})])
        self._saved(number)

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
                self._saved(msgspec.json.decode(line, type=_Row).saved)
            elif line.startswith(b'{"given_back"'):
                self._behind.append(msgspec.json.decode(line, type=_Row).given_back)
            else:
                self._offsets.append(end)
                self.drawn_behind += 1
                self._behind.append(None)
            end += len(line)
        return end

    def _saved(self, number: int | None) -> None:
        self.saved, self.drawn_behind, self._behind = number, 0, []

    def _given_back(self, position: int) -> GivenBack:
        row = self._row(position)
        return GivenBack(position, row.prompt, row.label, row.metadata)

    def _row_at(self, position: int) -> _Row:
        if not 0 <= position < len(self._offsets):
            raise OSError(
                f"{self._path} holds {len(self._offsets)} groups, expected the one at position {position}: "
                "the file has lost groups that the run's ledger knows"
            )
        with self._path.open("rb") as file:
            file.seek(self._offsets[position])
            return msgspec.json.decode(file.readline(), type=_Row)


def drawn_prompts(rollout: RolloutConfig, run: Path) -> DrawnPrompts | None:
    """Return the prompts of a recipe's data source; None: it names none. ``run``: the run folder.

    Raises OSError and MsgspecError.
    """
    hooks = rollout.hooks
    is_drawn = rollout.data_source is not None or (hooks is not None and hooks.data_source)
    return DrawnPrompts(run / FILE) if is_drawn else None


class Drawing:
    """Keeps prompts drawn ahead of the groups. ``close`` it."""

    def __init__(
        self,
        process: HookProcess,
        prompts: DrawnPrompts,
        *,
        ahead: int,
        named: str,
        timeout_s: float,
        limit: str,
        save_number: Callable[[int], int] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """``ahead``: number of prompts that are drawn before they are needed. ``named`` and ``limit``: names
        of the source and of the setting that gives ``timeout_s``, for messages. ``save_number``: number under
        which the state after so many prompts is saved; None: the source has no state to save. ``note`` tells
        the user that the source takes no group back; None: it is given none.
        """
        self._note = note
        self._process = process
        self._prompts = prompts
        self._ahead = ahead
        self._named = named
        self._timeout_s = timeout_s
        self._limit = limit
        self._save_number = save_number

    async def run(self) -> None:
        """Draw until cancelled. Raises HookProcessFailed and OSError."""
        while True:
            await self._prompts.has_work(self._ahead)
            await self._give_back()
            if not (missing := self._prompts.missing(self._ahead)):
                continue
            rows = cast("list[dict[str, object]]", await self._ask(SourceRequest(draw=missing)))
            await self._prompts.add([msgspec.json.encode(row) for row in rows])
            if self._save_number is not None and self._prompts.drawn_behind >= SAVE_EVERY:
                number = self._save_number(self._prompts.drawn)
                await self._ask(SourceRequest(save=number))
                await self._prompts.note_saved(number)

    def lost(self, id_: int, prompt: Prompt, loss: Loss, note: str, ready: object) -> None:
        """Give a group that the run has given up back to the source. Call this for every lost group."""
        if self._note is not None and loss in GIVEN_BACK:
            self._prompts.give_back(prompt.id)

    async def _give_back(self) -> None:
        """Give groups back until there are none. A source that refuses one gets no more."""
        while self._note is not None and (group := await self._prompts.next_given_back()) is not None:
            refusal = cast("str | None", await self._ask(SourceRequest(give_back=group)))
            if refusal is not None:
                self._note(f"{self._named} gets no group back: its add_samples has raised {refusal}")
                self._note = None
                self._prompts.keep_all()

    async def close(self) -> None:
        """End the process of the data source."""
        await self._process.close()
        self._prompts.close()

    async def _ask(self, request: SourceRequest) -> object:
        encoded = msgspec.msgpack.encode(request)
        return await self._process.ask(self._named, encoded, self._timeout_s, self._limit)
