"""How much of a device's peak a training step uses, and how much of its memory: the trainer on one rank.

    python -m benchmarks.mfu                                       # Qwen3-1.7B's shape, for a GPU of 80 GB
    python -m benchmarks.mfu --layers 2 --hidden 256 --vocab 32000 --trajectories 8 --median 100 --budget 512

A step of decoupled PPO in bfloat16 on trajectories of log-normal lengths, packed: recomputed log-probs, one
optimizer update. *Tokens* are all that are computed, prompts included. *MFU* is what the model asks for
(``train/tflop``: matrix products, attention over the past only, 3 forward passes for forward and backward,
1 for the log-probs) over the device's peak; what is recomputed beyond that does not count. Of a device
without a known peak, the peak is what a large matrix product reaches.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.bridge import peak_mb, reset_peak
from benchmarks.train_step import batch_of, config_of
from slipstream.backend.megatron.parallel import RankSpec
from slipstream.configs.schema import RunConfig
from slipstream.rollout.network import free_port

PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12}
"""FLOP/s in bfloat16, dense, by a part of the device's name."""


@dataclass(frozen=True)
class Model:
    """Of Qwen3's shape; the defaults are those of Qwen3-1.7B."""

    layers: int = 28
    hidden: int = 2048
    vocab: int = 151_936

    def write(self, folder: Path) -> None:
        """A checkpoint with random weights."""
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
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


@dataclass(frozen=True)
class Found:
    step_s: float
    tokens_per_s: float
    tflops: float
    mfu: float
    memory_gb: float


def peak_flops(device: torch.device) -> float:
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
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return 2 * n**3 / min(took)


def measure(config: RunConfig, lengths: np.ndarray, vocab: int, steps: int) -> tuple[Found, str]:
    """The median of ``steps`` steps, the first of which does not count; and the device's name."""
    from slipstream.backend.trainer.rank import TrainerRank

    host, rng = "127.0.0.1", np.random.default_rng(0)
    trainer = TrainerRank(config, RankSpec(0, 1, host, free_port(host)))
    device, took, tflop = trainer._device, [], 0.0
    on_gpu = device.type == "cuda"
    for number in range(steps + 1):
        texts = [(min(32, n // 2), rng.integers(0, vocab, n)) for n in lengths]
        batch = batch_of(texts, number, rng)
        if number == 1:
            torch.cuda.reset_peak_memory_stats() if on_gpu else reset_peak()
        began = time.perf_counter()
        metrics = trainer.train(batch)
        if on_gpu:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
        tflop = metrics["train/tflop"]
    seconds = median(took[1:])
    memory_gb = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else peak_mb() / 1e3
    tflops = tflop / seconds
    found = Found(seconds, lengths.sum() / seconds, tflops, tflops * 1e12 / peak_flops(device), memory_gb)
    return found, torch.cuda.get_device_name() if on_gpu else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mfu", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=Model.layers)
    parser.add_argument("--hidden", type=int, default=Model.hidden, help="a multiple of 256")
    parser.add_argument("--vocab", type=int, default=Model.vocab)
    parser.add_argument("--trajectories", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--median", type=int, default=2000, help="of their lengths, in tokens")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--layer-spec", choices=("auto", "local", "transformer_engine"), default="auto")
    options = parser.parse_args()
    model = Model(options.layers, options.hidden, options.vocab)
    drawn = np.random.default_rng(0).lognormal(np.log(options.median), 0.6, options.trajectories)
    lengths = np.clip(drawn, 16, options.budget).astype(int)
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder))
        config = config_of(
            Path(folder),
            dtype="bfloat16",
            microbatch_tokens=options.budget,
            recompute=options.recompute,
            layer_spec=options.layer_spec,
        )
        found, device = measure(config, lengths, model.vocab, options.steps)
    table = Table("device", "tokens", "step, s", "tokens/s", "TFLOP/s", "MFU", "memory, GB")
    table.add_row(
        device,
        f"{lengths.sum():,}",
        f"{found.step_s:.3f}",
        f"{found.tokens_per_s:,.0f}",
        f"{found.tflops:.3f}",
        f"{found.mfu:.3f}",
        f"{found.memory_gb:.2f}",
    )
    Console().print(table)
    print(json.dumps({**asdict(found), "device": device, "model": asdict(model), **vars(options)}))


if __name__ == "__main__":
    main()
