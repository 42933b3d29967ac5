"""One rank of an engine as a reader of the trainer's memory: whole HF tensors, which its own loader takes."""

import os
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.bridge.engine.loader_trace import Loader
from slipstream.bridge.engine.orders import DevicePlace, Load
from slipstream.bridge.group.handles import DeviceHandle, HostHandle
from slipstream.bridge.group.memory import CannotOpen, MappedMemory, read_device
from slipstream.bridge.hf.index import ITEMSIZE

KEPT = 2
"""Mappings of the trainer's host memory that stay open: it sends one bucket while it fills another."""


def located(device: torch.device, trial: DeviceHandle | None = None) -> DevicePlace:
    """Return where this process computes. ``trial``: memory of a GPU that it is to try to open."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    node = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    if device.type != "cuda":
        return DevicePlace(node, None)
    refused = None
    if trial is not None:
        try:
            read_device(trial, torch.empty(1, dtype=torch.uint8, device=device))
        except RuntimeError as error:
            refused = str(error)
    properties = cast(Any, torch.cuda).get_device_properties(device)
    return DevicePlace(node, str(properties.uuid), refused)


class MemoryReader:
    """Keeps host memory of the trainer open from one bucket to the next: to pin it takes longer than to read
    it. Memory of a GPU is open only while it is read, so that the trainer's death frees it.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, MappedMemory] = {}
        """By token, the latest last."""

    def load(self, model: torch.nn.Module, order: Load) -> None:
        """Load a bucket. When this returns, nothing reads the trainer's memory any more.

        Raises ValueError for an order that is wrong in itself, and CannotOpen.
        """
        size = order.size()
        device = next(model.parameters()).device
        flat = self._flat(order, size, device)
        try:
            with torch.no_grad():
                cast(Loader, model).load_weights(_tensors(order, flat))
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # copies are queued, and the memory is used again

    def close(self) -> None:
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()

    def _flat(self, order: Load, size: int, device: torch.device) -> Tensor:
        memory = order.memory
        if isinstance(memory, HostHandle):
            return self._opened(memory, device).tensor[:size]
        if device.type != "cuda":
            raise CannotOpen(f"memory of a GPU was offered to an engine on {device}")
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        read_device(memory, flat)
        return flat

    def _opened(self, handle: HostHandle, device: torch.device) -> MappedMemory:
        mapped = self._mapped.pop(handle.token, None)
        if mapped is None:
            while len(self._mapped) >= KEPT:
                self._mapped.pop(next(iter(self._mapped))).close()
            mapped = MappedMemory(handle, pinned=device.type == "cuda")
        self._mapped[handle.token] = mapped
        return mapped


def _tensors(order: Load, flat: Tensor) -> list[tuple[str, Tensor]]:
    sizes = [prod(each.shape) * ITEMSIZE[each.dtype] for each in order.tensors]
    parts = torch.split(flat, sizes)
    return [
        (each.name, part.view(getattr(torch, each.dtype)).view(each.shape))
        for each, part in zip(order.tensors, parts, strict=True)
    ]
