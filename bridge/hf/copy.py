"""Write an HF checkpoint once more, unquantized or in an engine's fp8."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.files import FILE_BYTES, HFCheckpoint, write_hf
from slipstream.bridge.hf.index import HfCheckpointError, StoredTensor, stored_tensors
from slipstream.bridge.hf.kept import Kept
from slipstream.bridge.hf.quantization import EngineFp8, Quantization, QuantizedTensor, join_parts
from slipstream.bridge.hf.quantized import engine_parts


def write_copy(
    source: Path,
    quantization: Quantization | None,
    folder: Path,
    *,
    dtype: torch.dtype,
    fp8: EngineFp8 | None,
    tied: bool | None = None,
) -> int:
    """Write the checkpoint at ``source``, whose weights have this ``quantization``, into ``folder``.

    ``dtype``: of the weights that are stored quantized. ``fp8``: how they are quantized again; None: not at
    all. ``tied``: as of ``Kept``. One weight is in memory at a time, and the tensors of one file. Returns the
    bytes of the tensors. Raises HfCheckpointError.
    """
    stored, problems = join_parts(stored_tensors(source), quantization)
    if problems:
        raise HfCheckpointError(
            f"{source} does not fit its config.json:\n  " + "\n  ".join(problems.values())
        )
    with HFCheckpoint(stored) as checkpoint:
        return write_hf(
            _buckets(checkpoint, stored, dtype, fp8),
            source,
            folder,
            dtype=dtype,
            quantization=None if fp8 is None else fp8.config(stored),
            kept=Kept(tied=tied),
        )


def _buckets(
    checkpoint: HFCheckpoint, stored: dict[str, StoredTensor], dtype: torch.dtype, fp8: EngineFp8 | None
) -> Iterator[FlatBucket]:
    waiting: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, described in stored.items():
        tensor = checkpoint.tensor(name)
        if isinstance(described, QuantizedTensor):
            tensor = tensor.to(dtype)
        for part, values in engine_parts(fp8, name, tensor):
            tensors = waiting.setdefault(values.dtype, [])
            tensors.append((part, values))
            if sum(each.nbytes for _, each in tensors) >= FILE_BYTES:
                yield _bucket(waiting.pop(values.dtype))
    for tensors in waiting.values():
        yield _bucket(tensors)


def _bucket(tensors: Sequence[tuple[str, Tensor]], *, last: bool = False) -> FlatBucket:
    return FlatBucket(
        tuple(name for name, _ in tensors),
        tuple(tuple(tensor.shape) for _, tensor in tensors),
        torch.cat([tensor.flatten() for _, tensor in tensors]),
        last=last,
    )
