"""Device memory that is given up for a while; its content is kept on the host or dropped."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

CHUNK = 2**28
"""Bytes per piece of host memory: torch rounds pinned memory up to a power of two."""


@dataclass(frozen=True)
class _Away:
    """A storage whose memory is given up."""

    nbytes: int
    start: int | None
    """Offset of its content in the host memory; None: its content is dropped."""


class Resting:
    """Tensors whose memory is given up.

    They remain the same objects, and views of one storage remain views of it: Megatron's contiguous buffers
    and the shards of them that its optimizer updates. Nothing may read them while they rest: torch does not
    check whether the memory exists. Host memory is kept from one rest to the next, and is pinned if the
    device is a GPU.
    """

    def __init__(self, device: torch.device, chunk: int = CHUNK) -> None:
        self._device = device
        self._chunk = chunk
        self._room: list[Tensor] = []
        self._used = 0
        self._away: dict[UntypedStorage, _Away] = {}

    def rest(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Give up the device memory of ``tensors``; tensors that rest already are left alone.

        keep: ``wake`` restores their content; otherwise it is undefined afterwards.
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
            torch.cuda.empty_cache()  # without this other processes would not get the memory

    def wake(self) -> None:
        """Move everything that rests back to the device."""
        for storage, away in self._away.items():
            storage.resize_(away.nbytes)
            for content, room in self._places(storage):
                content.copy_(room, non_blocking=True)
        self._synchronize()
        self._away.clear()
        self._used = 0

    def _places(self, storage: UntypedStorage) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the content of a storage piece by piece, each with its place on the host: uint8 [bytes]."""
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
