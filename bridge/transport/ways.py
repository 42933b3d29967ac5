"""Which memory of the trainer each rank of an engine reads. Pure; imports no torch.

trainer    rank of an engine              way
on a CPU   anywhere on the node           shared
on a GPU   on a CPU                       shared
           GPU that opens the trainer's   cuda_ipc: from GPU to GPU, or within the GPU that both use
           any other GPU                  pinned: by host memory that both sides have pinned
anywhere   without the trainer's kernel   none: UnsuitedTransport
"""

from typing import Literal

from slipstream.bridge.engine.orders import DevicePlace

Way = Literal["cuda_ipc", "pinned", "shared"]


class UnsuitedTransport(RuntimeError):
    """The transport cannot reach the engines as they are: the same for every engine and version."""


def way_to(reader: DevicePlace, sender: DevicePlace, *, offers_gpu: bool) -> Way:
    """Return the way to one rank. ``offers_gpu``: the reader has tried to open memory of the sender's GPU.

    Raises UnsuitedTransport.
    """
    if reader.node != sender.node:
        raise UnsuitedTransport(
            "it shares no memory with the trainer, because it is on another node or in a container with PIDs "
            "of its own. Set weights.transport to 'shards', 'disk' or 'delta'"
        )
    if sender.gpu is None or reader.gpu is None:
        return "shared"
    return "cuda_ipc" if offers_gpu and reader.refused is None else "pinned"


def explained(reader: DevicePlace, sender: DevicePlace, way: Way) -> str:
    """Return a way and its reason for the log."""
    if way == "cuda_ipc":
        place = "on the trainer's GPU" if reader.gpu == sender.gpu else f"on GPU {reader.gpu}"
        return f"{place}: reads the memory of GPU {sender.gpu} (CUDA IPC)"
    if way == "pinned":
        reason = reader.refused or "the trainer's GPU offers none"
        return f"on GPU {reader.gpu}: reads pinned host memory and no memory of a GPU: {reason}"
    return "reads shared memory of the host"
