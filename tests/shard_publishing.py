"""Shard-to-shard publishing between real processes over gloo: a trainer of two ranks, and three engines."""

import time

import torch
from torch.distributed import TCPStore

from slipstream.bridge.families import spec_of
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.model.mapping import copy_in
from slipstream.bridge.publish.publication import Timeouts
from slipstream.bridge.publish.publisher import Publisher
from slipstream.bridge.shards.plan import entries, entries_of, pieces_of
from tests.ports import held_port
from tests.shard_engine import ShardEngine
from tests.shard_trainer import ShardTrainer

HF = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
LAYOUT = Layout(tensor=2)
TIMEOUT_S = 600
"""More than a test may take: who waits for it fails."""
PATIENT = Timeouts(TIMEOUT_S, TIMEOUT_S)


def shapes() -> dict[str, tuple[int, ...]]:
    spec = spec_of(HF, None)
    return {
        name: shape
        for entry in entries(spec, Layout())
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def start_engines(troubles: dict[str, str], trouble_ranks: int) -> list[ShardEngine]:
    engines = [
        ShardEngine("one", shapes(), 1, held_port()),
        ShardEngine("doomed", shapes(), trouble_ranks, held_port(), troubles.get("doomed")),
        ShardEngine("two", shapes(), 2, held_port()),
    ]
    for engine in engines:
        engine.wait()
    return engines


def publish_thrice(rank, troubles: dict[str, str], trouble_ranks: int, timeouts: Timeouts = PATIENT):
    """Publish three versions to the engines "one", "doomed" and "two".

    Returns on rank 0: the reports, the seconds of each version, the version that each engine says it has, and
    the weights of those that still serve.
    """
    engines = [] if rank.rank else start_engines(troubles, trouble_ranks)
    spec = spec_of(HF, None)
    wire = TCPStore("127.0.0.1", rank.port, 2, rank.rank == 0)
    parameters = [{}]
    for entry, shard in entries_of(spec, LAYOUT, rank.rank):
        parameters[0][entry.parameter] = torch.empty(entry.split.shard_shape(shard.size))
    trainer = ShardTrainer(
        spec,
        LAYOUT,
        rank.rank,
        wire,
        parameters,
        timeouts=timeouts,
        engines=3,
        digests=True,
        packed_bytes=2000,
        direct_bytes=8000,
    )

    def train(version: int) -> None:
        tensors = tensors_of(version)
        for entry, shard in entries_of(spec, LAYOUT, rank.rank):
            sources = [tensors[name] for name in entry.hf_names]
            copy_in(parameters[0][entry.parameter], sources, pieces_of(entry.split, shard))

    serving = list(engines)
    version, reports, seconds = 0, [], []

    def publication(publisher: Publisher):
        return publisher.publish(version, serving, iter(()))

    if rank.rank:
        for version in (1, 2, 3):
            train(version)
            trainer.publish(publication)
        return None

    try:
        for version in (1, 2, 3):
            train(version)
            began = time.monotonic()
            report = trainer.publish(publication)
            seconds.append(time.monotonic() - began)
            reports.append(report)
            serving[:] = [engine for engine in serving if engine.name in report.updated]
        weights = {engine.name: engine.weights() for engine in serving}
        return reports, seconds, {engine.name: engine.version for engine in engines}, weights
    finally:
        for engine in engines:
            engine.close()
