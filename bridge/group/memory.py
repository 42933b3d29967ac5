"""Memory of a trainer that the engines on its node read: a bucket of weights, without a copy in a socket.

    HostMemory    an anonymous file in memory, which engines map; pinned on both sides if they have GPUs
    DeviceMemory  memory of the trainer's GPU, which engines open by a handle of CUDA IPC

Neither has a name in a file system, so a process that is killed leaves nothing behind: the kernel frees the
file with its last mapping, and the driver the GPU's memory with its last process.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
from functools import cache

import torch
from torch import Tensor

from slipstream.bridge.group.handles import HANDLE_BYTES, DeviceHandle, HostHandle

log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Who maps a file that shrinks is killed when it reads. These seals make the size final."""


class CannotOpen(RuntimeError):
    """A handle does not lead to the memory that it was made for."""


class HostMemory:
    """``tensor`` is uint8 [bytes]. The memory is free when both sides have dropped it."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        token = secrets.token_hex(8)
        self._descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.tensor = _mapped(self._descriptor, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.handle = HostHandle(os.getpid(), self._descriptor, token, nbytes)
        self._pinned = pinned and pin(self.tensor)

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    def close(self) -> None:
        """Nobody can open the memory any more."""
        os.close(self._descriptor)
        if self._pinned:
            unpin(self.tensor)


class MappedMemory:
    """The other end of a ``HostMemory``."""

    def __init__(self, handle: HostHandle, *, pinned: bool) -> None:
        """Raises CannotOpen."""
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CannotOpen(f"{path}, memory of the trainer: {error.strerror}") from error
        try:
            _require_same(descriptor, handle)
            self.tensor = _mapped(descriptor, handle.nbytes)
        finally:
            os.close(descriptor)
        self._pinned = pinned and pin(self.tensor)

    def close(self) -> None:
        if self._pinned:
            unpin(self.tensor)


def _name(token: str) -> str:
    return f"slipstream-{token}"


def _require_same(descriptor: int, handle: HostHandle) -> None:
    """Raise CannotOpen unless the file is the one that the handle was made for, at its final size."""
    name, expected = os.readlink(f"/proc/self/fd/{descriptor}"), f"/memfd:{_name(handle.token)} (deleted)"
    if name != expected:
        raise CannotOpen(f"{name} found, {expected} expected: the trainer that offered it has ended")
    size = os.fstat(descriptor).st_size
    if size != handle.nbytes:
        raise CannotOpen(f"{expected} has {size} bytes, {handle.nbytes} expected")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise CannotOpen(f"{expected} may still change its size")


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    # The tensor keeps the mapping, and nothing closes it before.
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


# ---- CUDA


def pin(memory: Tensor) -> bool:
    """Lock memory of the host in its place and tell CUDA, so that copies run at the speed of the bus.

    torch's own pinned memory is rounded up to a power of two, and cannot be shared. Returns False, after a
    warning, if CUDA refuses: copies are slow then, and right.
    """
    try:
        cuda_runtime().register(memory.data_ptr(), memory.nbytes)
    except RuntimeError as error:
        log.warning("%d bytes of host memory cannot be pinned, so copies are slow: %s", memory.nbytes, error)
        return False
    return True


def unpin(memory: Tensor) -> None:
    cuda_runtime().unregister(memory.data_ptr())


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaRuntime:
    """Calls of the CUDA runtime that torch does not offer, on the thread's current device.

    All of them are public, and as old as CUDA IPC. torch's own handles count references, and a reader that is
    killed would keep the trainer's memory forever.
    """

    LAZY_PEER_ACCESS = 1
    DEFAULT_DIRECTION = 4

    def __init__(self) -> None:
        # torch has loaded it: the name is found whatever the search path is.
        self._library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(address))

    def register(self, address: int, nbytes: int) -> None:
        self._call("cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def handle_of(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map memory of another process, be it on this GPU or on one that this GPU reaches."""
        address = ctypes.c_void_p()
        given = _IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(self.LAZY_PEER_ACCESS))
        return int(address.value or 0)

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy, after all work that has been queued. Returns when the copy is complete."""
        self._call("cudaDeviceSynchronize")
        arguments = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(nbytes)
        self._call("cudaMemcpy", *arguments, ctypes.c_int(self.DEFAULT_DIRECTION))
        self._call("cudaDeviceSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status:
            self._library.cudaGetLastError()  # else the next call of torch would report it
            raise RuntimeError(f"{name} failed with CUDA error {status}")


@cache
def cuda_runtime() -> CudaRuntime:
    return CudaRuntime()


class DeviceMemory:
    """Memory of a GPU, apart from torch's, whose blocks CUDA could not hand over one by one."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises RuntimeError where there is no room, or CUDA IPC is not available."""
        self._device = device
        with on(device):
            torch.cuda.empty_cache()  # what torch keeps for later would count as taken
            self._address = cuda_runtime().allocate(nbytes)
            try:
                self.handle = DeviceHandle(cuda_runtime().handle_of(self._address), nbytes)
            except RuntimeError:
                cuda_runtime().free(self._address)
                raise

    @property
    def nbytes(self) -> int:
        return self.handle.nbytes

    def fill(self, content: Tensor) -> None:
        """``content``: contiguous, on the same device."""
        with on(self._device):
            cuda_runtime().copy(self._address, content.data_ptr(), content.nbytes)

    def close(self) -> None:
        with on(self._device):
            cuda_runtime().free(self._address)


def read_device(handle: DeviceHandle, target: Tensor) -> None:
    """Fill ``target``, which is contiguous, from the start of the memory of ``handle``. Raises CannotOpen."""
    if target.nbytes > handle.nbytes:
        raise CannotOpen(f"{target.nbytes} bytes are read of memory of {handle.nbytes} bytes")
    with on(target.device):
        try:
            source = cuda_runtime().open(handle.ipc)
        except RuntimeError as error:
            raise CannotOpen(f"memory of the trainer's GPU: {error}") from error
        try:
            cuda_runtime().copy(target.data_ptr(), source, target.nbytes)
        finally:
            cuda_runtime().close(source)


def on(device: torch.device) -> torch.cuda.device:
    """Return the context in which ``device`` is the thread's current one. It has no effect on a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
