"""Host memory that is pinned once and used again, for copies of what leaves a GPU.

A copy into memory that is not pinned takes about twenty times as long. torch rounds each block of its own
pinned memory up to a power of two, and keeps one for each size that was ever asked for.
"""

import threading

import torch
from torch import Tensor

from slipstream.bridge.group.memory import on, pin, unpin


class PinnedPool:
    """Keeps the buffers that are pinned, which have the size that was asked for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[tuple[Tensor, torch.device]] = []
        self._taken: dict[int, tuple[Tensor, torch.device]] = {}
        """By address."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that are pinned, in use or not."""
        with self._lock:
            return sum(buffer.nbytes for buffer, _ in [*self._free, *self._taken.values()])

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uint8 [bytes], of at least this size, for copies from ``device``.

        Nobody else uses it until it is given back. If no buffer is large enough, the largest one gives way.
        """
        if device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._free.sort(key=lambda each: each[0].nbytes)
            fitting = (number for number, (buffer, _) in enumerate(self._free) if buffer.nbytes >= nbytes)
            found = self._free.pop(next(fitting, -1)) if self._free else None
        if found is not None and found[0].nbytes < nbytes:
            with on(found[1]):
                unpin(found[0])
            found = None
        buffer = torch.empty(nbytes, dtype=torch.uint8) if found is None else found[0]
        with on(device):
            pinned = found is not None or pin(buffer)
        if pinned:
            with self._lock:
                self._taken[buffer.data_ptr()] = buffer, device
        return buffer

    def copy(self, content: Tensor) -> Tensor:
        """Return a copy of a contiguous tensor, to be given back; ``content`` itself if it is on the host."""
        if content.device.type != "cuda":
            return content
        buffer = self.take(content.nbytes, content.device)
        copied = buffer[: content.nbytes].view(content.dtype).view(content.shape)
        with on(content.device):
            return copied.copy_(content)

    def give_back(self, buffer: Tensor) -> None:
        """Use the memory again of what was taken or copied, if it is pinned. The rest is free at its end."""
        with self._lock:
            taken = self._taken.pop(buffer.data_ptr(), None)
            if taken is not None:
                self._free.append(taken)
