"""Turn exported buckets into those of engines that hold weights in fp8."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.hf.quantization import EngineFp8
from slipstream.bridge.hf.quantized import engine_parts
from slipstream.bridge.shards.fp8 import sent_tensors


def engine_buckets(
    buckets: Iterator[FlatBucket | None], fp8: EngineFp8 | None
) -> Iterator[FlatBucket | None]:
    """Yield the buckets as engines get them: up to three for each, of one dtype, as ``sent_tensors`` lists.

    ``fp8``: None: engines get the buckets as they are. Exhausts ``buckets`` also when it is closed early,
    because the other ranks wait in their sends otherwise.
    """
    if fp8 is None:
        yield from buckets
        return
    try:
        for bucket in buckets:
            if bucket is None:
                yield None
            else:
                yield from _quantized(bucket, fp8)
    finally:
        deque(buckets, 0)


@torch.no_grad()
def _quantized(bucket: FlatBucket, fp8: EngineFp8) -> list[FlatBucket]:
    """Quantize a bucket. The results do not share its memory."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in bucket.tensors():
        tensors |= engine_parts(fp8, name, tensor)
    groups = sent_tensors(bucket.names, bucket.shapes, str(bucket.flat.dtype).removeprefix("torch."), fp8)
    return [
        FlatBucket(
            group.names,
            group.shapes,
            torch.cat([tensors[name].flatten() for name in group.names]),
            last=bucket.last and number == len(groups),
        )
        for number, group in enumerate(groups, start=1)
    ]
