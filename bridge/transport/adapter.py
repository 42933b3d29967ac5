"""Send the adapter of a version alone, beside weights that the engines keep as they have loaded them.

    prepare   the engines unload what is left of earlier versions, load the adapter of the next one beside the
              one that they serve, and generate
    update    the version changes, and with it the adapter of requests that start

A request is bound to one adapter for its whole life. Requests that run must therefore be cut off before
``update``: they are continued with the new adapter, and no token has another version than its adapter.

The tensors travel as SGLang's endpoint reads them: a pickle of one flat tensor, by value, so that an engine
on another node can read it. It goes from the trainer to its own engines, which accept it only with the key of
their start, and unpickle nothing but tensors. No pickle is read here.
"""

import asyncio
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication
from slipstream.bridge.shards.adapter import AdapterSpec, peft_config_of
from slipstream.bridge.shards.factors import peft_tensors


class AdapterTransport:
    def __init__(self, adapter: AdapterSpec, base: Path) -> None:
        """``base``: the checkpoint whose weights the engines hold."""
        self._adapter = adapter
        self._config = peft_config_of(adapter, str(base))

    async def prepare(self, publication: Publication, buckets: BucketStream) -> None:
        with publication.report.timed("gather"):
            tensors = await buckets.hand_over(lambda rest: peft_tensors(rest, self._adapter))
        with publication.report.timed("pack"):
            packed = await asyncio.to_thread(packed_tensors, tensors)
        publication.report.bytes_sent += len(packed)
        await publication.each(
            "load",
            lambda engine: engine.load_adapter(publication.version, self._config, packed),
            moves_weights=True,
        )

    async def update(self, publication: Publication, buckets: BucketStream) -> None:
        """Let the engines serve the adapter. They keep the KV caches of different adapters apart."""
        await publication.each("serve", lambda engine: engine.serve_adapter(publication.version))


def packed_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors in SGLang's format of flattened buckets, by value."""
    start = 0
    metadata: list[SimpleNamespace] = []
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        metadata.append(
            SimpleNamespace(
                name=name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=tensor.nbytes,
            )
        )
        start = end
    flat = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors.values()])
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
