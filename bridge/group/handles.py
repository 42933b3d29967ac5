"""The ways to memory of a trainer (``group.memory``), as they travel to an engine. Imports no torch."""

import msgspec

HANDLE_BYTES = 64
"""``CUDA_IPC_HANDLE_SIZE``"""


class HostHandle(msgspec.Struct, tag="host", frozen=True):
    """The way to a ``HostMemory`` for processes of the same user in the same PID namespace."""

    pid: int
    descriptor: int
    token: str
    """Part of the file's name: another process may have got the number of one that has ended."""
    nbytes: int


class DeviceHandle(msgspec.Struct, tag="device", frozen=True):
    """The way to a ``DeviceMemory`` for processes on the same node."""

    ipc: bytes
    nbytes: int


Handle = HostHandle | DeviceHandle
