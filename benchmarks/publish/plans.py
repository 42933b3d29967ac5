"""Plans for real models: which rank of the trainer sends how many bytes to which rank of which engine.

Where engines have their weights is traced in SGLang's own model of that size, which is built without memory.
A plan needs no weights and no other machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from multiprocessing import get_context
from pathlib import Path

import msgspec

from slipstream.backend.simulate.publication import LINK_BYTES_PER_S
from slipstream.backend.trainer.publishing import DIRECT_BYTES
from slipstream.bridge.families import spec_of
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.shards.regions import Region
from slipstream.bridge.shards.sends import EngineSeat, Sends, Table, indexed
from slipstream.configs.schema import ShardsTransportConfig

BYTES = 2
"""Size of an element in bfloat16. The few in float32 (a router's bias) are counted so, too."""
TIMEOUT_S = 900

QWEN3_235B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
DEEPSEEK_V3: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@dataclass(frozen=True)
class Fleet:
    """A trainer and its engines."""

    hf: Mapping[str, object]
    trainer: Layout
    engines: int
    tensor: int
    expert: int


FLEETS = {
    "Qwen3-235B, 32 to 4 x TP8 EP8": Fleet(
        QWEN3_235B,
        Layout(tensor=4, pipeline=4, data=2, expert=8, expert_tensor=1, layers=(24, 24, 23, 23)),
        engines=4,
        tensor=8,
        expert=8,
    ),
    "Qwen3-235B, 512 to 64 x TP8 EP8": Fleet(
        QWEN3_235B,
        Layout(tensor=4, pipeline=4, data=32, expert=16, expert_tensor=1, layers=(24, 24, 23, 23)),
        engines=64,
        tensor=8,
        expert=8,
    ),
    "DeepSeek-V3, 256 to 16 x TP16 EP16": Fleet(
        DEEPSEEK_V3,
        Layout(tensor=8, pipeline=16, data=2, expert=16, expert_tensor=1, layers=(4,) * 13 + (3,) * 3),
        engines=16,
        tensor=16,
        expert=16,
    ),
}


@dataclass
class Traffic:
    """What one rank of the trainer sends, or all of them."""

    out: Counter[int] = field(default_factory=Counter[int])
    """Bytes out of each rank of the trainer."""
    into: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    """Bytes into each rank of each engine: by numbers of engine and rank."""
    uncopied: int = 0
    """Bytes that go from place to place."""
    messages: Counter[int] = field(default_factory=Counter[int])
    """Messages of each rank of the trainer, in one version."""
    peers: Counter[int] = field(default_factory=Counter[int])
    """Ranks of engines that each rank of the trainer sends to."""
    compile_s: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds of CPU in which each rank has made its plan."""

    def add(self, other: "Traffic") -> None:
        for mine, its in (
            (self.out, other.out),
            (self.messages, other.messages),
            (self.peers, other.peers),
        ):
            mine.update(its)
        self.into.update(other.into)
        self.uncopied += other.uncopied
        self.compile_s |= other.compile_s


@dataclass(frozen=True)
class Planned:
    fleet: Fleet
    traffic: Traffic
    model_bytes: int
    """Bytes of all parameters of an engine, on all of its ranks."""

    @property
    def fullest_bytes(self) -> int:
        """Bytes on the link that carries most."""
        return max(max(self.traffic.out.values()), max(self.traffic.into.values()))

    @property
    def fullest_s(self) -> float:
        return self.fullest_bytes / LINK_BYTES_PER_S

    @property
    def plan_s(self) -> float:
        """Seconds of the rank that needs most for its plan."""
        return max(self.traffic.compile_s.values())


def engine_tables(fleet: Fleet) -> list[Table]:
    """Return the regions of each rank of an engine. Raises RuntimeError, with the output, if a rank fails."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, out = Path(temporary, "model"), Path(temporary, "tables")
        folder.mkdir()
        out.mkdir()
        (folder / "config.json").write_text(json.dumps(fleet.hf))
        command = [sys.executable, "-m", "benchmarks.publish.traces", str(folder)]
        done = subprocess.run(
            [*command, str(fleet.tensor), str(fleet.expert), str(out)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"no traces: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        decoder = msgspec.msgpack.Decoder(list[Region])
        return [indexed(decoder.decode((out / str(rank)).read_bytes())) for rank in range(fleet.tensor)]


def planned(fleet: Fleet) -> Planned:
    """Let every rank of the trainer make its plan for all engines, a few ranks at a time.

    Raises AssertionError if an engine would not get every element once.
    """
    tables = engine_tables(fleet)
    traffic = Traffic()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for part in pool.map(partial(plan_of, fleet, tables), range(fleet.trainer.world_size)):
            traffic.add(part)
    sizes = [
        sum(BYTES * prod(region.size) for regions in table.values() for region in regions) for table in tables
    ]
    for engine in range(fleet.engines):
        assert [traffic.into[engine, rank] for rank in range(fleet.tensor)] == sizes, (
            "an engine is incomplete"
        )
    return Planned(fleet, traffic, sum(sizes))


def plan_of(fleet: Fleet, tables: list[Table], rank: int) -> Traffic:
    """Make the plan of one rank of the trainer."""
    packed = ShardsTransportConfig().packed_mb * 2**20 // BYTES
    traffic = Traffic()
    names = [str(number) for number in range(fleet.tensor)]
    by_name = dict(zip(names, tables, strict=True))
    began = time.process_time()
    spec = spec_of(dict(fleet.hf), Path())
    sends = Sends(spec, fleet.trainer, rank, packed=packed, direct=DIRECT_BYTES // BYTES)
    plans = [
        sends.to_engine(names, by_name, EngineSeat(engine, fleet.engines)) for engine in range(fleet.engines)
    ]
    traffic.compile_s[rank] = time.process_time() - began
    for engine, plan in enumerate(plans):
        for engine_rank, messages in plan.items():
            sent = BYTES * sum(message.numel for message in messages)
            traffic.out[rank] += sent
            traffic.into[engine, engine_rank] += sent
            traffic.messages[rank] += len(messages)
            traffic.peers[rank] += 1
            traffic.uncopied += BYTES * sum(message.numel for message in messages if message.direct)
    return traffic
