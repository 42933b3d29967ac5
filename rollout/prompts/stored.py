"""Prompts of which only their places are in memory: a set may be larger than the memory.

rows that were read ──► bytes in a file without a name, which ends with the process ──► Prompt, when asked for

A prompt takes 8 bytes of memory. The file is in memory until it is larger than ``IN_MEMORY``, and in the
folder of temporary files (TMPDIR) from then on. It holds what was checked: a prompt file that is changed
during a run changes nothing in it.
"""

import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import msgspec

from slipstream.rollout.tokens.trajectory import Prompt

IN_MEMORY = 8 << 20
"""Bytes of a set that are kept in memory."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Prompt)


class StoredPrompts(Sequence[Prompt]):
    """A sequence of prompts that never changes. For one thread."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        """Read ``prompts`` to their end. Raises what they raise, and OSError when the disk is full."""
        self._ends = array("Q")
        self._file = tempfile.SpooledTemporaryFile[bytes](max_size=IN_MEMORY, prefix="slipstream-prompts.")
        buffer, end = bytearray(), 0
        for prompt in prompts:
            encoded = _ENCODER.encode(prompt)
            end += len(encoded)
            self._ends.append(end)
            buffer += encoded
            if len(buffer) >= 1 << 20:
                self._file.write(buffer)
                buffer.clear()
        self._file.write(buffer)
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._at, range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self._at(each) for each in range(*place.indices(len(self)))]
        return self._at(range(len(self))[place])

    def _at(self, place: int) -> Prompt:
        start = self._ends[place - 1] if place else 0
        self._file.seek(start)
        return _DECODER.decode(self._file.read(self._ends[place] - start))


@dataclass(frozen=True)
class SourcePrompts:
    """The prompts of one file, and what is known of them."""

    prompts: Sequence[Prompt]
    name: str = ""
    """Empty: there are no others."""
    weight: float | None = None
    """Share in the order relative to other sources; None: the number of its prompts."""
    left_out: int = 0
    """Number of prompts that are too long."""
    note: str = ""
    """Message for the user about the prompts that are left out."""


class PromptSet(Sequence[Prompt]):
    """The prompts of all sources, one source after the other."""

    def __init__(self, sources: Sequence[SourcePrompts] = ()) -> None:
        self.sources = tuple(sources)
        self._starts = [0, *accumulate(len(source.prompts) for source in self.sources)]

    @staticmethod
    def of(prompts: Sequence[Prompt]) -> "PromptSet":
        """Return a set of prompts from one place."""
        return PromptSet([SourcePrompts(prompts)])

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> object:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        number = bisect_right(self._starts, place) - 1
        return self.sources[number].prompts[place - self._starts[number]]
