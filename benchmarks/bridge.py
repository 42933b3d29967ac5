"""The bridge against the limits of the machine: export, load and plan of weights, and updates of engines.

    python -m benchmarks.bridge            # the shape of Qwen3-1.7B, bfloat16: four minutes, 12 GB
    python -m benchmarks.bridge --layers 4 # a smaller model

Export: from the ranks of a trainer into the sender's buckets, against the faster of a bare gather and bare
sends of the same bytes in the same buckets by the same processes. Load: every rank loads its slices of the
checkpoint's files, against every rank reading as many bytes, both from the page cache. Plan: a mixture of
experts with 10^12 parameters on 1,024 ranks. Delta: a version after one step of Adam (its first step, with
learning rate 1e-6, which moves every weight by 1e-6) goes to a replica beside an engine over HTTP, against
the whole version sent in the same way.
"""

import asyncio
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.harness import parser, peak_mb, reset_peak, seconds_of_all_ranks
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.backend.monitor.tables import Columns, rows_table, table_console
from slipstream.bridge.families import spec_of
from slipstream.bridge.hf.bucket import FlatBucket
from slipstream.bridge.model.layout import Layout
from slipstream.bridge.publish.bucket_stream import BucketStream
from slipstream.bridge.publish.publication import Publication, Timeouts
from slipstream.bridge.shards.export import export
from slipstream.bridge.shards.load_hf import load_hf
from slipstream.bridge.shards.plan import Bucket, ExportPlan, entries, entries_of, make_plan
from slipstream.bridge.transport.delta import DeltaTransport
from slipstream.bridge.transport.replica import mount
from slipstream.rollout.engine.client import EngineAddress, EngineClient, EngineLost
from slipstream.rollout.system.network import hold_port, port_of
from tests.ranks import run_ranks

QWEN3_1_7B: dict[str, object] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TRILLION: dict[str, object] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
}
THOUSAND_RANKS = Layout(
    tensor=8, pipeline=8, data=16, expert=32, expert_tensor=1, layers=(8, 8, 8, 8, 8, 8, 8, 5)
)
LAYOUTS = {
    "tensor 2": Layout(tensor=2),
    "pipeline 2": Layout(pipeline=2),
    "tensor 2, pipeline 2": Layout(tensor=2, pipeline=2),
    "tensor 4": Layout(tensor=4),
}
BUCKET_MB = 256
REPEATS = 3
DTYPE = torch.bfloat16


def write_checkpoint(folder: Path, hf: dict[str, object]) -> None:
    """Write random weights in files of about a gigabyte, as checkpoints have."""
    (folder / "config.json").write_text(json.dumps(hf))
    weight_map, pending, size, number = {}, {}, 0, 0

    def flush() -> None:
        nonlocal pending, size, number
        number += 1
        file = f"model-{number:05d}.safetensors"
        save_file(pending, folder / file)
        weight_map.update(dict.fromkeys(pending, file))
        pending, size = {}, 0

    for entry in entries(spec_of(hf, Path()), Layout()):
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            pending[name] = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(DTYPE)
            size += pending[name].nbytes
        if size > 1e9:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ---- on the ranks


@dataclass
class Measured:
    """Seconds of each repetition on one rank."""

    export_s: list[float]
    gather_s: list[float]
    send_s: list[float]
    load_s: list[float]
    read_s: list[float]
    peak_extra_mb: float
    """Memory that the sender needs while it exports, the buckets included."""


def on_rank(rank: RankSpec, folder: Path, hf: dict[str, object], layout: Layout) -> Measured:
    dist.init_process_group(
        "gloo", init_method=f"tcp://{rank.address}:{rank.port}", rank=rank.rank, world_size=rank.world_size
    )
    spec = spec_of(hf, folder)
    parameters: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.chunks)]
    for entry, shard in entries_of(spec, layout, rank.rank):
        parameters[entry.chunk][entry.parameter] = torch.zeros(
            entry.split.shard_shape(shard.size), dtype=DTYPE
        )
    plan = make_plan(spec, layout, BUCKET_MB * 2**20, DTYPE.itemsize)
    measured = Measured([], [], [], [], [], 0.0)
    n_bytes = sum(tensor.nbytes for part in parameters for tensor in part.values())
    room = torch.zeros(n_bytes, dtype=torch.uint8)
    for _ in range(REPEATS):
        measured.read_s.append(seconds_of_all_ranks(lambda: read_bytes(folder, rank, room)))
        measured.load_s.append(seconds_of_all_ranks(lambda: load_hf(spec, layout, rank.rank, parameters)))
    for _ in range(REPEATS):
        measured.gather_s.append(seconds_of_all_ranks(lambda: bare_gather(plan, rank)))
        measured.send_s.append(seconds_of_all_ranks(lambda: bare_sends(plan, rank)))
        before = reset_peak()
        measured.export_s.append(seconds_of_all_ranks(lambda: drain(plan, parameters, rank)))
        measured.peak_extra_mb = max(measured.peak_extra_mb, peak_mb() - before)
    dist.destroy_process_group()
    return measured


def drain(plan: ExportPlan, parameters: list[dict[str, torch.Tensor]], rank: RankSpec) -> None:
    """Export all buckets, and do nothing with them."""
    for _ in export(plan, parameters, rank.rank):
        pass


def bare_gather(plan: ExportPlan, rank: RankSpec) -> None:
    """Gather as many bytes in as many buckets: an equal part of each from every rank."""
    longest = max(bucket.numel for bucket in plan.buckets)
    part = torch.zeros(-(-longest // rank.world_size), dtype=DTYPE)
    room = [torch.empty_like(part) for _ in range(rank.world_size)] if rank.rank == 0 else None
    for bucket in plan.buckets:
        n = -(-bucket.numel // rank.world_size)
        dist.gather(part[:n], [r[:n] for r in room] if room else None, dst=0)


def bare_sends(plan: ExportPlan, rank: RankSpec) -> None:
    """Send the same parts one by one. The sender copies its own part."""
    longest = max(bucket.numel for bucket in plan.buckets)
    part = torch.zeros(-(-longest // rank.world_size), dtype=DTYPE)
    room = [torch.empty_like(part) for _ in range(rank.world_size)] if rank.rank == 0 else []
    for bucket in plan.buckets:
        n = -(-bucket.numel // rank.world_size)
        if rank.rank:
            dist.send(part[:n], 0)
            continue
        works = [dist.irecv(room[other][:n], other) for other in range(1, rank.world_size)]
        room[0][:n].copy_(part[:n])
        for work in works:
            assert work is not None
            work.wait()


def read_bytes(folder: Path, rank: RankSpec, room: torch.Tensor) -> None:
    """Read as many bytes of the checkpoint's files as this rank loads, into memory that exists already."""
    view = room.numpy().data
    files = sorted(folder.glob("*.safetensors"))
    filled, turn = 0, rank.rank
    while filled < len(view):
        with files[turn % len(files)].open("rb", buffering=0) as file:
            while filled < len(view) and (n := file.readinto(view[filled : filled + 2**24])):
                filled += n
        turn += 1


# ---- changes


@dataclass
class Carried:
    """Cost of sending one version to a replica."""

    bytes: int = 0
    seconds: float = 0.0


def serve_replica(folder: str, model: str, port: int) -> None:
    """Serve the part of an engine that the delta transport talks to: the replica's HTTP routes."""
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()
    mount(app, folder, model)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def changes(plan: ExportPlan, model: Path) -> tuple[Carried, Carried]:
    """Send a whole version, then the changes of the next one. Each bucket goes by itself, to save memory."""
    generator = torch.Generator().manual_seed(0)
    whole, changed = Carried(), Carried()
    holder = hold_port("127.0.0.1")
    port = port_of(holder)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        server = multiprocessing.get_context("spawn").Process(
            target=serve_replica, args=(folder, str(model), port), daemon=True
        )
        server.start()
        try:
            for bucket in plan.buckets:
                master = torch.randn(bucket.numel, generator=generator).mul_(0.02).requires_grad_()
                plan_of_bucket = ExportPlan(plan.spec, plan.layout, (bucket,), plan.bucket_numel)
                transport = DeltaTransport(plan_of_bucket, model, "bfloat16")
                carry(transport, port, bucket, master, 1, whole)
                master.grad = torch.randn(bucket.numel, generator=generator)
                torch.optim.Adam([master], lr=1e-6, betas=(0.9, 0.95), eps=1e-8).step()
                carry(transport, port, bucket, master, 2, changed)
        finally:
            server.kill()
            server.join()
    return whole, changed


def carry(
    transport: DeltaTransport,
    port: int,
    bucket: Bucket,
    master: torch.Tensor,
    version: int,
    carried: Carried,
) -> None:
    flat = FlatBucket(bucket.hf_names, bucket.hf_shapes, master.detach().to(DTYPE), True)
    address = EngineAddress("engine", f"http://127.0.0.1:{port}", 1, 1, 1, 300)

    async def publish() -> None:
        async with EngineClient(address) as engine:
            while not await is_there(engine):
                await asyncio.sleep(0.1)
            publication = Publication(version, [engine], Timeouts(300, 300))
            with ThreadPoolExecutor(1) as thread:
                began = time.perf_counter()
                await transport.prepare(publication, BucketStream(iter([flat]), thread))
                carried.seconds += time.perf_counter() - began
            assert not publication.report.failed, publication.report.failed
            carried.bytes += publication.report.bytes_sent

    asyncio.run(publish())


async def is_there(engine: EngineClient) -> bool:
    try:
        await engine.replica_version()
    except EngineLost:
        return False
    return True


# ---- in this process


def plan_s() -> float:
    spec = spec_of(TRILLION, Path())
    began = time.perf_counter()
    make_plan(spec, THOUSAND_RANKS, 2**30, 2)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Row:
    """Rates of one layout, in GB/s, and the sender's extra memory."""

    layout: str
    export: float
    bare: float
    load: float
    read: float
    peak_extra_mb: float

    @property
    def document(self) -> dict[str, float]:
        return {
            "export_ratio": round(self.export / self.bare, 3),
            "load_ratio": round(self.load / self.read, 3),
            "peak_extra_mb": round(self.peak_extra_mb),
            "export_gb_per_s": round(self.export, 3),
        }


TABLE: Columns[Row] = {
    "layout": lambda row: row.layout,
    "export": lambda row: f"{row.export:.2f} GB/s",
    "bare export": lambda row: f"{row.bare:.2f} GB/s",
    "export ratio": lambda row: f"{row.export / row.bare:.2f}",
    "load": lambda row: f"{row.load:.2f} GB/s",
    "bare read": lambda row: f"{row.read:.2f} GB/s",
    "load ratio": lambda row: f"{row.load / row.read:.2f}",
    "extra memory": lambda row: f"{row.peak_extra_mb:.0f} MB",
}


def measure(name: str, folder: Path, hf: dict[str, object], size: int) -> Row:
    """Measure one of ``LAYOUTS`` on a checkpoint of ``size`` bytes."""
    ranks = run_ranks(LAYOUTS[name].world_size, on_rank, folder, hf, LAYOUTS[name], timeout_s=600)
    sender: Measured = ranks[0]
    bare_s = min(median(sender.gather_s), median(sender.send_s))
    gb = size / 1e9
    return Row(
        name,
        export=gb / median(sender.export_s),
        bare=gb / bare_s,
        load=gb / median(sender.load_s),
        read=gb / median(sender.read_s),
        peak_extra_mb=sender.peak_extra_mb,
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=QWEN3_1_7B["num_hidden_layers"])
    hf = QWEN3_1_7B | {"num_hidden_layers": options.parse_args().layers}
    spec = spec_of(hf, Path())
    size = sum(prod(shape) for entry in entries(spec, Layout()) for shape in entry.hf_shapes) * DTYPE.itemsize
    console = table_console()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), hf)
        rows = [measure(name, Path(folder), hf, size) for name in LAYOUTS]
        whole, changed = changes(make_plan(spec, Layout(), BUCKET_MB * 2**20, DTYPE.itemsize), Path(folder))
    planning = plan_s()
    console.print(rows_table("weights", rows, TABLE))
    console.print(f"{size / 1e9:.2f} GB; buckets of {BUCKET_MB} MB, the embedding has a bucket of its own")
    console.print(
        f"a version to a replica: {whole.bytes / 1e6:.0f} MB in {whole.seconds:.1f} s; after a step of Adam "
        f"{changed.bytes / 1e6:.0f} MB in {changed.seconds:.1f} s"
    )
    console.print(f"plan of {THOUSAND_RANKS.world_size} ranks and 10^12 parameters: {planning:.2f} s")
    layouts = {row.layout: row.document for row in rows}
    document = {
        **{key: min(row[key] for row in layouts.values()) for key in ("export_ratio", "load_ratio")},
        "plan_s": round(planning, 3),
        "peak_extra_mb": max(row["peak_extra_mb"] for row in layouts.values()),
        "delta_ratio": round(changed.bytes / whole.bytes, 4),
        "delta_time_ratio": round(changed.seconds / whole.seconds, 3),
        "bytes": size,
        "layouts": layouts,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
