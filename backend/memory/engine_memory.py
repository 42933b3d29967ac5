"""Memory of one rank of an engine.

SGLang splits attention by heads, feed-forward layers and experts by their width or number, and the vocabulary
by rows, so that a rank holds 1 / tensor_parallel of these weights. It holds norms, routers and the down
projections of latent attention whole. Key-value heads that are fewer than the ranks are repeated. With
data-parallel attention, heads and the embedding are split over tensor_parallel / data_parallel ranks. With
pipeline stages a rank holds the layers of its stage, and the figures are those of the largest one.

    pool    = mem_fraction_static * memory of the GPU - weights
    a token = 2 * layers * key-value heads of the rank * head_dim * bytes          grouped-query attention
            = layers * (kv_lora_rank + qk_rope_head_dim) * bytes                   latent attention

Layers with linear attention cache nothing for a token. For them SGLang divides the pool between the KV cache
and the states of requests, in the ratio of 1 to ``mamba_full_memory_ratio``.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from slipstream.bridge.group.windows import WINDOW
from slipstream.bridge.hf.index import ITEMSIZE, HfCheckpointError, stored_tensors
from slipstream.bridge.hf.quantization import BLOCK, EngineFp8
from slipstream.bridge.model.geometry import Geometry, GroupedAttention
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import is_attention
from slipstream.bridge.model.spec import ModelSpec
from slipstream.bridge.shards.plan import entries
from slipstream.configs.schema import EngineConfig, TransportConfig

MIB = 2**20
RESERVED = 512 * MIB
"""SGLang 0.5.21 leaves this much free for itself, and what follows, unless ``mem_fraction_static`` is set."""
RESERVED_PER_TOKEN = 3 * MIB // 2
RESERVED_PER_RANK = 128 * MIB
RESERVED_PER_REQUEST = 2 * MIB
"""For each request of the largest CUDA graph."""
STATE_RATIO = 0.9
"""``mamba_full_memory_ratio`` of SGLang 0.5.21."""
LARGE_GRAPH = 300
"""Requests of a CUDA graph above which SGLang reserves half as much again for data-parallel attention."""
PREFILL_TOKENS = 8192
"""``chunked_prefill_size`` of SGLang on GPUs of 60 to 160 GB."""

FP8_BYTES = 1 + 4 / BLOCK**2
"""Bytes of a weight in fp8, and of its share of a scale."""


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
    caches: int = 1
    """Groups of ranks of which each has a KV cache of its own: those of data-parallel attention."""

    @property
    def tokens(self) -> int | None:
        """Tokens that the KV caches of the engine hold."""
        if self.pool is None or not self.token:
            return None
        return max(self.pool, 0) // self.token * self.caches


def engine_memory(
    engine: EngineConfig, transport: TransportConfig, dtype: str, spec: ModelSpec, gpu: int | None
) -> EngineMemory:
    """Return the memory of an engine rank. ``dtype``: that of the model, by torch's name. ``gpu``: bytes of
    the GPU's memory, None if unknown.
    """
    itemsize = ITEMSIZE[dtype]
    geometry, layers = spec.geometry, stage_sizes(spec.geometry.n_layers, engine.pipeline_parallel)
    held = max(_held(spec, engine, layers), key=lambda stage: stage.bytes(itemsize))
    parameters, weights = held.elements, held.bytes(itemsize) + _passed_through(spec) * itemsize
    token = kv_bytes(geometry, _attention_ranks(engine), itemsize, engine.pipeline_parallel)
    reserved, pool = 0, None
    if gpu is not None:
        fraction = engine.gpu_share or engine.args.get("mem_fraction_static")
        reserved = round((1 - fraction) * gpu) if isinstance(fraction, float) else _left_free(engine)
        pool = round((gpu - reserved - weights) * _cache_share(engine, geometry))
        most = engine.args.get("max_total_tokens")
        pool = min(pool, most * token) if isinstance(most, int) else pool
    staging = _staging(transport, spec, itemsize)
    return EngineMemory(parameters, weights, token, staging, pool, reserved, caches=engine.data_parallel)


def _staging(transport: TransportConfig, spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes that an update takes beside the weights."""
    if transport.type == "shards":
        return WINDOW * transport.packed_mb * MIB
    largest = max(sum(map(prod, entry.hf_shapes)) for entry in entries(spec, Layout())) * itemsize
    return max(transport.bucket_mb * MIB, largest)


def _cache_share(engine: EngineConfig, geometry: Geometry) -> float:
    """Return the share of the pool that the KV cache has."""
    ratio = engine.args.get("mamba_full_memory_ratio")
    ratio = ratio if isinstance(ratio, int | float) else STATE_RATIO
    return 1 / (1 + ratio) if geometry.delta_layers else 1.0


def stage_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage of an engine: SGLang gives the last stages one more."""
    size, more = divmod(layers, stages)
    return (size,) * (stages - more) + (size + 1,) * more


def kv_bytes(geometry: Geometry, ranks: int, itemsize: int, stages: int = 1) -> int:
    """Return the bytes that a token takes in the KV cache of each of ``ranks`` ranks of a pipeline stage.

    It is that of the stage with the largest cache. Layers with linear attention have none.
    """
    attention = geometry.attention
    layers = max(_cached_layers(geometry, stages))
    if isinstance(attention, GroupedAttention):
        heads = max(attention.kv_heads // ranks, 1)
        return 2 * layers * heads * attention.head_dim * itemsize
    return layers * (attention.kv_rank + attention.rotated_dim) * itemsize


def _cached_layers(geometry: Geometry, stages: int) -> list[int]:
    """Return the number of layers with a KV cache of each pipeline stage."""
    ends = list(accumulate(stage_sizes(geometry.n_layers, stages), initial=0))
    linear = set(geometry.delta_layers)
    return [sum(layer not in linear for layer in range(*stage)) for stage in pairwise(ends)]


def _attention_ranks(engine: EngineConfig) -> int:
    """Return the number of ranks over which heads are split."""
    return engine.tensor_parallel // engine.data_parallel


@dataclass
class _Held:
    """The part of a pipeline stage that one rank holds."""

    elements: int = 0
    quantized: int = 0
    """Elements that are held in fp8; they are counted in ``elements`` too."""
    buffers: int = 0
    """Elements in single precision, which are not."""

    def bytes(self, itemsize: int) -> int:
        plain = self.elements - self.quantized
        return plain * itemsize + round(self.quantized * FP8_BYTES) + self.buffers * 4


def _held(spec: ModelSpec, engine: EngineConfig, layers: tuple[int, ...]) -> list[_Held]:
    """Return what a rank holds, by pipeline stage."""
    geometry, ranks, of_attention = spec.geometry, engine.tensor_parallel, _attention_ranks(engine)
    fp8 = EngineFp8() if engine.quantization else None
    stages = [_Held() for _ in layers]
    embedding = set(spec.mappings.embedding)
    for entry in entries(spec, Layout(tensor=ranks, pipeline=len(layers), layers=layers)):
        in_groups = is_attention(entry.hf_names[0]) or entry.mapping in embedding
        size = prod(entry.split.shard_shape(of_attention if in_groups else ranks))
        stage = stages[entry.stage]
        if entry.mapping.float32:
            stage.buffers += size
        else:
            stage.elements += size
        if fp8 is not None and all(map(fp8.quantizes, entry.hf_names)):
            stage.quantized += size
    attention = geometry.attention
    if isinstance(attention, GroupedAttention) and attention.kv_heads < of_attention:
        missing = of_attention - attention.kv_heads
        repeated = 2 * attention.head_dim * geometry.hidden * missing // of_attention
        for stage, count in zip(stages, _cached_layers(geometry, len(layers)), strict=True):
            stage.elements += count * repeated
    return stages


def _passed_through(spec: ModelSpec) -> int:
    """Return the elements of the parts that are not of the language model; 0 without the model's files.

    Every rank is counted with all of them: SGLang's vision towers differ in what they split.
    """
    prefixes = spec.mappings.passed_through
    if not prefixes:
        return 0
    try:
        stored = stored_tensors(spec.path)
    except HfCheckpointError:
        return 0
    return sum(prod(tensor.shape) for name, tensor in stored.items() if name.startswith(prefixes))


def _left_free(engine: EngineConfig) -> int:
    graph = 256 if engine.tensor_parallel < 4 else 512
    prefill = engine.args.get("chunked_prefill_size")
    tokens = prefill if isinstance(prefill, int) and prefill > 0 else PREFILL_TOKENS
    left = RESERVED + engine.ranks * RESERVED_PER_RANK + graph * RESERVED_PER_REQUEST
    if engine.data_parallel == 1:
        return left + tokens * RESERVED_PER_TOKEN
    graph *= 3 if graph <= LARGE_GRAPH else 9 / 2
    tokens //= engine.data_parallel
    return left + tokens * RESERVED_PER_TOKEN + round(graph * engine.data_parallel) * MIB
