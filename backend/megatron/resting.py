"""Memory of the device that is given up for a while, with what was in it kept on the host or not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

CHUNK = 2**28
"""Bytes: room on the host is made in pieces of this size, because torch rounds pinned memory up to a power
of two."""


@dataclass(frozen=True)
class _Away:
    nbytes: int
    start: int | None
    """Where its content begins in the room on the host; None: it has none to keep."""


class Resting:
    """Tensors whose memory is away. They stay the same objects, and views of one memory stay views of it:
    Megatron's contiguous buffers, and the shards of them that its optimizer updates.

    While they rest nothing may read them: torch does not look whether memory is there. Room on the host is
    kept from one rest to the next, and is pinned where the device is a GPU.
    """

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self._device = device
        self._chunk = chunk
        self._room: list[Tensor] = []
        self._used = 0
        self._away: dict[UntypedStorage, _Away] = {}

    def rest(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Give up the memory of ``tensors`` on the device; with ``keep`` it comes back as it was, else with
        any content. Those that rest already are left as they are.
        """
        leaving = [
            storage
            for storage in {tensor.untyped_storage(): None for tensor in tensors}
            if storage.device.type == self._device.type and storage.nbytes() and storage not in self._away
        ]
        for storage in leaving:
            self._away[storage] = _Away(storage.nbytes(), self._used if keep else None)
            if keep:
                self._used += storage.nbytes()
        for storage in leaving:
            for content, room in self._places(storage):
                room.copy_(content, non_blocking=True)
        self._synchronize()
        for storage in leaving:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # or other processes would not get it

    def wake(self) -> None:
        """Have all of it back."""
        for storage, away in self._away.items():
            storage.resize_(away.nbytes)
            for content, room in self._places(storage):
                content.copy_(room, non_blocking=True)
        self._synchronize()
        self._away.clear()
        self._used = 0

    def _places(self, storage: UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
        """The content of a storage, piece by piece, and the room of each: uint8 [bytes]."""
        away = self._away[storage]
        if away.start is None:
            return
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < away.nbytes:
            number, offset = divmod(away.start + done, self._chunk)
            while number >= len(self._room):
                pin = self._device.type == "cuda"
                self._room.append(torch.empty(self._chunk, dtype=torch.uint8, pin_memory=pin))
            n = min(self._chunk - offset, away.nbytes - done)
            yield content[done : done + n], self._room[number][offset : offset + n]
            done += n

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
