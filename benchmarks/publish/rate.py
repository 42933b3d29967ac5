"""A model of 0.9 billion parameters from a trainer of two ranks to an engine, against bare sends."""

import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.harness import peak_mb, reset_peak, seconds_of_all_ranks
from benchmarks.publish.engine import serving
from benchmarks.publish.trainer import published, random_trainer
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.bridge.model.layout import Layout
from slipstream.rollout.engine.client import EngineAddress
from tests.ranks import run_ranks

MODEL: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 4608,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 96000,
}
LAYOUT = Layout(tensor=2)
VERSIONS = 6
"""The first one opens connections and is compared by digests; the others are measured."""
PARTS = (1 << 20, 1 << 23, 1 << 26)
"""Bytes of a message of the bare sends; the fastest counts."""
IN_FLIGHT = 8


@dataclass(frozen=True)
class Rate:
    n_bytes: int
    """Bytes of a version."""
    shards_s: float
    bare_s: float
    requests: Counter[str]
    """Requests to the engine for one version, by path."""
    staging_mb: float
    """Memory beside the weights, on the side that needs most, with the first version and its digests."""

    @property
    def ratio(self) -> float:
        return self.bare_s / self.shards_s


def measure() -> Rate:
    with serving(MODEL, "bfloat16", 4096) as (engine, pids):
        head, *_ = run_ranks(3, on_rank, engine, pids, timeout_s=900)
    return head


def on_rank(rank: RankSpec, engine: EngineAddress, pids: list[int]) -> Rate | None:
    """Be one of two ranks of the trainer, or the receiver of the bare sends."""
    torch.set_num_threads(1)
    store = TCPStore(rank.address, rank.port, rank.world_size, rank.rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    trains = rank.rank < LAYOUT.world_size
    trainer = random_trainer(MODEL, LAYOUT, rank.rank, store, torch.bfloat16) if trains else None
    receive_s, bare_s = list[float](), {part: list[float]() for part in PARTS}
    n_bytes, requests, staging_mb = 0, Counter[str](), 0.0
    room: dict[int, torch.Tensor] = {}
    for version in range(1, VERSIONS + 1):
        dist.barrier()
        before = {pid: reset_peak(pid) for pid in (*pids, os.getpid())} if rank.rank == 0 else {}
        publication = partial(published, version=version, engine=engine)
        if trainer and (result := trainer.publish(publication)) is not None:
            report, requests = result
            n_bytes = report.bytes_sent
            if version == 1:
                staging_mb = max(peak_mb(pid) - resident for pid, resident in before.items())
            else:
                receive_s.append(report.parts_s["receive"])
        size = torch.tensor([n_bytes])
        dist.broadcast(size, 0)
        share = int(size) // LAYOUT.world_size
        for part in PARTS:
            bare_s[part].append(seconds_of_all_ranks(partial(bare_sends, rank.rank, share, part, room)))
    dist.destroy_process_group()
    if rank.rank:
        return None
    fastest = min(median(times[1:]) for times in bare_s.values())
    return Rate(n_bytes, median(receive_s), fastest, requests, staging_mb)


def bare_sends(rank: int, share: int, part: int, room: dict[int, torch.Tensor]) -> None:
    """Send ``share`` bytes from each rank of the trainer to the last rank, in messages of ``part`` bytes."""
    receiver = LAYOUT.world_size
    peers = range(receiver) if rank == receiver else [receiver]
    for peer in peers:
        if peer not in room:
            room[peer] = torch.zeros(share, dtype=torch.uint8)
    operation = dist.irecv if rank == receiver else dist.isend
    starts = range(0, share, part)
    queue = [(peer, start) for start in starts for peer in peers]
    for first in range(0, len(queue), IN_FLIGHT):
        operations = [
            dist.P2POp(operation, room[peer][start : start + part], peer)
            for peer, start in queue[first : first + IN_FLIGHT]
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
