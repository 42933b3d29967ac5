"""Memory of one rank of an engine.

SGLang splits attention by heads, feed-forward layers and experts by their width or number, and the vocabulary
by rows, so that a rank holds 1 / tensor_parallel of these weights. It holds norms, routers and the down
projections of latent attention whole. Key-value heads that are fewer than the ranks are repeated.

    pool    = mem_fraction_static * memory of the GPU - weights
    a token = 2 * layers * key-value heads of the rank * head_dim * bytes          grouped-query attention
            = layers * (kv_lora_rank + qk_rope_head_dim) * bytes                   latent attention
"""

from dataclasses import dataclass
from math import prod

from slipstream.bridge.hf.index import ITEMSIZE
from slipstream.bridge.model.geometry import Geometry, GroupedAttention
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries
from slipstream.configs.schema import RunConfig

MIB = 2**20
RESERVED = 512 * MIB
"""SGLang 0.5.21 leaves this much free for itself, and what follows, unless ``mem_fraction_static`` is set."""
RESERVED_PER_TOKEN = 3 * MIB // 2
RESERVED_PER_RANK = 128 * MIB
RESERVED_PER_REQUEST = 2 * MIB
"""For each request of the largest CUDA graph."""
PREFILL_TOKENS = 8192
"""``chunked_prefill_size`` of SGLang on GPUs of 60 to 160 GB."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of each rank of an engine."""

    parameters: int
    """Elements, not bytes."""
    weights: int
    token: int
    """Bytes of the KV cache per token."""
    transfer: int
    """The bucket that is being received."""
    pool: int | None
    """Bytes of the KV cache; None: the memory of the GPU is not known."""
    reserved: int
    """Memory that SGLang leaves free for activations and CUDA graphs; the transfer takes place in it."""

    @property
    def tokens(self) -> int | None:
        """Tokens that the KV cache of the engine holds."""
        return None if self.pool is None else max(self.pool, 0) // self.token


def engine_memory(config: RunConfig, spec: ModelSpec, gpu: int | None) -> EngineMemory:
    """Return the memory of an engine rank. ``gpu``: bytes of the GPU's memory, None if unknown."""
    engine, itemsize = config.rollout.engine, ITEMSIZE[config.model.dtype]
    ranks, geometry = engine.tensor_parallel, spec.geometry
    parameters, buffers = _held(spec, ranks)
    weights = parameters * itemsize + buffers * 4
    token = kv_bytes(geometry, ranks, itemsize)
    reserved, pool = 0, None
    if gpu is not None:
        fraction = engine.args.get("mem_fraction_static")
        reserved = round((1 - fraction) * gpu) if isinstance(fraction, float) else _left_free(config)
        pool = gpu - reserved - weights
        most = engine.args.get("max_total_tokens")
        pool = min(pool, most * token) if isinstance(most, int) else pool
    bucket = config.weights.transport.bucket_mb * MIB
    largest = max(sum(map(prod, entry.hf_shapes)) for entry in entries(spec, Layout())) * itemsize
    return EngineMemory(parameters, weights, token, max(bucket, largest), pool, reserved)


def kv_bytes(geometry: Geometry, ranks: int, itemsize: int) -> int:
    """Return the bytes that a token takes in the KV cache of each of ``ranks`` ranks."""
    attention = geometry.attention
    if isinstance(attention, GroupedAttention):
        heads = max(attention.kv_heads // ranks, 1)
        return 2 * geometry.n_layers * heads * attention.head_dim * itemsize
    return geometry.n_layers * (attention.kv_rank + attention.rotated_dim) * itemsize


def _held(spec: ModelSpec, ranks: int) -> tuple[int, int]:
    """Return the elements of weights on a rank, and those in single precision besides."""
    geometry, elements, buffers = spec.geometry, 0, 0
    for entry in entries(spec, Layout(tensor=ranks, data=1)):
        shape = entry.split.shard_shape(ranks)
        if entry.mapping.float32:
            buffers += prod(shape)
        else:
            elements += prod(shape)
    attention = geometry.attention
    if isinstance(attention, GroupedAttention) and attention.kv_heads < ranks:
        repeated = 2 * attention.head_dim * geometry.hidden * (ranks - attention.kv_heads) // ranks
        elements += geometry.n_layers * repeated
    return elements, buffers


def _left_free(config: RunConfig) -> int:
    ranks = config.rollout.engine.tensor_parallel
    graph = 256 if ranks < 4 else 512
    prefill = config.rollout.engine.args.get("chunked_prefill_size")
    tokens = prefill if isinstance(prefill, int) and prefill > 0 else PREFILL_TOKENS
    return RESERVED + tokens * RESERVED_PER_TOKEN + ranks * RESERVED_PER_RANK + graph * RESERVED_PER_REQUEST
