"""Model FLOPs utilization (MFU) and memory of a training step: the trainer on one rank.

    python -m benchmarks.mfu                                       # Qwen3-1.7B's shape, for a GPU of 80 GB
    python -m benchmarks.mfu --layers 2 --hidden 256 --vocab 32000 --trajectories 8 --median 100 --budget 512

The step is decoupled PPO in bfloat16 on packed trajectories of log-normal lengths, with one optimizer update,
whose forward pass also gives the proximal log-probs. *Tokens* are all tokens, prompts included. *MFU* is the
arithmetic that the model needs (``train/tflop``: matrix products, causal attention, 3 forward passes for
forward and backward) over the device's peak; recomputed activations do not count. For a device without a
known peak, the peak is what a large matrix product reaches.

``--segments N`` fills every pack with N trajectories of one length. ``--actor`` changes further settings of
``actor``, for example ``--actor '{"lm_head": "chunked", "megatron": {"apply_rope_fusion": false}}'``.
``--profile`` adds what one more step does on a GPU: kernels, waits of the host, and the kernels that take
most of the time.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness import parser, peak_mb, reset_peak
from benchmarks.train_step import batch_of, config_of, lone_rank
from slipstream.backend.batch.train_batch import TrainBatch
from slipstream.backend.monitor.tables import Columns, pairs_table, rows_table, table_console
from slipstream.configs.schema import RunConfig

PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12}
"""Dense bfloat16 FLOP/s by a part of the device's name."""


@dataclass(frozen=True)
class Model:
    """A model of Qwen3's architecture, by default Qwen3-1.7B."""

    layers: int = 28
    hidden: int = 2048
    vocab: int = 151_936

    def write(self, folder: Path) -> None:
        """Write a checkpoint with random weights."""
        config = Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 128,
            num_key_value_heads=self.hidden // 256,
            head_dim=128,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Measured:
    """Median of the steps, and peak memory."""

    step_s: float
    tokens_per_s: float
    tflops: float
    mfu: float
    memory_gb: float


def peak_flops(device: torch.device) -> float:
    """Return the device's peak in bfloat16 FLOP/s."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        known = [peak for part, peak in PEAKS.items() if part in name]
        if known:
            return known[0]
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        torch.matmul(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return 2 * n**3 / min(took)


@dataclass(frozen=True)
class Profile:
    """Counts and times of one step on the GPU."""

    kernels: int
    kernel_s: float
    """Time of all kernels together."""
    waits: int
    """Calls in which the host waits for the GPU."""
    top: list[tuple[str, int, float]]
    """The kernels that take most of the time: name, number, seconds."""


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def profile_of(step: Callable[[], object]) -> Profile:
    """Run ``step`` once more, and return what it does on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    waits = (
        sum(event.count for event in averages if event.key in WAITS) - 1
    )  # the last one is this function's
    on_gpu = [event for event in averages if event.device_type.name == "CUDA"]
    on_gpu.sort(key=lambda event: -event.self_device_time_total)
    return Profile(
        sum(event.count for event in on_gpu),
        sum(event.self_device_time_total for event in on_gpu) / 1e6,
        waits,
        [(event.key[:72], event.count, event.self_device_time_total / 1e6) for event in on_gpu[:12]],
    )


def measure(
    config: RunConfig, lengths: np.ndarray, vocab: int, steps: int, *, profiled: bool = False
) -> tuple[Measured, Profile | None, str]:
    """Measure ``steps`` steps after a first one that does not count. Return also the device's name."""
    trainer, rng = lone_rank(config), np.random.default_rng(0)
    device, took, tflop = trainer._device, [], 0.0
    on_gpu = device.type == "cuda"

    def batch_for(number: int) -> TrainBatch:
        return batch_of([(min(32, n // 2), rng.integers(0, vocab, n)) for n in lengths], number, rng)

    for number in range(steps + 1):
        batch = batch_for(number)
        if number == 1:
            torch.cuda.reset_peak_memory_stats() if on_gpu else reset_peak()
        began = time.perf_counter()
        metrics = trainer.train(batch)
        if on_gpu:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        assert metrics is not None
        tflop = metrics["train/tflop"]
    seconds = median(took[1:])
    memory_gb = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else peak_mb() / 1e3
    tflops = tflop / seconds
    measured = Measured(
        seconds, lengths.sum() / seconds, tflops, tflops * 1e12 / peak_flops(device), memory_gb
    )
    last = batch_for(steps + 1)
    profile = profile_of(lambda: trainer.train(last)) if profiled and on_gpu else None
    return measured, profile, torch.cuda.get_device_name() if on_gpu else "CPU"


def main() -> None:
    described = parser(__doc__)
    described.add_argument("--layers", type=int, default=Model.layers)
    described.add_argument("--hidden", type=int, default=Model.hidden, help="a multiple of 256")
    described.add_argument("--vocab", type=int, default=Model.vocab)
    described.add_argument("--trajectories", type=int, default=64, help="a multiple of 8")
    described.add_argument("--median", type=int, default=2000, help="median length in tokens")
    described.add_argument("--budget", type=int, default=16_384, help="tokens of a micro-batch")
    described.add_argument("--steps", type=int, default=5)
    described.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    described.add_argument("--layer-spec", choices=("auto", "local", "transformer_engine"), default="auto")
    described.add_argument("--segments", type=int, help="trajectories of a micro-batch, all of one length")
    described.add_argument("--actor", type=json.loads, default={}, help="further settings of actor, as JSON")
    described.add_argument("--profile", action="store_true", help="kernels and waits of one more step")
    options = described.parse_args()
    model = Model(options.layers, options.hidden, options.vocab)
    if options.segments:
        lengths = np.full(options.trajectories, options.budget // options.segments)
    else:
        drawn = np.random.default_rng(0).lognormal(np.log(options.median), 0.6, options.trajectories)
        lengths = np.clip(drawn, 16, options.budget).astype(int)
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        actor = {
            "microbatch_tokens": options.budget,
            "recompute": options.recompute,
            "layer_spec": options.layer_spec,
            **options.actor,
        }
        config = config_of(Path(folder), actor, dtype="bfloat16")
        measured, profile, device = measure(
            config, lengths, model.vocab, options.steps, profiled=options.profile
        )
    figures = {
        "tokens": f"{lengths.sum():,}",
        "step": f"{measured.step_s:.3f} s",
        "tokens/s": f"{measured.tokens_per_s:,.0f}",
        "TFLOP/s": f"{measured.tflops:.3f}",
        "MFU": f"{measured.mfu:.3f}",
        "memory": f"{measured.memory_gb:.2f} GB",
    }
    table_console().print(pairs_table(f"a training step on {device}", figures))
    if profile is not None:
        columns: Columns[tuple[str, int, float]] = {
            "kernel": lambda row: row[0],
            "number": lambda row: f"{row[1]:,}",
            "s": lambda row: f"{row[2]:.4f}",
        }
        title = f"{profile.kernels:,} kernels, {profile.kernel_s:.3f} s; {profile.waits} waits of the host"
        table_console().print(rows_table(title, profile.top, columns))
    print(json.dumps({**asdict(measured), "device": device, "model": asdict(model), **vars(options)}))


if __name__ == "__main__":
    main()
